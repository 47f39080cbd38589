"""Linear layer -> activation -> global response norm (ConvNeXt V2) -> quantizer as one operation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind
from compress.kernels.triton.launch import Kernels, use_triton
from compress.kernels.triton.squeeze import fits, response_again, response_quantize
from compress.qat_fusion.chain import ACTIVATIONS, activation_of, called_module, has_one_consumer, product, quantizer_of
from compress.qat_fusion.recompute import Recipe, recomputed, uses_recipes
from compress.qat_fusion.weights import grid_of, is_live

_PIXELS = (1, 2)  # axes of (N, H, W, C)
_LAST, _FIRST = (0, 3, 1, 2), (0, 2, 3, 1)


class FusedResponseModule(nn.Module):
    """layer -> activation -> (dropout) -> global response norm -> quantizer, on (N, H, W, C); all are the model's own.

    `gives_recipe`: the recipe of the result is a result too.
    """

    def __init__(
        self,
        layer: nn.Module,
        activation: str,
        dropout: nn.Dropout | None,
        eps: float,
        quantize: nn.Module,
        kernels: Kernels | None,
    ) -> None:
        super().__init__()
        self.layer, self.activation, self.dropout, self.eps = layer, activation, dropout, eps
        self.quantize = quantize
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = True, False

    def forward(
        self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None = None, recipe: Recipe | None = None
    ) -> Tensor | tuple[Tensor, Recipe | None]:
        """The quantized norm; scale and shift are (C,), other arguments and the results as of `FusedChainModule`."""
        layer: Any = self.layer
        dropping = self.dropout is not None and self.dropout.training and self.dropout.p > 0
        fused = is_live(quantizer_of(self.quantize)) and not dropping and use_triton(x, self.kernels)
        with recomputed(x, recipe):
            made = product(layer, x, weight, None if fused else layer.bias, self.kernels)
        if fused and fits(made.permute(_LAST)):
            return self._fused(made, scale, shift)
        made = made if not fused or layer.bias is None else made + layer.bias.to(made.dtype)
        y = ACTIVATIONS[self.activation](made)
        y = y if self.dropout is None else self.dropout(y)
        norms = y.norm(p=2, dim=_PIXELS, keepdim=True)
        ratios = norms / (norms.mean(dim=-1, keepdim=True) + self.eps)
        y = y + torch.addcmul(shift.view(1, 1, 1, -1), scale.view(1, 1, 1, -1), y * ratios)
        y = self.quantize(y)
        return (y, None) if self.gives_recipe else y

    def _fused(self, made: Tensor, scale: Tensor, shift: Tensor) -> Tensor | tuple[Tensor, Recipe | None]:
        grid, bias, activation = grid_of(quantizer_of(self.quantize)), self.layer.bias, self.activation
        assert bias is None or isinstance(bias, Tensor)
        images = made.permute(_LAST)
        y, gain = response_quantize(images, scale, shift, grid, bias=bias, activation=activation, eps=self.eps)
        y = y.permute(_FIRST)
        if not self.gives_recipe:
            return y
        compute = partial(_again, low=grid.low, high=grid.high, activation=activation)
        kept = (made, gain, shift, grid.amax, bias)
        return y, Recipe.of(y, compute, *kept) if uses_recipes(made, self.kernels) else None


def _again(made: Tensor, gain: Tensor, *tensors: Tensor, low: int, high: int, activation: str) -> Tensor:
    numbers: dict[str, Any] = {"low": low, "high": high, "activation": activation}
    return response_again(made.permute(_LAST), gain, *tensors, **numbers).permute(_FIRST)


def fuse_responses(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace every quantized global response norm with the layer before it, in place; return nodes by quantizer.

    `quantizing` are nodes of chains that add two tensors and quantize the sum.
    """
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, quantize in quantizing.items():
        norm = _norm_of(node)
        if norm is not None and quantizer_of(quantize).format.axis is None:
            found[quantizer_of(quantize)] = _fuse(graph_module, node, norm, quantize, kernels)
    return found


class _Norm(NamedTuple):
    """`nodes` from the last one back to the layer; `scale`, `shift`: the (C,) tensors of the graph."""

    nodes: list[fx.Node]
    dropout: nn.Dropout | None
    activation: str
    eps: float
    scale: fx.Node
    shift: fx.Node


