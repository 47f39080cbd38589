"""Attention in quantization-aware training without its scores: softmax(s q k^T), rounded, times v, in one kernel.

The placement quantizes q, k, v and the probabilities, so attention is opened into explicit products
(`graph.attention`), and a training step writes and reads what flash attention never writes: scores, probabilities,
rounded probabilities and three gradients, each of (heads, tokens, tokens). `fuse_attention` finds matmul -> (scale) ->
softmax -> quantizer -> (dropout) -> matmul in which nobody else reads what lies between, and puts one module in their
place: Triton kernels (`fused_attention_triton`) in half precision on a GPU, the operations one by one elsewhere.

The result is that of the plain path up to rounding. The probabilities are rounded to the same grid; what differs is
what is rounded: scores and probabilities stay float32, where autocast writes the scores in half precision, and
exponentials, sums and the division by a step are those of the kernel. A probability within that precision of a tie may
round to the other neighbour, also in the backward pass, which computes it again. The rounded probabilities enter the
product as exact integers; the plain path writes them in half precision.

Queries, keys and values that are the three parts of what one linear layer wrote are read there, and rounded, with the
result, by the same operation (`fused_attention_packed`); others by the chains they are in.

Plain stays, with the reason: a mask that is added, scores multiplied by a tensor, and what is no such chain. While the
quantizer is disabled or watched, and while dropout drops, the module computes the operations one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind, node_module
from compress.kernels.epilogue import Kernels, by_hand, in_graph
from compress.qat_fusion.weights import is_live, weight_dtype
from compress.quantization.quantizer import Quantizer

WIDEST = 256
"""Numbers of a query or of a value, at most, that the kernels hold."""

_MATMULS = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__")
_SOFTMAXES = (F.softmax, torch.softmax, "softmax")


class FusedAttentionModule(nn.Module):
    """matmul -> (scale) -> softmax -> quantizer -> (dropout) -> matmul.

    Args:
        scaling: what the scores are multiplied by.
        rounding: a module that rounds probabilities, and has the `quantizer`.
        dropout: of the rounded probabilities; None = there is none.
        kernels: as of `fuse_for_training`; None = Triton on a GPU in half precision.
    """

    def __init__(
        self, scaling: float, rounding: nn.Module, dropout: nn.Dropout | None, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.rounding = rounding
        self.dropout = dropout
        self.kernels: Kernels | None = kernels

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attended values, (..., tokens, E).

        Args:
            query: (..., tokens, D).
            key: (..., D, keys), transposed as the product takes it.
            value: (..., keys, E).
        """
        quantizer = cast(Quantizer, self.rounding.quantizer)
        if self.takes(query):
            from compress.kernels.triton import (
                attention_launch as fused_attention_launch,  # Triton is not installed everywhere
            )

            dtype = weight_dtype(query)
            q, k, v = [t if t.dtype == dtype else t.to(dtype) for t in (query, key.transpose(-2, -1), value)]
            if fused_attention_launch.fits(q, k, v):
                return fused_attention_launch.attention(q, k, v, quantizer.amax, self.scaling, quantizer.format.high)
        weights = self.rounding(torch.softmax(torch.matmul(query, key) * self.scaling, dim=-1))
        return torch.matmul(weights if self.dropout is None else self.dropout(weights), value)

    def takes(self, query: Tensor) -> bool:
        """Whether Triton kernels run: where they are asked for, or on a GPU in half precision; never with dropout."""
        dropping = self.dropout is not None and self.dropout.training and self.dropout.p > 0
        if dropping or not is_live(cast(Quantizer, self.rounding.quantizer)):
            return False
        if self.kernels is None and weight_dtype(query).itemsize != 2:
            return False
        return query.dtype != torch.float64 and (in_graph(query, self.kernels) or by_hand(query, self.kernels))


