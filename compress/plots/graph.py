"""A block of a network as a graph, with its Q/DQ pairs: what runs in 8 bits, what stays float, and where it changes.

Boxes are kernels, pills are quantizers; an edge is drawn strong where integers flow. BatchNorm, activation and
residual add are in the box of the layer that they fuse with. Operations that only move values (reshape, transpose,
split, dropout) are left out, as Q/DQ pass through them. Boxes with a dashed border are around the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Line
from torch import fx, nn

from compress.errors import QuantizationError, near_misses
from compress.graph.ops import layer_name, node_kind, node_module
from compress.graph.traits import WEIGHTED, kinds
from compress.plots.graph_layout import Layout, lay_out
from compress.plots.style import LIGHT, styled
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import placement_of
from compress.text import shorten

_MOVES = kinds(lambda t: t.category in {"movement", "passing", "shape"}) | {"constant"}
_FUSED = kinds(lambda t: t.clips) | {"batch_norm", "add"}
_WIDTH, _HEIGHT = 1.9, 0.78  # inches of a column and of a layer
_LIMIT = 90


@dataclass(frozen=True, kw_only=True)
class Box:
    """One box of the figure: a kernel, a quantizer, or an operation outside the block.

    Attributes:
        title, detail: two lines of text; the title of a kernel names all of its operations.
        kind: `int8`, `float`, `quantizer` or `outside`.
    """

    title: str
    detail: str
    kind: str


def draw_block(qmodel: nn.Module, block: str) -> Figure:
    """Draw one block of a quantized network.

    Args:
        qmodel: from `quantize` or `insert_quantizers`.
        block: path of a module of the float model, such as `layer1.0`; "" = the whole network, if it is small.

    Returns:
        A figure as large as the block needs.

    Raises:
        QuantizationError: the model is not quantized by compress, it has no such block, or the block is too large.
    """
    placement_of(qmodel)
    graph: fx.Graph = qmodel.graph  # type: ignore[assignment]
    boxes, edges = block_graph(graph, block)
    layout = lay_out(list(boxes), edges)
    with styled():
        return _draw(block, boxes, layout)


def block_graph(graph: fx.Graph, block: str) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Boxes by the name of their first node, in an order in which no edge goes backward, and the edges between them.

    Raises:
        QuantizationError: no such block, or one that is too large to be read.
    """
    inside = {node for node in graph.nodes if _belongs(node, block)}
    if not inside:
        paths = sorted({path.rpartition(".")[0] for node in graph.nodes for path in _paths(node)} - {""})
        raise QuantizationError(
            f"the network has no block {block!r}{near_misses(block, paths)} (its blocks: {', '.join(paths) or 'none'})"
        )
    inside |= {n for n in graph.nodes if node_kind(n) == "quantizer" and inside & {*n.all_input_nodes, *n.users}}
    shown = {n for n in inside if node_kind(n) not in _MOVES}
    edges = []
    around: set[fx.Node] = set()
    for node in graph.nodes:
        for source in dict.fromkeys(s for argument in node.all_input_nodes for s in _origins(argument, shown)):
            if (node in shown) or (source in shown and node_kind(node) not in _MOVES):
                edges.append((source.name, node.name))
                around |= {source, node} - shown
    drawn = [node for node in graph.nodes if node in shown or node in around]
    if len(drawn) > _LIMIT:
        raise QuantizationError(
            f"block {block!r} has {len(drawn)} operations, and a figure of more than {_LIMIT} cannot be read; name a "
            "smaller block"
        )
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
    joined = ((head.get(a, a), head.get(b, b)) for a, b in edges)
    return boxes, list(dict.fromkeys(edge for edge in joined if edge[0] != edge[1]))


def _kernels(nodes: list[fx.Node], shown: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """Operations of each kernel of several, by the name of the first one.

    BatchNorm and activations fuse with the layer or add before them, and an add with the layer that it alone consumes,
    if its other input is quantized: that is what the placement leaves the identity's quantizer for.
    """
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
    """Paths of the modules that a node was traced in, its own included."""
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
    """The box of one operation, or of a kernel of several whose first is a layer or an add."""
    node, kind = members[0], node_kind(members[0])
    if kind == "quantizer":
        quantizer: Any = node_module(node)
        return Box(title=_integers(quantizer), detail=_scale(quantizer), kind="quantizer")
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
    )


