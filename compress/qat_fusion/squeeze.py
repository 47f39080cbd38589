"""Squeeze and excitation with the layer before it and the quantizers in it, as two modules around the gate."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import AVERAGES, called_module, node_kind, walk
from compress.kernels.memory_format import along_axis
from compress.kernels.triton.launch import Kernels, use_triton_eager
from compress.kernels.triton.squeeze import Link, excite, excite_again, fits, squeeze
from compress.qat_fusion.chain import (
    ACTIVATIONS,
    activation_of,
    grid_of,
    has_one_consumer,
    is_live,
    product,
    quantizer_of,
)
from compress.qat_fusion.recompute import Recipe


class FusedSqueezeModule(nn.Module):
    """(layer) -> (activation) -> (quantizer) -> mean over the pixels; the layer and the quantizers are the model's.

    `layer` None: the block begins after another operation. `excited` quantizes the product: it must round too.
    """

    def __init__(
        self,
        layer: nn.Module | None,
        activation: str,
        quantize: nn.Module | None,
        excited: nn.Module,
        kernels: Kernels | None,
    ) -> None:
        super().__init__()
        self.layer, self.activation, self.quantize, self.excited = layer, activation, quantize, excited
        self.kernels: Kernels | None = kernels

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Link | None]:
        """The means (N, C, 1, 1), and what `FusedExciteModule` takes as `kept` and `link`."""
        layer: Any = self.layer
        bias = None
        fused = use_triton_eager(x, self.kernels) and self._live()
        if layer is not None:
            bias = layer.bias
            x = product(layer, x, weight, None if fused else bias, self.kernels)
        if fused and fits(x):
            return squeeze(
                x, bias, self.activation, None if self.quantize is None else grid_of(quantizer_of(self.quantize))
            )
        if fused and bias is not None:
            x = x + along_axis(bias.to(x.dtype), x, 1)
        x = ACTIVATIONS[self.activation](x) if self.activation else x
        return (x if self.quantize is None else self.quantize(x)).mean((2, 3), keepdim=True), x, None

    def _live(self) -> bool:
        return all(is_live(quantizer_of(module)) for module in (self.quantize, self.excited) if module is not None)


class FusedExciteModule(nn.Module):
    """Product with the gate (N, C, 1, 1) -> quantizer."""

    def __init__(self, quantize: nn.Module) -> None:
        super().__init__()
        self.quantize = quantize
        self.can_recompute, self.gives_recipe = True, False

    def forward(self, kept: Tensor, gate: Tensor, link: Link | None) -> Tensor | tuple[Tensor, Recipe | None]:
        if link is None:
            y: Tensor = self.quantize(gate * kept)
            return (y, None) if self.gives_recipe else y
        grid = grid_of(quantizer_of(self.quantize))
        y = excite(kept, gate, grid, link)
        if not self.gives_recipe:
            return y
        compute = partial(excite_again, low=grid.low, high=grid.high, activation=link.activation)
        return y, Recipe.of(y, compute, kept, gate, grid.amax, link.bias) if torch.is_grad_enabled() else None


def fuse_squeezes(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace every squeeze and excitation whose product is quantized by two modules and its gate, in place."""
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node in quantizing:
        block = _block_of(node, quantizing)
        if block is not None:
            found.update(_fuse(graph_module, block, quantizing, kernels))
    return found


class _Block(NamedTuple):
    """The nodes of a squeeze and excitation: `gate` and `scaled` are operands of `product`."""

    quantize: fx.Node
    product: fx.Node
    gate: fx.Node
    scaled: fx.Node
    activation: str
    layer: fx.Node | None
    averaged: fx.Node | None
    pool: fx.Node

    @property
    def inner(self) -> list[fx.Node]:
        found = [self.scaled] if self.activation else []
        return found if self.layer is None else [*found, self.layer]