class PackedAttentionModule(nn.Module):
    """Attention of queries, keys and values that one linear layer computed, with the roundings around it.

    Args:
        attention: what it is but for them.
        parts: what rounds queries, keys and values, each with its `quantizer`, of one format; empty = nothing does.
        result: what rounds the result, with its `quantizer`; None = nothing does.
    """

    def __init__(self, attention: FusedAttentionModule, parts: Sequence[nn.Module], result: nn.Module | None) -> None:
        super().__init__()
        self.attention = attention
        self.parts = nn.ModuleList(parts)
        self.result = result

    def forward(self, packed: Tensor) -> Tensor:
        """The attended values, (B, tokens, heads, D).

        Args:
            packed: (3, B, heads, tokens, D).
        """
        attention, qkv = self.attention, packed.permute(1, 3, 0, 2, 4)
        roundings = [*self.parts, *([] if self.result is None else [self.result]), attention.rounding]
        ours = [cast(Quantizer, rounding.quantizer) for rounding in roundings]
        if attention.takes(packed) and packed.dtype == weight_dtype(packed) and all(map(is_live, ours)):
            from compress.kernels.triton import (
                attention_packed as fused_attention_packed,  # Triton is not installed everywhere
            )

            if fused_attention_packed.packed_fits(qkv):
                grids = [fused_attention_packed.Grid(q.amax, q.format.low, q.format.high) for q in ours]
                parts = (grids[0], grids[1], grids[2]) if len(self.parts) else None
                result = None if self.result is None else grids[-2]
                return fused_attention_packed.packed_attention(qkv, grids[-1], attention.scaling, parts, result)
        q, k, v = packed.unbind(0)
        if len(self.parts):
            q, k, v = [rounding(part) for rounding, part in zip(self.parts, (q, k, v), strict=True)]
        attended = cast(Tensor, attention(q, k.transpose(-2, -1), v)).transpose(1, 2)
        return attended if self.result is None else cast(Tensor, self.result(attended))


def fuse_attention(
    graph_module: fx.GraphModule, roundings: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[tuple[str, ...], str]]:
    """Put one module in the place of every attention whose probabilities are rounded.

    Args:
        graph_module: changed in place.
        roundings: nodes that round what they read and do nothing else, each with its module (`quantizer`).
        kernels: as of `fuse_for_training`.

    Returns:
        For each quantizer behind a softmax, and for those before it that became one module with it: the nodes that
        became one module with it, none where they did not; and why.
    """
    found: dict[nn.Module, tuple[tuple[str, ...], str]] = {}
    weights = [node for node in roundings if node_kind(node.all_input_nodes[0]) == "softmax"]
    for node in weights:
        rounding = roundings[node]
        quantizer = cast(nn.Module, rounding.quantizer)
        try:
            names, fused = _fuse(graph_module, node, rounding, kernels)
            found[quantizer] = (names, "")
            found.update(_pack(graph_module, fused, names[-1], roundings))
        except _RefusalError as refusal:
            found[quantizer] = ((), f"attention stays open: {refusal}")
    return found


class _RefusalError(Exception):
    """Why an attention is not fused."""


def _fuse(
    graph_module: fx.GraphModule, node: fx.Node, rounding: nn.Module, kernels: Kernels | None
) -> tuple[tuple[str, ...], fx.Node]:
    """Replace the attention around a node that rounds.

    Returns:
        (names of the nodes that were replaced, in order, the node in their place)
    """
    if cast(Quantizer, rounding.quantizer).format.axis is not None:
        raise _RefusalError("the probabilities have a range for every channel")
    before, scaling = _before(node)
    dropout, product = _behind(node)
    for old in before:
        if len(old.users) != 1:
            raise _RefusalError(f"{old.name} has {len(old.users)} readers")
    source = before[-1]
    _check_shapes(*(cast(fx.Node, factor) for factor in (*source.args, product.args[1])))
    name = f"fused_attentions.{node.name}"
    drop = None if dropout is None else cast(nn.Dropout, node_module(dropout))
    graph_module.add_submodule(name, FusedAttentionModule(scaling, rounding, drop, kernels))
    with graph_module.graph.inserting_before(product):
        fused = graph_module.graph.call_module(name, (*source.args, product.args[1]))
    fused.meta.update(product.meta)
    product.replace_all_uses_with(fused)
    behind = [product] if dropout is None else [product, dropout]
    for old in (*behind, node, *before):  # from the end back: each has lost its only reader
        graph_module.graph.erase_node(old)
    return tuple(old.name for old in (*before[::-1], *behind[::-1])), fused