def _where(inside: bool, kind: str) -> str:
    return kind if inside else "outside"


def _between_quantizers(node: fx.Node) -> bool:
    """Whether all tensors that an operation reads are quantized (through what moves values)."""
    sources = [origin for argument in node.all_input_nodes for origin in _origins(argument, set())]
    sources = [s.all_input_nodes[0] if node_kind(s) in {"max_pool", "adaptive_max_pool"} else s for s in sources]
    return bool(sources) and all(node_kind(source) == "quantizer" for source in sources)


def _integers(quantizer: Quantizer) -> str:
    spec = quantizer.format
    if spec.kind != "int":
        return spec.kind
    text = f"{'int' if spec.signed else 'uint'}{spec.num_bits}"
    return text + (" per channel" if spec.axis is not None else "")


def _scale(quantizer: Quantizer) -> str:
    return f"scale {quantizer.scale.item():.3g}" if quantizer.ready and quantizer.amax.dim() == 0 else "Q/DQ"


# --- drawing -------------------------------------------------------------------------------------------------------

_FILL = {"int8": "sky", "float": "grid", "quantizer": "amber", "outside": "paper"}
_LEGEND = {"int8": "8-bit kernel", "float": "float", "quantizer": "Q/DQ", "outside": "around it"}


def _draw(block: str, boxes: dict[str, Box], layout: Layout) -> Figure:
    columns = max(x for x, _ in layout.places.values()) + 1
    rows = max(y for _, y in layout.places.values()) + 1
    width, height = max(columns * _WIDTH, 5.4), rows * _HEIGHT + 0.9
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    left = (width - columns * _WIDTH) / 2

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + (point[0] + 0.5) * _WIDTH, 0.85 + (point[1] + 0.5) * _HEIGHT

    axes.text(0.15, 0.28, block or "the network", weight="bold", size=11, va="center")
    for i, (kind, text) in enumerate(_LEGEND.items()):
        _rectangle(axes, (0.32 + i * 1.25, 0.6), (0.24, 0.16), kind)
        axes.text(0.5 + i * 1.25, 0.6, text, size=7.5, va="center", color=LIGHT["muted"])
    for (source, target), route in layout.routes.items():
        strong = boxes[source].kind == "quantizer"
        _edge(axes, [place(point) for point in route], strong, boxes[target])
    for name, box in boxes.items():
        x, y = place(layout.places[name])
        size = (1.3, 0.44) if box.kind == "quantizer" else (1.74, 0.48)
        _rectangle(axes, (x, y), size, box.kind)
        axes.text(x, y - (0.085 if box.detail else 0), box.title, size=7.5, ha="center", va="center", weight="bold")
        axes.text(x, y + 0.1, box.detail, size=6.8, ha="center", va="center", color=LIGHT["ink"])
    return figure


def _rectangle(axes: Any, centre: tuple[float, float], size: tuple[float, float], kind: str) -> None:
    rounding = size[1] / 2 if kind == "quantizer" else 0.06
    axes.add_patch(
        FancyBboxPatch(
            (centre[0] - size[0] / 2, centre[1] - size[1] / 2),
            *size,
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor=LIGHT[_FILL[kind]],
            edgecolor=LIGHT["muted"],
            linewidth=0.8,
            linestyle="--" if kind == "outside" else "-",
            zorder=3,
        )
    )


def _edge(axes: Any, points: list[tuple[float, float]], strong: bool, target: Box) -> None:
    """A smooth line through the points, ending at the upper border of its target."""
    half = 0.22 if target.kind == "quantizer" else 0.24
    points = [*points[:-1], (points[-1][0], points[-1][1] - half - 0.03)]
    vertices, codes = [points[0]], [Line.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        vertices += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Line.CURVE4] * 3
    colour = LIGHT["blue"] if strong else LIGHT["grey"]
    axes.add_patch(
        PathPatch(Line(vertices, codes), fill=False, edgecolor=colour, linewidth=2.2 if strong else 1.1, zorder=1)
    )
    x, y = points[-1]
    axes.fill([x - 0.05, x + 0.05, x], [y - 0.07, y - 0.07, y + 0.02], color=colour, zorder=2)
