"""The figure of a block of a network with its Q/DQ pairs, laid out in layers from top to bottom (Sugiyama)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Line

from compress.plots.style import LIGHT, Format, styled, tip
from compress.quantization.block_graph import BlockGraph, Box
from compress.support.text import plain

Place = tuple[float, float]
_SWEEPS = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions, x in widths of a box from left, y in layers from the top.

    Attributes:
        routes: the points of each edge.
    """

    places: dict[str, Place]
    routes: dict[tuple[str, str], list[Place]]


def lay_out(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> Layout:
    """Lay out an acyclic graph."""
    before: dict[str, list[str]] = {node: [a for a, b in edges if b == node] for node in nodes}
    after: dict[str, list[str]] = {node: [b for a, b in edges if a == node] for node in nodes}
    level: dict[str, int] = {}
    for node in nodes:
        level[node] = max((level[a] + 1 for a in before[node]), default=0)
    for node in reversed(nodes):  # a node without inputs is placed just above its first consumer
        if not before[node] and after[node]:
            level[node] = min(level[b] for b in after[node]) - 1
    chains = {edge: _chain(edge, level) for edge in dict.fromkeys(edges)}
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    for chain in chains.values():
        for step, point in enumerate(chain):
            level.setdefault(point, level[chain[0]] + step)
    x = _columns(level, links)
    places = {node: (x[node], float(level[node])) for node in nodes}
    routes = {edge: [(x[point], float(level[point])) for point in chain] for edge, chain in chains.items()}
    return Layout(places=places, routes=routes)


def _chain(edge: tuple[str, str], level: Mapping[str, int]) -> list[str]:
    start, end = edge
    return [start, *(f"{start}>{end}>{i}" for i in range(level[start] + 1, level[end])), end]


def _columns(level: Mapping[str, int], links: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Columns: neighbours pull, boxes of one layer keep a width."""
    rows: dict[int, list[str]] = {}
    for node, depth in level.items():
        rows.setdefault(depth, []).append(node)
    near: dict[str, list[str]] = {node: [] for node in level}
    for a, b in links:
        near[a].append(b)
        near[b].append(a)
    x = {node: float(i) - (len(row) - 1) / 2 for row in rows.values() for i, node in enumerate(row)}
    depths = sorted(rows)
    for sweep in range(_SWEEPS):
        for depth in depths if sweep % 2 == 0 else reversed(depths):
            pull = {node: fmean([x[other] for other in near[node]] or [x[node]]) for node in rows[depth]}
            rows[depth].sort(key=lambda node: pull[node])
            _spread(rows[depth], pull, x)
    left = min(x.values())
    return {node: value - left for node, value in x.items()}


def _spread(row: Sequence[str], pull: Mapping[str, float], x: dict[str, float]) -> None:
    previous = None
    for node in row:
        x[node] = pull[node] if previous is None else max(pull[node], x[previous] + (1.0 if ">" not in node else 0.75))
        previous = node
    shift = fmean(pull[node] for node in row) - fmean(x[node] for node in row)
    for node in row:
        x[node] += shift


_WIDTH, _HEIGHT = 1.9, 0.78  # inches of a column and of a layer
_FILL = {"int8": "sky", "float": "grid", "quantizer": "amber", "outside": "paper"}
_LEGEND = {"int8": "8-bit kernel", "float": "float", "quantizer": "Q/DQ", "outside": "around it"}
_DARK = "#10161e"  # on boxes in colour, which are bright on dark screens too
_TOP, _ROW = 0.6, 0.26


def draw_block(graph: BlockGraph, form: Format | None = None) -> Figure:
    """Draw `block_graph`, as wide as it needs without a `form`."""
    layout = lay_out(list(graph.boxes), graph.edges)
    with styled():
        return _draw(graph, layout, form)


def _draw(graph: BlockGraph, layout: Layout, form: Format | None) -> Figure:
    columns = max(x for x, _ in layout.places.values()) + 1
    rows = max(y for _, y in layout.places.values()) + 1
    in_row = 2 if form is not None and form.narrow else len(_LEGEND)
    width = max(columns * _WIDTH, form.width if form is not None else 5.4)
    top = _TOP + _ROW * -(-len(_LEGEND) // in_row)
    height = top + rows * _HEIGHT + 0.05
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    left = (width - columns * _WIDTH) / 2

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + (point[0] + 0.5) * _WIDTH, top + (point[1] + 0.5) * _HEIGHT

    axes.text(0.15, 0.28, plain(graph.block) or "the network", weight="bold", size=11, va="center")
    for i, (kind, text) in enumerate(_LEGEND.items()):
        x, y = 0.32 + i % in_row * 1.25, _TOP + _ROW * (i // in_row)
        _rectangle(axes, (x, y), (0.24, 0.16), kind)
        axes.text(x + 0.18, y, text, size=7.5, va="center", color=LIGHT["muted"])
    for (source, target), route in layout.routes.items():
        _edge(axes, [place(point) for point in route], graph.boxes[source].integers, graph.boxes[target])
    for name, box in graph.boxes.items():
        _write(axes, place(layout.places[name]), box)
    return figure


def _write(axes: Any, place: tuple[float, float], box: Box) -> None:
    x, y = place
    colour = _DARK if box.kind in {"int8", "quantizer"} else LIGHT["ink"]
    patch = _rectangle(axes, (x, y), (1.3, 0.44) if box.kind == "quantizer" else (1.74, 0.48), box.kind)
    tip(patch, ": ".join(filter(None, (box.title, box.detail))))
    common = {"ha": "center", "va": "center", "color": colour, "zorder": 4}
    axes.text(x, y - (0.085 if box.detail else 0), plain(box.title), size=7.5, weight="bold", **common)
    axes.text(x, y + 0.1, plain(box.detail), size=6.8, **common)


def _rectangle(axes: Any, centre: tuple[float, float], size: tuple[float, float], kind: str) -> FancyBboxPatch:
    rounding = size[1] / 2 if kind == "quantizer" else 0.06
    patch = FancyBboxPatch(
        (centre[0] - size[0] / 2, centre[1] - size[1] / 2),
        *size,
        boxstyle=f"round,pad=0,rounding_size={rounding}",
        facecolor=LIGHT[_FILL[kind]],
        edgecolor=LIGHT["muted"],
        linewidth=0.8,
        linestyle="--" if kind == "outside" else "-",
        zorder=3,
    )
    axes.add_patch(patch)
    return patch


def _edge(axes: Any, points: list[tuple[float, float]], strong: bool, target: Box) -> None:
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