def _pack(
    graph_module: fx.GraphModule, fused: fx.Node, product: str, roundings: Mapping[fx.Node, nn.Module]
) -> dict[nn.Module, tuple[tuple[str, ...], str]]:
    """Let an attention read what a linear layer computed, if query, key and value are its parts, with the roundings.

    Args:
        graph_module: changed in place.
        fused: the attention.
        product: name of the node that was its end.
        roundings: as of `fuse_attention`.

    Returns:
        For each quantizer that became part of it: the node that it rounds, and "".
    """
    parts = _parts_of(fused, roundings)
    if parts is None:
        return {}
    rounded = [part.rounded for part in parts if part.rounded is not None]
    readers = list(fused.users)
    last = readers[0] if len(readers) == 1 and _rounds_all(readers[0], roundings) else None
    result = None if last is None else roundings[last]
    names = [node.all_input_nodes[0].name for node in rounded] + ([] if last is None else [product])
    modules = [roundings[node] for node in rounded]
    name = str(fused.target).replace("fused", "packed", 1)
    attention = cast(FusedAttentionModule, graph_module.get_submodule(str(fused.target)))
    graph_module.add_submodule(name, PackedAttentionModule(attention, modules, result))
    graph = graph_module.graph
    with graph.inserting_before(fused):
        packed = graph.call_module(name, (parts[0].source,))
        back = graph.call_method("transpose", (packed, 1, 2))  # what follows transposes again, and nothing is moved
    (last or fused).replace_all_uses_with(back)
    back.meta.update(fused.meta)
    packed.meta.update(fused.meta)
    if "shape" in packed.meta:
        first, heads, tokens, width = packed.meta["shape"]
        packed.meta["shape"] = (first, tokens, heads, width)
    for old in (last, fused, *(node for part in parts for node in part.nodes)):  # from the end back
        if old is not None and not old.users:
            graph.erase_node(old)
    absorbed = [*modules, *([] if result is None else [result])]
    return {cast(nn.Module, m.quantizer): ((node,), "") for m, node in zip(absorbed, names, strict=True)}


class _Part(NamedTuple):
    """Of a tensor along its first axis, as an attention reads it.

    Attributes:
        source: the tensor.
        place: which part.
        rounded: what rounds it; None = nothing.
        nodes: all from the attention to the tensor.
    """

    source: fx.Node
    place: int
    rounded: fx.Node | None
    nodes: list[fx.Node]


def _parts_of(fused: fx.Node, roundings: Mapping[fx.Node, nn.Module]) -> tuple[_Part, _Part, _Part] | None:
    """What an attention reads, where it is the parts of a (3, B, heads, tokens, D), all rounded to one grid or none."""
    query, key, value = cast("tuple[fx.Node, fx.Node, fx.Node]", fused.args)
    if key.target != "transpose" or key.args[1:] not in {(-2, -1), (-1, -2), (2, 3), (3, 2)} or len(key.users) != 1:
        return None
    q, k, v = (_part_of(node, roundings) for node in (query, cast(fx.Node, key.args[0]), value))
    if q is None or k is None or v is None or not q.source is k.source is v.source:
        return None
    shape: tuple[int, ...] = tuple(q.source.meta.get("shape") or ())
    if (q.place, k.place, v.place) != (0, 1, 2) or len(shape) != 5 or shape[0] != 3:
        return None
    grids = {_grid(part, roundings) for part in (q, k, v)}
    return (q, k._replace(nodes=[key, *k.nodes]), v) if len(grids) == 1 else None


def _grid(part: _Part, roundings: Mapping[fx.Node, nn.Module]) -> tuple[int, int] | None:
    """The smallest and largest integer to which a part is rounded; None if it is not."""
    if part.rounded is None:
        return None
    quant_format = cast(Quantizer, roundings[part.rounded].quantizer).format
    return quant_format.low, quant_format.high


def _rounds_all(node: fx.Node, roundings: Mapping[fx.Node, nn.Module]) -> bool:
    """Whether a node rounds a tensor by one range."""
    return node in roundings and cast(Quantizer, roundings[node].quantizer).format.axis is None


