"""Attention in QAT without stored scores: softmax(s q k^T), quantized, times v, in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import called_module, node_kind, node_module
from compress.kernels.triton import attention as triton_attention
from compress.kernels.triton.attention import WIDEST, packed_attention, packed_fits, window_attention, window_fits
from compress.kernels.triton.launch import Kernels, use_triton
from compress.qat_fusion.chain import fuse_nodes, grid_of, is_live, quantizer_of, weight_dtype

_MATMULS = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__")
_SOFTMAXES = (F.softmax, torch.softmax, "softmax")


class FusedAttentionModule(nn.Module):
    """matmul -> (scale) -> (add) -> softmax -> quantizer -> (dropout) -> matmul, without stored scores.

    `scaling` is the factor of the scores, `quantize` of the probabilities only.
    """

    def __init__(
        self, scaling: float, quantize: nn.Module, dropout: nn.Dropout | None, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.quantize = quantize
        self.dropout = dropout
        self.kernels: Kernels | None = kernels

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(..., tokens, E) of query (..., tokens, D), transposed key (..., D, keys) and value (..., keys, E).

        `table` is added to the scores of each batch, then `mask`, (1, W, 1, tokens, keys), to those of W windows.
        """
        quantizer = quantizer_of(self.quantize)
        if table is None and self.takes(query):
            dtype = weight_dtype(query)
            q, k, v = [t if t.dtype == dtype else t.to(dtype) for t in (query, key.transpose(-2, -1), value)]
            if triton_attention.fits(q, k, v):
                return triton_attention.attention(q, k, v, quantizer.amax, self.scaling, quantizer.format.high)
        scores = torch.matmul(query, key) * self.scaling
        if table is not None:
            scores = scores + table
        if mask is not None:
            shape = scores.shape
            scores = (scores.reshape(-1, mask.shape[-4], *shape[1:]) + mask).reshape(shape)
        weights = self.quantize(torch.softmax(scores, dim=-1))
        return torch.matmul(weights if self.dropout is None else self.dropout(weights), value)

    def takes(self, query: Tensor) -> bool:
        """True if Triton kernels run: if asked for, or on a GPU in half precision; never with active dropout."""
        dropping = self.dropout is not None and self.dropout.training and self.dropout.p > 0
        if dropping or not is_live(quantizer_of(self.quantize)):
            return False
        if self.kernels is None and weight_dtype(query).itemsize != 2:
            return False
        return query.dtype != torch.float64 and use_triton(query, self.kernels)


