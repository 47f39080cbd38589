"""A block of a quantized network as kernels and Q/DQ pairs: what runs in 8 bits, what stays float, where it changes.

BatchNorm, activation and residual add are in the kernel of the layer they fuse with. Operations that only move values
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from compress.errors import QuantizationError, near_misses
from compress.graph.ops import WEIGHTED, kinds, layer_name, modules_above, node_kind, node_module
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import placement_of
from compress.support.text import shorten

_MOVES = kinds(lambda t: t.category in {"movement", "passing", "shape"}) | {"constant"}
_FUSED = kinds(lambda t: t.clips) | {"batch_norm", "add"}
_COMMUTING = {"max_pool", "adaptive_max_pool"}
_LIMIT = 90
_TYPICAL = 40  # operations of a block that a page can show

Kind = Literal["int8", "float", "quantizer", "outside"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A kernel, a quantizer, or an operation outside the block; `integers`: its result is integers."""

    title: str
    detail: str
    kind: Kind
    integers: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """A block as a graph, in an order in which no edge goes backward; `block` is its path; "" = the whole network."""

    block: str
    target: str
    boxes: Mapping[str, Box]
    edges: tuple[tuple[str, str], ...]


def block_graph(qmodel: nn.Module, block: str) -> BlockGraph:
    """One block of a quantized network as a graph; `block` is a path such as `layer1.0`, "" = the whole, if small."""
    target = placement_of(qmodel).target
    graph: fx.Graph = qmodel.graph  # type: ignore[assignment]
    inside = {node for node in graph.nodes if _belongs(node, block)}
    if not inside:
        paths = sorted({path.rpartition(".")[0] for node in graph.nodes for path in _paths(node)} - {"", "quantizers"})
        raise QuantizationError(
            f"the network has no block {block!r}{near_misses(block, paths)} (its blocks: {', '.join(paths) or 'none'})"
        )
    inside |= {n for n in graph.nodes if node_kind(n) == "quantizer" and inside & {*n.all_input_nodes, *n.users}}
    shown = {n for n in inside if node_kind(n) not in _MOVES}
    edges, around = _edges(graph, shown)
    drawn = [node for node in graph.nodes if node in shown or node in around]
    if len(drawn) > _LIMIT:
        raise QuantizationError(
            f"block {block!r} has {len(drawn)} operations, and a figure of more than {_LIMIT} cannot be read; name a "
            "smaller block"
        )
    boxes, head = _boxes(drawn, shown, block)
    joined = ((head.get(a, a), head.get(b, b)) for a, b in edges)
    return BlockGraph(
        block=block, target=target, boxes=boxes, edges=tuple(dict.fromkeys(e for e in joined if e[0] != e[1]))
    )


def typical_block(qmodel: nn.Module) -> BlockGraph | None:
    """The smallest block of two or more layers in which branches join, else the smallest one, else the network."""
    graph: fx.Graph = qmodel.graph  # type: ignore[assignment]
    members: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node_kind(node) in {"quantizer", "output", "input"}:
            continue
        for path in dict.fromkeys(part for whole in _paths(node) if whole for part in (*modules_above(whole), whole)):
            members.setdefault(path, []).append(node_kind(node))
    several = {path: found for path, found in members.items() if sum(kind in WEIGHTED for kind in found) > 1}
    joining = {path: found for path, found in several.items() if {"add", "concat"} & {*found}}
    for choice in (joining, several, {"": [node_kind(node) for node in graph.nodes]}):
        block = min(choice, key=lambda path: len(choice[path]), default=None)
        if block is not None and len(choice[block]) <= _TYPICAL:
            return block_graph(qmodel, block)
    return None


def _edges(graph: fx.Graph, shown: set[fx.Node]) -> tuple[list[tuple[str, str]], set[fx.Node]]:
    edges = []
    around: set[fx.Node] = set()
    for node in graph.nodes:
        for source in dict.fromkeys(s for argument in node.all_input_nodes for s in _origins(argument, shown)):
            if (node in shown) or (source in shown and node_kind(node) not in _MOVES):
                edges.append((source.name, node.name))
                around |= {source, node} - shown
    return edges, around