def _part_of(node: fx.Node, roundings: Mapping[fx.Node, nn.Module]) -> _Part | None:
    """What a node that has one reader is a part of."""
    rounded: fx.Node | None = None
    nodes = [node]
    while len(node.users) == 1 and node.op == "call_module":
        if rounded is None and _rounds_all(node, roundings):
            rounded = node
        elif node_kind(node) != "identity" or _hooked(node_module(node)):
            return None
        node = node.all_input_nodes[0]
        nodes.append(node)
    if len(node.users) != 1 or node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    source, place = cast(fx.Node, node.args[0]), node.args[1]
    if source.target in {"unbind", torch.unbind}:
        if (*source.args[1:], *source.kwargs.values()) not in {(), (0,)}:
            return None
        nodes.append(source)
        source = source.all_input_nodes[0]
    return _Part(source, place, rounded, nodes)


def _before(node: fx.Node) -> tuple[list[fx.Node], float]:
    """(the nodes from the softmax back to the product of queries and keys, what that is multiplied by)."""
    softmax = node.all_input_nodes[0]
    _check_softmax(softmax)
    found, scaling = [softmax], 1.0
    source = softmax.all_input_nodes[0]
    if node_kind(source) in {"mul", "div"}:
        scaling = _scaling(source)
        found.append(source)
        source = source.all_input_nodes[0]
    if not _is_matmul(source):
        raise _RefusalError(f"{node_kind(source)} {source.name} stands before the softmax in place of a scaled product")
    return [*found, source], scaling


def _behind(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """(the dropout behind a node, the product that alone reads it)."""
    dropout: fx.Node | None = None
    last, readers = node, list(node.users)
    if len(readers) == 1 and node_kind(readers[0]) == "dropout":
        dropout = last = readers[0]
        readers = list(dropout.users)
        module = node_module(dropout) if dropout.op == "call_module" else None
        if type(module) is not nn.Dropout or module.inplace or _hooked(module):
            raise _RefusalError(f"{dropout.name} is no nn.Dropout")
    if len(readers) != 1 or not _is_matmul(readers[0]) or readers[0].args[0] is not last:
        raise _RefusalError("the probabilities are not read by one product alone, as its left factor")
    if readers[0].args[1] is last:
        raise _RefusalError("the probabilities are multiplied by themselves")
    return dropout, readers[0]


def _check_softmax(node: fx.Node) -> None:
    """That it is the softmax over the last axis, in the type of its input."""
    if node.op == "call_module":
        module = node_module(node)
        if type(module) is not nn.Softmax or _hooked(module):
            raise _RefusalError(f"{node.name} is a {type(module).__name__} of its own")
        dim, dtype = module.dim, None
    elif node.target in _SOFTMAXES:
        dim = cast(Any, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim"))
        dtype = node.kwargs.get("dtype")
    else:
        raise _RefusalError(f"{node.name} is no softmax")
    rank = len(node.meta.get("shape") or ())
    if not isinstance(dim, int) or dim not in {-1, rank - 1} or dtype is not None or len(node.args) > 2:
        raise _RefusalError(f"{node.name} is not over the last axis, in the type of its input")


def _check_shapes(query: fx.Node, key: fx.Node, value: fx.Node) -> None:
    """That they are heads alike, no wider than the kernels take, as far as shapes are known."""
    shapes = [tuple(node.meta.get("shape") or ()) for node in (query, key, value)]
    if not all(shapes):
        return
    if len({shape[:-2] for shape in shapes}) > 1:
        raise _RefusalError(f"query, key and value have the shapes {shapes}, not one batch")
    widest = max(shapes[0][-1], shapes[2][-1])
    if widest > WIDEST:
        raise _RefusalError(f"a head is {widest} wide, and the kernels hold {WIDEST}")


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_matmul(node: fx.Node) -> bool:
    """Whether it is the product of two nodes."""
    factors = len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args)
    return factors and node.op != "call_module" and node.target in _MATMULS and not node.kwargs


def _scaling(node: fx.Node) -> float:
    """The number by which a node multiplies."""
    if node.op == "call_module" or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 1:
        raise _RefusalError(f"{node.name} does not multiply by a number")
    (number,) = [arg for arg in node.args if not isinstance(arg, fx.Node)] or (None,)
    inverse = node_kind(node) == "div"
    if not isinstance(number, (int, float)) or (inverse and (node.args[1] is not number or not number)):
        raise _RefusalError(f"{node.name} does not multiply by a number")
    return 1 / number if inverse else float(number)
