"""(Residual add ->) layer norm -> quantizer as one operation: where transformers spend the time of their backward pass.

The stream of residuals is float32 under autocast, so each layer norm's backward pass moves more than any other
operation of the network: the gradient of the rounded result is masked and written, read for the norm's three sums,
added to the gradient that goes around the norm, and written once more in half precision for the layer that was added.
One kernel (`fused_norm_triton`) reads what it needs once and writes both: it computes the normalized values, and which
of them saturated, again from the sum, its mean and its deviation, and sums the gradients of weight and bias on the way.

Forward is torch's: the same numbers as the plain path's, and its compiler fuses sums, norm and rounding well.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind, node_module
from compress.kernels.epilogue import Kernels, by_hand, in_graph
from compress.qat_fusion.chain import adds_alike
from compress.qat_fusion.weights import is_live, weight_dtype
from compress.quantization.quantizer import Quantizer

WIDEST = 2048
"""Numbers of a row, at most, that the kernel holds."""


class FusedNormModule(nn.Module):
    """(add) -> layer norm over the last axis -> quantizer; weight and bias are read from the graph.

    Args:
        eps: of the norm.
        rounding: a module that rounds, and has the `quantizer`.
        kept: whether the sum is a result too.
        multiplied: whether all readers of the rounded result multiply it, in autocast's type.
        kernels: as of `fuse_for_training`.
    """

    def __init__(self, eps: float, rounding: nn.Module, kept: bool, multiplied: bool, kernels: Kernels | None) -> None:
        super().__init__()
        self.eps = eps
        self.rounding = rounding
        self.kept = kept
        self.multiplied = multiplied
        self.kernels: Kernels | None = kernels

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The rounded norm of x + added, or (that, x + added).

        Args:
            x: (..., C).
            weight: (C,).
            bias: (C,); None = there is none.
            added: shape of `x`; None = nothing.
        """
        quantizer = cast(Quantizer, self.rounding.quantizer)
        if is_live(quantizer) and self._takes(x, added):
            from compress.kernels.triton import layer_norm as fused_norm_triton  # Triton is not installed everywhere

            dtype = self._dtype(x, added)
            numbers = (self.eps, quantizer.format.low, quantizer.format.high, dtype, self.kept)
            result = fused_norm_triton.NormQuantize.apply(x, added, weight, bias, quantizer.amax, *numbers)
            return cast("Tensor | tuple[Tensor, Tensor]", result)
        x = x if added is None else x + added
        y = cast(Tensor, self.rounding(F.layer_norm(x, weight.shape, weight, bias, self.eps)))
        return (y, x) if self.kept else y

    def _dtype(self, x: Tensor, added: Tensor | None) -> torch.dtype:
        """Of the result: under autocast a layer norm's is float32, and what multiplies it makes it narrower."""
        if torch.is_autocast_enabled(x.device.type):
            return weight_dtype(x) if self.multiplied else torch.float32
        return x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)

    def _takes(self, x: Tensor, added: Tensor | None) -> bool:
        """Whether the kernel runs: where it is asked for, or on a GPU, and type and layout fit."""
        both = [x] if added is None else [x, added]
        fits = all(t.is_contiguous() and t.dtype in _FLOATS and t.shape == x.shape for t in both)
        return fits and x.numel() > 0 and (in_graph(x, self.kernels) or by_hand(x, self.kernels))


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def fuse_norms(
    graph_module: fx.GraphModule, roundings: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Put one module in the place of every layer norm that is rounded, and of the add before it.

    Args:
        graph_module: changed in place.
        roundings: nodes that round what they read and do nothing else, each with its module (`quantizer`).
        kernels: as of `fuse_for_training`.

    Returns:
        For each quantizer behind such a norm: the names of the nodes that became one module with it.
    """
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, rounding in roundings.items():
        quantizer = cast(Quantizer, rounding.quantizer)
        norm = _norm_of(node)
        if norm is not None and quantizer.format.axis is None:
            found[quantizer] = _fuse(graph_module, node, norm, rounding, kernels)
    return found


class _Norm(NamedTuple):
    """A layer norm over the last axis.

    Attributes:
        node: itself.
        width: numbers that it normalizes together.
        eps: added to the variance.
        weight, bias: where the graph's module has them; "" = there is none.
    """

    node: fx.Node
    width: int
    eps: float
    weight: str
    bias: str


def _norm_of(rounding: fx.Node) -> _Norm | None:
    """The norm that a node rounds, if nothing else reads more than its shape."""
    node = rounding.all_input_nodes[0]
    if node_kind(node) != "layer_norm" or any(user is not rounding and not _asks_shape(user) for user in node.users):
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
    graph_module: fx.GraphModule, node: fx.Node, norm: _Norm, rounding: nn.Module, kernels: Kernels | None
) -> tuple[str, ...]:
    """Replace the add, if there is one, the norm and the node that rounds it."""
    graph, first = graph_module.graph, norm.node
    source = norm.node.all_input_nodes[0]
    inputs: tuple[fx.Node, ...] = (source,)
    if adds_alike(source):
        first, inputs = source, tuple(source.all_input_nodes)
    kept = first is source and len(source.users) > 1
    multiplied = all(getattr(_module(reader), "layer", None) is not None for reader in node.users)
    name = f"fused_norms.{node.name}"
    graph_module.add_submodule(name, FusedNormModule(norm.eps, rounding, kept, multiplied, kernels))
    with graph.inserting_before(first):
        weight = graph.get_attr(norm.weight)
        bias = graph.get_attr(norm.bias) if norm.bias else None
        fused = graph.call_module(name, (inputs[0], weight, bias, *inputs[1:]))
        value = graph.call_function(operator.getitem, (fused, 0)) if kept else fused
        total = graph.call_function(operator.getitem, (fused, 1)) if kept else None
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
    """Whether a node wants the shape of what it reads, and not its values."""
    return (node.target is getattr and node.args[1:] == ("shape",)) or node.target in {"size", "dim"}


def _module(node: fx.Node) -> Any:
    return node_module(node) if node.op == "call_module" else None