def _norm_of(quantize: fx.Node) -> _Norm | None:
    """The norm whose sum with its input a node quantizes, as timm writes it."""
    layers = [getattr(called_module(user), "layer", None) for user in quantize.users]
    source, last = quantize.args if len(quantize.args) == 2 else (None, None)
    if not all(layers) or not isinstance(source, fx.Node) or not isinstance(last, fx.Node):
        return None  # with other readers than products, it would have another type
    if last.target is not torch.addcmul or last.kwargs or len(last.args) != 3:
        return None
    shift, scale, scaled = last.all_input_nodes
    if node_kind(scaled) != "mul" or scaled.all_input_nodes[0] is not source or len(scaled.all_input_nodes) != 2:
        return None
    ratio = scaled.all_input_nodes[1]
    if node_kind(ratio) != "div" or len(ratio.all_input_nodes) != 2:
        return None
    norm, add = ratio.all_input_nodes
    mean = add.all_input_nodes[0] if len(add.all_input_nodes) == 1 else None
    if mean is None or node_kind(add) != "add" or not isinstance(add.args[1], float) or mean.args[0] is not norm:
        return None
    if mean.target != "mean" or dict(mean.kwargs) != {"dim": -1, "keepdim": True} or norm.target != "norm":
        return None
    if norm.args != (source,) or dict(norm.kwargs) != {"p": 2, "dim": _PIXELS, "keepdim": True}:
        return None
    values = [_channels(node, source) for node in (scale, shift)]
    inner = _before(source)
    alone = len(source.users) == 3 and len(norm.users) == 2 and all(map(has_one_consumer, (last, scaled, ratio, add)))
    if inner is None or None in values or not alone or not has_one_consumer(mean):
        return None
    nodes = [last, scaled, ratio, add, mean, norm, *inner]
    dropout = called_module(source) if len(inner) == 3 else None
    return _Norm(nodes, dropout, activation_of(inner[-2]), add.args[1], *(value for value in values if value))


def _channels(view: fx.Node, source: fx.Node) -> fx.Node | None:
    """The (C,) parameter that a node shows as (1, 1, 1, C)."""
    shape = tuple(source.meta.get("shape") or ())
    tensor = view.all_input_nodes[0] if view.target in ("view", "reshape") else None
    if tensor is None or tensor.op != "get_attr" or len(shape) != 4:
        return None
    return tensor if tuple(view.meta.get("shape") or ()) == (1, 1, 1, shape[-1]) else None


def _before(source: fx.Node) -> list[fx.Node] | None:
    """[(dropout), activation, linear layer whose weight is quantized with others]."""
    found = []
    if node_kind(source) in {"dropout", "identity"} and type(called_module(source)) is nn.Dropout:
        found, source = [source], source.all_input_nodes[0]
        if not has_one_consumer(source):
            return None
    layer = source.all_input_nodes[0] if activation_of(source) else None
    module = None if layer is None else called_module(layer)
    if layer is None or getattr(module, "is_quantizer", False) or not has_one_consumer(layer):
        return None
    return [*found, source, layer] if isinstance(getattr(module, "layer", None), nn.Linear) else None


def _fuse(
    graph_module: fx.GraphModule, node: fx.Node, norm: _Norm, quantize: nn.Module, kernels: Kernels | None
) -> tuple[str, ...]:
    """Replace the nodes of a norm by one module."""
    graph, layer = graph_module.graph, norm.nodes[-1]
    name = f"fused_responses.{node.name}"
    module = FusedResponseModule(called_module(layer).layer, norm.activation, norm.dropout, norm.eps, quantize, kernels)
    graph_module.add_submodule(name, module)
    with graph.inserting_before(node):
        inputs = (layer.all_input_nodes[0], norm.scale, norm.shift)
        fused = graph.call_module(name, inputs, dict(layer.kwargs))
    fused.meta.update(node.meta)
    node.replace_all_uses_with(fused)
    for old in (node, *norm.nodes):
        graph.erase_node(old)
    return tuple(old.name for old in norm.nodes[::-1])