def _block_of(quantize: fx.Node, quantizing: Mapping[fx.Node, nn.Module]) -> _Block | None:
    product = quantize.all_input_nodes[0]
    if node_kind(product) != "mul" or not has_one_consumer(product) or len(product.all_input_nodes) != 2:
        return None
    for gate, scaled in (product.all_input_nodes, product.all_input_nodes[::-1]):
        if not _scales(gate, scaled) or len(scaled.users) != 2:
            continue
        (pool,) = (user for user in scaled.users if user is not product)
        averaged = None
        if pool in quantizing and has_one_consumer(pool):
            averaged, (pool,) = pool, pool.users
        if not _averages_pixels(pool) or not _leads_to(pool, gate):
            continue
        if any(
            quantizer_of(quantizing[node]).format.axis is not None for node in (quantize, averaged) if node is not None
        ):
            continue
        activation = activation_of(scaled)
        source = scaled.all_input_nodes[0] if activation else scaled
        alone = source is scaled or has_one_consumer(source)
        layer = source if alone and _is_convolution(source) else None
        return _Block(quantize, product, gate, scaled, activation, layer, averaged, pool)
    return None


def _scales(gate: fx.Node, scaled: fx.Node) -> bool:
    one, other = (tuple(node.meta.get("shape") or ()) for node in (gate, scaled))
    return len(other) == 4 and one == (*other[:2], 1, 1)


def _averages_pixels(node: fx.Node) -> bool:
    """True if a node computes the mean of each channel of each image, (N, C, 1, 1)."""
    kind = node_kind(node)
    if kind not in AVERAGES or kind == "avg_pool":
        return False
    if kind == "adaptive_avg_pool":
        module = called_module(node)
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            return False
        size = node.args[1] if module is None and len(node.args) > 1 else getattr(module, "output_size", None)
        return size in (1, (1, 1), [1, 1])
    given: dict[str, Any] = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | dict(node.kwargs)
    dims = given.get("dim")
    return (
        set(given) <= {"input", "dim", "keepdim"}
        and given.get("keepdim") is True
        and isinstance(dims, (tuple, list))
        and {dim % 4 for dim in dims} == {2, 3}
    )


def _leads_to(start: fx.Node, end: fx.Node) -> bool:
    return any(node is start for node in walk([end], lambda node: () if node < start else node.all_input_nodes))


def _is_convolution(node: fx.Node) -> bool:
    module = called_module(node)
    return isinstance(getattr(module, "layer", None), nn.Conv2d) and not getattr(module, "is_quantizer", False)


def _fuse(
    graph_module: fx.GraphModule, block: _Block, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    graph, inner = graph_module.graph, block.inner
    averaged = None if block.averaged is None else quantizing[block.averaged]
    layer = None if block.layer is None else called_module(block.layer).layer
    excite = FusedExciteModule(quantizing[block.quantize])
    squeeze = FusedSqueezeModule(layer, block.activation, averaged, excite.quantize, kernels)
    names = [f"fused_squeezes.{block.quantize.name}.{part}" for part in ("squeeze", "excite")]
    graph_module.add_submodule(names[0], squeeze)
    graph_module.add_submodule(names[1], excite)
    with graph.inserting_before(inner[-1] if inner else block.averaged or block.pool):
        source = inner[-1].all_input_nodes[0] if inner else block.scaled
        squeezed = graph.call_module(names[0], (source,), {} if block.layer is None else dict(block.layer.kwargs))
        pooled, kept, link = (graph.call_function(operator.getitem, (squeezed, i)) for i in range(3))
    with graph.inserting_before(block.quantize):
        excited = graph.call_module(names[1], (kept, block.gate, link))
    for old, new in ((block.pool, pooled), (block.quantize, excited)):
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
    kept.meta.update(block.scaled.meta)
    for node in (block.quantize, block.product, block.pool, block.averaged, *inner):
        if node is not None:
            graph.erase_node(node)
    found: dict[nn.Module, tuple[str, ...]] = {quantizer_of(excite.quantize): (block.product.name,)}
    if averaged is not None:
        found[quantizer_of(averaged)] = (*(node.name for node in inner[::-1]), block.pool.name)
    return found
