"""(Residual add ->) layer norm -> quantizer as one operation."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind, node_module
from compress.kernels.triton.launch import Kernels, use_triton
from compress.kernels.triton.layer_norm import WIDEST, norm_again, norm_quantize
from compress.qat_fusion.chain import adds_alike, called_module, quantizer_of
from compress.qat_fusion.recompute import Recipe, uses_recipes
from compress.qat_fusion.weights import grid_of, is_live, weight_dtype


class FusedNormModule(nn.Module):
    """(add) -> layer norm over the last axis -> quantizer; weight and bias are read from the graph.

    `quantize` only quantizes; `keep_sum`: the sum is a result too; `feeds_only_matmuls`: every consumer is a matrix
    product, in autocast's type; `can_recompute`: the result has the type in which a layer keeps it; `gives_recipe`: the
    recipe is the last result.
    """

    def __init__(
        self, eps: float, quantize: nn.Module, keep_sum: bool, feeds_only_matmuls: bool, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.quantize = quantize
        self.keep_sum = keep_sum
        self.feeds_only_matmuls = feeds_only_matmuls
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = feeds_only_matmuls, False

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor | Recipe | None, ...]:
        """The quantized norm of x + added, (..., C); with x + added and the recipe, if they are results too.

        Weight and bias are (C,).
        """
        quantizer = quantizer_of(self.quantize)
        if is_live(quantizer) and self._takes(x, added):
            grid, dtype = grid_of(quantizer), self._dtype(x, added)
            again = self.gives_recipe and (added is None or self.keep_sum) and uses_recipes(x, self.kernels)
            options: dict[str, Any] = {"eps": self.eps, "dtype": dtype, "added": added}
            found = norm_quantize(x, weight, bias, grid, **options, keep_sum=self.keep_sum, keep_statistics=again)
            y, total = found[0], found[1] if self.keep_sum else x
            compute = partial(norm_again, low=grid.low, high=grid.high, dtype=dtype)
            statistics = found[-2:]  # by index: to the compiler of torch 2.11 `*rest` is a tuple, that has no pop
            recipe = Recipe.of(y, compute, total, *statistics, weight, grid.amax, bias) if again else None
            return self._results(y, total, recipe)
        x = x if added is None else x + added
        y = self.quantize(F.layer_norm(x, weight.shape, weight, bias, self.eps))
        return self._results(y, x, None)

    def _results(self, y: Tensor, total: Tensor, recipe: Recipe | None) -> Tensor | tuple[Tensor | Recipe | None, ...]:
        results = (y, *([total] if self.keep_sum else []), *([recipe] if self.gives_recipe else []))
        return results if len(results) > 1 else y

    def _dtype(self, x: Tensor, added: Tensor | None) -> torch.dtype:
        """Type of the result: float32 under autocast, as of torch's norm, unless products alone consume it."""
        if torch.is_autocast_enabled(x.device.type):
            return weight_dtype(x) if self.feeds_only_matmuls else torch.float32
        return x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)

    def _takes(self, x: Tensor, added: Tensor | None) -> bool:
        """True if the kernel runs: it is asked for or on a GPU, and type and layout fit."""
        both = [x] if added is None else [x, added]
        fits = all(t.is_contiguous() and t.dtype in _FLOATS and t.shape == x.shape for t in both)
        return fits and x.numel() > 0 and use_triton(x, self.kernels)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def fuse_norms(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace every quantized layer norm, and the add before it, in place; return the fused nodes by quantizer."""
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, quantize in quantizing.items():
        quantizer = quantizer_of(quantize)
        norm = _norm_of(node)
        if norm is not None and quantizer.format.axis is None:
            found[quantizer] = _fuse(graph_module, node, norm, quantize, kernels)
    return found


class _Norm(NamedTuple):
    """A layer norm over the last axis, `width` wide; weight and bias are paths, "" = there is none."""

    node: fx.Node
    width: int
    eps: float
    weight: str
    bias: str


def _norm_of(quantize: fx.Node) -> _Norm | None:
    """The norm that a node quantizes, if other nodes read its shape at most."""
    node = quantize.all_input_nodes[0]
    if node_kind(node) != "layer_norm" or any(user is not quantize and not _asks_shape(user) for user in node.users):
        return None
    found = _of_module(node) if node.op == "call_module" else _of_call(node)
    return found if found is not None and found.weight and found.width <= WIDEST else None


def _of_module(node: fx.Node) -> _Norm | None:
    module, path = node_module(node), str(node.target)
    if type(module) is not nn.LayerNorm or module._forward_hooks or module._forward_pre_hooks:
        return None
    names = [f"{path}.{name}" if getattr(module, name) is not None else "" for name in ("weight", "bias")]
    shape = module.normalized_shape
    return _Norm(node, shape[0], module.eps, *names) if len(shape) == 1 else None


def _of_call(node: fx.Node) -> _Norm | None:
    if node.target is not F.layer_norm:
        return None
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given: dict[str, Any] = {"eps": 1e-5, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    shape, eps, tensors = given["normalized_shape"], given["eps"], [given.get("weight"), given.get("bias")]
    if any(tensor is not None and tensor.op != "get_attr" for tensor in tensors) or not isinstance(eps, float):
        return None
    if not isinstance(shape, (tuple, list)) or len(shape) != 1 or not isinstance(shape[0], int):
        return None
    return _Norm(node, shape[0], eps, *("" if tensor is None else str(tensor.target) for tensor in tensors))


def _fuse(
    graph_module: fx.GraphModule, node: fx.Node, norm: _Norm, quantize: nn.Module, kernels: Kernels | None
) -> tuple[str, ...]:
    """Replace the add, if there is one, the norm and the node that quantizes it."""
    graph, first = graph_module.graph, norm.node
    source = norm.node.all_input_nodes[0]
    inputs: tuple[fx.Node, ...] = (source,)
    if adds_alike(source):
        first, inputs = source, tuple(source.all_input_nodes)
    keep_sum = first is source and len(source.users) > 1
    matmuls = all(getattr(called_module(consumer), "layer", None) is not None for consumer in node.users)
    name = f"fused_norms.{node.name}"
    graph_module.add_submodule(name, FusedNormModule(norm.eps, quantize, keep_sum, matmuls, kernels))
    with graph.inserting_before(first):
        weight = graph.get_attr(norm.weight)
        bias = graph.get_attr(norm.bias) if norm.bias else None
        fused = graph.call_module(name, (inputs[0], weight, bias, *inputs[1:]))
        value = graph.call_function(operator.getitem, (fused, 0)) if keep_sum else fused
        total = graph.call_function(operator.getitem, (fused, 1)) if keep_sum else None
    value.meta.update(node.meta)
    for user in list(norm.node.users):
        user.replace_input_with(norm.node, value)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    graph.erase_node(norm.node)
    names = [norm.node.name]
    if first is source:
        if total is not None:
            total.meta.update(source.meta)
            source.replace_all_uses_with(total)
        graph.erase_node(source)
        names.insert(0, source.name)
    return tuple(names)


def _asks_shape(node: fx.Node) -> bool:
    """True if a node reads the shape of its input, and not its values."""
    return (node.target is getattr and node.args[1:] == ("shape",)) or node.target in {"size", "dim"}