class PackedAttentionModule(nn.Module):
    """Attention of queries, keys and values that one linear layer computed, with their quantizers, if any."""

    def __init__(self, attention: FusedAttentionModule, parts: Sequence[nn.Module], result: nn.Module | None) -> None:
        super().__init__()
        self.attention = attention
        self.parts = nn.ModuleList(parts)
        self.result = result

    def forward(self, packed: Tensor, table: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, tokens, heads, D) of a packed (3, B, heads, tokens, D); table and mask as of the attention."""
        attention, qkv = self.attention, packed.permute(1, 3, 0, 2, 4)
        modules = [*self.parts, *([] if self.result is None else [self.result]), attention.quantize]
        ours = [module.quantizer for module in modules]
        live = all(map(is_live, ours)) and packed.dtype == weight_dtype(packed)
        if live and attention.takes(packed) and packed_fits(qkv):
            grids = [grid_of(quantizer) for quantizer in ours]
            parts = (grids[0], grids[1], grids[2]) if len(self.parts) else None
            result = None if self.result is None else grids[-2]
            if table is None:
                return packed_attention(qkv, grids[-1], attention.scaling, parts, result)
            still = mask is None or not mask.requires_grad
            if window_fits(qkv) and parts is not None and result is not None and still:
                return window_attention(qkv, table, mask, grids[-1], parts, result, attention.scaling)
        q, k, v = packed.unbind(0)
        if len(self.parts):
            q, k, v = [quantize(part) for quantize, part in zip(self.parts, (q, k, v), strict=True)]
        attended = attention(q, k.transpose(-2, -1), v, table, mask).transpose(1, 2)
        return attended if self.result is None else self.result(attended)


def fuse_attention(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[tuple[str, ...], str]]:
    """Replace every attention whose probabilities are quantized by one module, in place.

    The fused nodes (none if it stays plain) and the reason are returned for each quantizer.
    """
    found: dict[nn.Module, tuple[tuple[str, ...], str]] = {}
    weights = [node for node in quantizing if node_kind(node.all_input_nodes[0]) == "softmax"]
    for node in weights:
        quantize = quantizing[node]
        quantizer = quantizer_of(quantize)
        try:
            names, fused = _fuse(graph_module, node, quantizing, kernels)
            found[quantizer] = (names, "")
            found.update(_pack(graph_module, fused, names[-1], quantizing))
        except _RefusalError as refusal:
            found[quantizer] = ((), f"attention stays open: {refusal}")
    return found


class _RefusalError(Exception):
    """Carries the reason for which an attention is not fused."""


def _fuse(
    graph_module: fx.GraphModule, node: fx.Node, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> tuple[tuple[str, ...], fx.Node]:
    quantize = quantizing[node]
    if quantizer_of(quantize).format.axis is not None:
        raise _RefusalError("the probabilities have a range for every channel")
    before, scaling, added = _before(node)
    dropout, product = _after(node)
    for old in before:
        if len(old.users) != 1:
            raise _RefusalError(f"{old.name} has {len(old.users)} consumers")
    factors: Any = (*before[-1].args, product.args[1])
    _check_shapes(*factors)
    if added and _parts_of(factors, quantizing) is None:
        raise _RefusalError(f"{added[0].name} is added to scores of tensors that are no parts of one")
    name = f"fused_attentions.{node.name}"
    drop = None if dropout is None else called_module(dropout)
    module = FusedAttentionModule(scaling, quantize, drop, kernels)
    after = [product] if dropout is None else [product, dropout]
    fused = fuse_nodes(graph_module, name, module, (*after, node, *before), ((*factors, *added),))
    return tuple(old.name for old in (*before[::-1], *after[::-1])), fused


def _pack(
    graph_module: fx.GraphModule, fused: fx.Node, product: str, quantizing: Mapping[fx.Node, nn.Module]
) -> dict[nn.Module, tuple[tuple[str, ...], str]]:
    """Make an attention read a linear layer's result, if query, key and value are its parts, quantized there."""
    inputs: Any = fused.args
    parts = _parts_of(inputs[:3], quantizing)
    if parts is None:
        return {}
    quantized = [part.quantized for part in parts if part.quantized is not None]
    consumers = list(fused.users)
    last = consumers[0] if len(consumers) == 1 and _has_one_range(consumers[0], quantizing) else None
    result = None if last is None else quantizing[last]
    names = [node.all_input_nodes[0].name for node in quantized] + ([] if last is None else [product])
    modules = [quantizing[node] for node in quantized]
    name = str(fused.target).replace("fused", "packed", 1)
    attention: Any = graph_module.get_submodule(str(fused.target))
    graph_module.add_submodule(name, PackedAttentionModule(attention, modules, result))
    graph = graph_module.graph
    with graph.inserting_before(fused):
        packed = graph.call_module(name, (parts[0].source, *inputs[3:]))
        back = graph.call_method("transpose", (packed, 1, 2))  # the next node transposes again, and nothing is copied
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
    return {quantizer_of(m): ((node,), "") for m, node in zip(absorbed, names, strict=True)}


class _Part(NamedTuple):
    """One of the parts of a tensor along its first axis, with the nodes from the attention back to it."""

    source: fx.Node
    place: int
    quantized: fx.Node | None
    nodes: list[fx.Node]


def _parts_of(factors: Sequence[fx.Node], quantizing: Mapping[fx.Node, nn.Module]) -> tuple[_Part, _Part, _Part] | None:
    """Inputs of an attention that are the parts of a (3, B, heads, tokens, D), all quantized to one grid or none."""
    query, key, value = factors
    if key.target != "transpose" or key.args[1:] not in {(-2, -1), (-1, -2), (2, 3), (3, 2)} or len(key.users) != 1:
        return None
    q, k, v = (_part_of(node, quantizing) for node in (query, key.all_input_nodes[0], value))
    if q is None or k is None or v is None or not (_are_alike(q.source, k.source) and _are_alike(q.source, v.source)):
        return None
    shape: tuple[int, ...] = tuple(q.source.meta.get("shape") or ())
    if (q.place, k.place, v.place) != (0, 1, 2) or len(shape) != 5 or shape[0] != 3:
        return None
    grids = {_integers(part, quantizing) for part in (q, k, v)}
    return (q, k._replace(nodes=[key, *k.nodes]), v) if len(grids) == 1 else None


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    permutes = one.target == other.target and one.target in ("permute", torch.permute)
    return one is other or (permutes and (one.args, one.kwargs) == (other.args, other.kwargs))


def _integers(part: _Part, quantizing: Mapping[fx.Node, nn.Module]) -> tuple[int, int] | None:
    if part.quantized is None:
        return None
    quant_format = quantizer_of(quantizing[part.quantized]).format
    return quant_format.low, quant_format.high


def _has_one_range(node: fx.Node, quantizing: Mapping[fx.Node, nn.Module]) -> bool:
    return node in quantizing and quantizer_of(quantizing[node]).format.axis is None


def _part_of(node: fx.Node, quantizing: Mapping[fx.Node, nn.Module]) -> _Part | None:
    quantized: fx.Node | None = None
    nodes = [node]
    while len(node.users) == 1 and node.op == "call_module":
        if quantized is None and _has_one_range(node, quantizing):
            quantized = node
        elif node_kind(node) != "identity" or _hooked(node_module(node)):
            return None
        node = node.all_input_nodes[0]
        nodes.append(node)
    if len(node.users) != 1 or node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    source, place = node.all_input_nodes[0], node.args[1]
    if source.target in {"unbind", torch.unbind}:
        if (*source.args[1:], *source.kwargs.values()) not in {(), (0,)}:
            return None
        nodes.append(source)
        source = source.all_input_nodes[0]
    return _Part(source, place, quantized, nodes)