def _boxes(drawn: list[fx.Node], shown: set[fx.Node], block: str) -> tuple[dict[str, Box], dict[str, str]]:
    kernels = _kernels([node for node in drawn if node in shown], shown)
    head = {member.name: members[0].name for members in kernels.values() for member in members}
    last = {members[-1] for members in kernels.values()}
    boxes = {}
    for node in drawn:  # a kernel has the place of its last operation: all of its inputs come before
        if node.name not in head:
            boxes[node.name] = _box([node], node in shown, block)
        elif node in last:
            first = head[node.name]
            boxes[first] = _box(kernels[first], True, block)
    return boxes, head


def _kernels(nodes: list[fx.Node], shown: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """Operations of each kernel of several, by their first one; an add fuses if its other input is quantized."""
    kernels: dict[str, list[fx.Node]] = {}
    host: dict[fx.Node, str] = {}
    for node in nodes:
        kind = node_kind(node)
        if kind in WEIGHTED:
            host[node], kernels[node.name] = node.name, [node]
            continue
        sources = [origin for argument in node.all_input_nodes for origin in _origins(argument, shown)]
        before = [source for source in sources if node_kind(source) != "quantizer"]
        if kind in _FUSED and len(before) == 1 and before[0] in host and len(before[0].users) == 1:
            host[node] = host[before[0]]
            kernels[host[node]].append(node)
        elif kind == "add":
            host[node], kernels[node.name] = node.name, [node]
    return {name: members for name, members in kernels.items() if len(members) > 1}


def _paths(node: fx.Node) -> list[str]:
    stack = [str(value[0]) for value in (node.meta.get("nn_module_stack") or {}).values()]
    return [*stack, str(node.target)] if node.op == "call_module" else stack


def _belongs(node: fx.Node, block: str) -> bool:
    if node_kind(node) in {"quantizer", "output", "input"}:
        return False
    return not block or any(path == block or path.startswith(f"{block}.") for path in _paths(node))


def _origins(node: fx.Node, shown: set[fx.Node]) -> list[fx.Node]:
    """The nodes that produce a value, past nodes that only move values; constants are not drawn."""
    if node in shown or node_kind(node) not in _MOVES:
        return [node]
    return [origin for source in node.all_input_nodes for origin in _origins(source, shown)]


def _box(members: list[fx.Node], inside: bool, block: str) -> Box:
    node, kind = members[0], node_kind(members[0])
    if kind == "quantizer":
        quantizer: Any = node_module(node)
        one = quantizer.ready and quantizer.amax.dim() == 0
        scale = f"scale {quantizer.scale.item():.3g}" if one else "Q/DQ"
        return Box(title=_integers(quantizer), detail=scale, kind="quantizer", integers=True)
    if kind in {"input", "output"}:
        return Box(title=kind, detail="", kind="outside")
    path = layer_name(node).removeprefix(f"{block}." if inside and block else "")
    path = path if node.op == "call_module" else kind
    fused = ["bn" if node_kind(member) == "batch_norm" else node_kind(member) for member in members[1:]]
    title = " + ".join([shorten(path, max(9, 26 - sum(3 + len(name) for name in fused))), *fused])
    shape = "×".join(map(str, (node.meta.get("shape") or ())[1:]))
    weight: Any = getattr(node_module(node), "weight_quantizer", None) if node.op == "call_module" else None
    if weight is not None:
        return Box(
            title=title, detail=f"{kind}, weight {_integers(weight)}" if inside else kind, kind=_where(inside, "int8")
        )
    eight = kind not in WEIGHTED and _between_quantizers(node)
    return Box(
        title=title,
        detail=shape if path == kind else f"{kind} {shape}".strip(),
        kind=_where(inside, "int8" if eight else "float"),
        integers=eight and kind in _COMMUTING,
    )


def _where(inside: bool, kind: Kind) -> Kind:
    return kind if inside else "outside"


def _between_quantizers(node: fx.Node) -> bool:
    sources = [origin for argument in node.all_input_nodes for origin in _origins(argument, set())]
    sources = [s.all_input_nodes[0] if node_kind(s) in _COMMUTING else s for s in sources]
    return bool(sources) and all(node_kind(source) == "quantizer" for source in sources)


def _integers(quantizer: Quantizer) -> str:
    spec = quantizer.format
    if spec.kind != "int":
        return spec.kind
    text = f"{'int' if spec.signed else 'uint'}{spec.num_bits}"
    return text + (" per channel" if spec.axis is not None else "")