def _before(node: fx.Node) -> tuple[list[fx.Node], float, tuple[fx.Node, ...]]:
    """(nodes from the softmax back to the product of queries and keys, factor of that product, table and mask)."""
    softmax = node.all_input_nodes[0]
    _check_softmax(softmax)
    found, scaling = [softmax], 1.0
    source, nodes, added = _added(softmax.all_input_nodes[0])
    found += nodes
    if node_kind(source) in {"mul", "div"}:
        scaling = _scaling(source)
        found.append(source)
        source = source.all_input_nodes[0]
    if not _is_matmul(source):
        raise _RefusalError(f"{node_kind(source)} {source.name} comes before the softmax instead of a scaled product")
    return [*found, source], scaling, added


def _added(node: fx.Node) -> tuple[fx.Node, list[fx.Node], tuple[fx.Node, ...]]:
    """(the scaled product, nodes after it from the last one, (table, mask) if they are added) of a softmax's input."""
    nodes: list[fx.Node] = []
    mask: tuple[fx.Node, ...] = ()
    source, shape = node, _shape(node)
    if node.target in ("reshape", "view") and node_kind(node.all_input_nodes[0]) == "add" and len(shape) == 4:
        add = node.all_input_nodes[0]
        first, *others = add.all_input_nodes
        windows = _shape(add)[1:2]
        if len(others) == 1 and _shape(others[0])[-4:] == (*windows, 1, *shape[2:]) and first.target == node.target:
            source = first.all_input_nodes[0]
            nodes, mask = [node, add, first], (others[0],)
    if node_kind(source) == "add" and len(source.all_input_nodes) == 2 and len(shape) == 4:
        scores, table = source.all_input_nodes
        if _shape(source) == _shape(scores) == shape and _shape(table) in {shape[1:], (1, *shape[1:])}:
            return scores, [*nodes, source], (table, *mask)
    return node, [], ()


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta.get("shape") or ())


def _after(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """(the dropout after a node, the product that is the only consumer of both)."""
    dropout: fx.Node | None = None
    last, consumers = node, list(node.users)
    if len(consumers) == 1 and node_kind(consumers[0]) == "dropout":
        dropout = last = consumers[0]
        consumers = list(dropout.users)
        module = called_module(dropout)
        if type(module) is not nn.Dropout or module.inplace or _hooked(module):
            raise _RefusalError(f"{dropout.name} is no nn.Dropout")
    if len(consumers) != 1 or not _is_matmul(consumers[0]) or consumers[0].args[0] is not last:
        raise _RefusalError("the probabilities are not read by one product alone, as its left factor")
    if consumers[0].args[1] is last:
        raise _RefusalError("the probabilities are multiplied by themselves")
    return dropout, consumers[0]


def _check_softmax(node: fx.Node) -> None:
    dim: Any
    if node.op == "call_module":
        module = node_module(node)
        if type(module) is not nn.Softmax or _hooked(module):
            raise _RefusalError(f"{node.name} is a {type(module).__name__} of its own")
        dim, dtype = module.dim, None
    elif node.target in _SOFTMAXES:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dtype = node.kwargs.get("dtype")
    else:
        raise _RefusalError(f"{node.name} is no softmax")
    rank = len(node.meta.get("shape") or ())
    if not isinstance(dim, int) or dim not in {-1, rank - 1} or dtype is not None or len(node.args) > 2:
        raise _RefusalError(f"{node.name} is not over the last axis, in the type of its input")


def _check_shapes(query: fx.Node, key: fx.Node, value: fx.Node) -> None:
    """Refuse known head shapes that differ, or are wider than the kernels take."""
    shapes = [tuple(node.meta.get("shape") or ()) for node in (query, key, value)]
    if not all(shapes):
        return
    if len({shape[:-2] for shape in shapes}) > 1:
        raise _RefusalError(f"query, key and value have the shapes {shapes}, not one batch")
    widest = max(shapes[0][-1], shapes[2][-1])
    if widest > WIDEST:
        raise _RefusalError(f"a head is {widest} wide, and the kernels take at most {WIDEST}")


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_matmul(node: fx.Node) -> bool:
    factors = len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args)
    return factors and node.op != "call_module" and node.target in _MATMULS and not node.kwargs


def _scaling(node: fx.Node) -> float:
    if node.op == "call_module" or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 1:
        raise _RefusalError(f"{node.name} does not multiply by a number")
    (number,) = [arg for arg in node.args if not isinstance(arg, fx.Node)] or (None,)
    inverse = node_kind(node) == "div"
    if not isinstance(number, (int, float)) or (inverse and (node.args[1] is not number or not number)):
        raise _RefusalError(f"{node.name} does not multiply by a number")
    return 1 / number if inverse else float(number)
