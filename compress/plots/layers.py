"""Figures of a network: a block with its Q/DQ pairs, laid out by Sugiyama; noise, bytes and histograms by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Line
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from compress.plots.style import (
    LIGHT,
    Format,
    bare,
    byte_ticks,
    compact,
    distinct,
    label,
    name_rows,
    new_figure,
    styled,
    tip,
    variant_colours,
)
from compress.quantization.block_graph import BlockGraph, Box
from compress.records.files import Histogram, LayerRow
from compress.support.text import finite, in_bytes, plain, shorten, significant

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
    before: dict[str, list[str]] = {node: [a for a, b in edges if b == node] for node in nodes}
    after: dict[str, list[str]] = {node: [b for a, b in edges if a == node] for node in nodes}
    level: dict[str, int] = {}
    for node in nodes:
        level[node] = max((level[a] + 1 for a in before[node]), default=0)
    for node in reversed(nodes):  # a node without inputs is placed just above its first consumer
        if not before[node] and after[node]:
            level[node] = min(level[b] for b in after[node]) - 1
    chains = {
        (start, end): [start, *(f"{start}>{end}>{i}" for i in range(level[start] + 1, level[end])), end]
        for start, end in dict.fromkeys(edges)
    }
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    for chain in chains.values():
        for step, point in enumerate(chain):
            level.setdefault(point, level[chain[0]] + step)
    x = _columns(level, links)
    places = {node: (x[node], float(level[node])) for node in nodes}
    routes = {edge: [(x[point], float(level[point])) for point in chain] for edge, chain in chains.items()}
    return Layout(places=places, routes=routes)


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
    with styled():
        return _draw(graph, lay_out(list(graph.boxes), graph.edges), form)


def _draw(graph: BlockGraph, layout: Layout, form: Format | None) -> Figure:
    columns = max(x for x, _ in layout.places.values()) + 1
    rows = max(y for _, y in layout.places.values()) + 1
    in_row = 2 if form is not None and form.narrow else len(_LEGEND)
    width = max(columns * _WIDTH, form.width if form is not None else 5.4)
    top = _TOP + _ROW * -(-len(_LEGEND) // in_row)
    height = top + rows * _HEIGHT + 0.05
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
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


WORST = 5
_GROUPS = 12

_SERIES = {
    "activation_sqnr_db": "Layer output against float's",
    "weight_sqnr_db": "Weight",
}


def sqnr_series(layers: Sequence[LayerRow]) -> dict[str, list[tuple[str, float]]]:
    found = {
        title: [(row.name, float(getattr(row, key))) for row in layers if finite(getattr(row, key))]
        for key, title in _SERIES.items()
    }
    return {title: values for title, values in found.items() if values}


def worst(values: Sequence[tuple[str, float]], count: int = WORST) -> list[tuple[str, float]]:
    """The layers of the lowest SQNR, lowest first; none where all are alike."""
    return sorted(values, key=lambda item: item[1])[: min(count, max(1, len(values) // 2))]


def draw_sqnr(series: Mapping[str, Sequence[tuple[str, float]]], form: Format) -> Figure:
    figure = new_figure(form, len(series) * (3.3 if form.narrow else 2.5))
    panels = figure.subplots(nrows=len(series), squeeze=False).ravel()
    for axes, (title, values) in zip(panels, series.items(), strict=True):
        _sqnr_panel(axes, values, form)
        axes.set_title(title)
    if not form.narrow:
        panels[-1].set_xlabel("layers in network order")
    return figure


def _sqnr_panel(axes: Axes, values: Sequence[tuple[str, float]], form: Format) -> None:
    low = {name: rank for rank, (name, _) in enumerate(worst(values), start=1)}
    colours = [LIGHT["alarm"] if name in low else LIGHT["blue"] for name, _ in values]
    heights = [value for _, value in values]
    bars = axes.bar(range(len(values)), heights, width=0.82, color=colours)
    for bar, (name, value) in zip(bars, values, strict=True):
        tip(bar, f"{name}: {value:.1f} dB")
    top = max(*heights, 0.0) or 1.0
    axes.set_ylim(min(0.0, *heights), top * 1.2)
    marked = [x for x, (name, _) in enumerate(values) if name in low]
    for x, level in zip(marked, _levels(marked, gap=len(values) / (form.width * 6)), strict=True):
        name, value = values[x]
        y = top * (1.03 + 0.06 * level)
        axes.plot([x, x], [max(value, 0.0), y], color=LIGHT["alarm"], linewidth=0.6)
        axes.text(x, y, f"{low[name]}", ha="center", va="bottom", fontsize=8, weight="bold")
    short = dict(zip([n for n, _ in values], distinct([n for n, _ in values]), strict=True))
    lines = [f"{low[name]}\u2002{shorten(short[name], 28)}\u2002{value:.1f} dB" for name, value in worst(values)]
    lines, corner, offset = (lines, (0, 0), (0, -24)) if form.narrow else (["lowest", *lines], (1, 1), (10, 0))
    axes.annotate(
        "\n".join(lines), corner, offset, "axes fraction", "offset points", va="top", fontsize=8, linespacing=1.5
    )
    axes.set(ylabel="SQNR, dB", xlim=(-0.8, len(values) - 0.2))
    _stages(axes, [name for name, _ in values], most=5 if form.narrow else 12)
    bare(axes)


def _levels(places: Sequence[int], *, gap: float) -> list[int]:
    ends: list[float] = []
    levels = []
    for x in places:
        level = next((i for i, end in enumerate(ends) if x - end >= gap), len(ends))
        ends[level : level + 1] = [x]
        levels.append(level)
    return levels


def _stages(axes: Axes, names: Sequence[str], *, most: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for depth in (1, 2):
        spans = stages(names, depth=depth)
        wide = [(name, a, b) for name, a, b in spans if b - a >= max(1, len(names) // 14)]
        if 2 <= len(wide) <= 12:
            wide = sorted(wide, key=lambda span: span[1] - span[2])[:most]
            axes.set_xticks([(a + b - 1) / 2 for _, a, b in wide], [shorten(name, 12) for name, _, _ in wide])
            axes.tick_params(axis="x", length=0)
            for _, start, _ in spans[1:]:
                axes.axvline(start - 0.5, color=LIGHT["grid"], linewidth=0.8, zorder=0)
            return


def stages(names: Sequence[str], *, depth: int) -> list[tuple[str, int, int]]:
    """(last part, first index, one past the last) of names that agree in `depth` parts.

    >>> stages(["conv1", "layer1.0.conv1", "layer1.0.conv2", "fc"], depth=1)
    [('conv1', 0, 1), ('layer1', 1, 3), ('fc', 3, 4)]
    """
    starts = [i for i, name in enumerate(names) if i == 0 or _prefix(name, depth) != _prefix(names[i - 1], depth)]
    ends = [*starts[1:], len(names)]
    return [(_prefix(names[a], depth).rpartition(".")[2], a, b) for a, b in zip(starts, ends, strict=True)]


def weight_groups(layers: Sequence[LayerRow]) -> list[tuple[str, int, int]]:
    """(block, float bytes, quantized bytes); blocks split deeper while there is room.

    Layers that stay float count alike on both sides.
    """
    rows = [row for row in layers if row.float_weight_bytes > 0]
    depth, best = 1, 1
    for depth in range(1, 5):
        if len({_prefix(row.name, depth) for row in rows}) <= _GROUPS:
            best = depth
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        first, second = sums.get(_prefix(row.name, best), (0, 0))
        after = row.float_weight_bytes if row.quantized_weight_bytes is None else row.quantized_weight_bytes
        sums[_prefix(row.name, best)] = (first + row.float_weight_bytes, second + after)
    return _largest([(name, *pair) for name, pair in sums.items()])


def _prefix(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _largest(groups: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    if len(groups) <= _GROUPS:
        return groups
    kept = {name for name, *_ in sorted(groups, key=lambda g: -g[1])[: _GROUPS - 1]}
    rest = [g for g in groups if g[0] not in kept]
    others = (f"{len(rest)} others", sum(g[1] for g in rest), sum(g[2] for g in rest))
    return [g for g in groups if g[0] in kept] + [others]


def draw_bytes(groups: Sequence[tuple[str, int, int]], files: Sequence[tuple[str, float]], form: Format) -> Figure:
    tall = [0.42 * len(groups) + 0.9] * bool(groups) + [0.36 * len(files) + 0.8] * bool(files)
    figure = new_figure(form, sum(tall) if form.narrow else max(*tall, 2.6))
    if form.narrow:
        panels = list(figure.subplots(len(tall), 1, squeeze=False, height_ratios=tall).ravel())
    else:
        panels = list(figure.subplots(1, len(tall), squeeze=False, width_ratios=[1.5, 1][-len(tall) :]).ravel())
    if groups:
        _group_bars(panels.pop(0), groups)
    if files:
        _file_bars(panels.pop(0), files)
    return figure


def _group_bars(axes: Axes, groups: Sequence[tuple[str, int, int]]) -> None:
    longest = max(before for _, before, _ in groups)
    for y, (name, before, after) in enumerate(groups):
        first = axes.barh(y - 0.19, before, height=0.36, color=LIGHT["grey"], label="float" if y == 0 else None)
        second = axes.barh(y + 0.19, after, height=0.36, color=LIGHT["blue"], label="quantized" if y == 0 else None)
        tip(first[0], f"{name}, float: {in_bytes(before)}")
        tip(second[0], f"{name}, quantized: {in_bytes(after)}")
        axes.text(before + longest * 0.015, y - 0.19, in_bytes(before), va="center", fontsize=7.5)
        axes.text(after + longest * 0.015, y + 0.19, in_bytes(after), va="center", fontsize=7.5)
    name_rows(axes, [shorten(name, 20) for name, *_ in groups], end=longest * 1.35)
    byte_ticks(axes, 3)
    axes.set_title("Weights by block")
    axes.legend(loc="best", handlelength=1.0)


def _file_bars(axes: Axes, files: Sequence[tuple[str, float]]) -> None:
    colours = variant_colours(tuple(name for name, _ in files))
    longest = max(size for _, size in files)
    first = files[0][1]
    for y, (name, size) in enumerate(files):
        share = f"\u2002({size / first:.3f})" if y and first else ""
        tip(axes.barh(y, size, height=0.5, color=colours[name])[0], f"{label(name)}: {in_bytes(size)}")
        axes.text(size + longest * 0.015, y, f"{in_bytes(size)}{share}", va="center", fontsize=8)
    name_rows(axes, [label(name) for name, _ in files], end=longest * 1.35)
    byte_ticks(axes, 3)
    axes.set_title("Model file")


SHOWN = 6

Array = NDArray[np.float64]


def bins_of(histogram: Histogram) -> tuple[Array, Array]:
    counts = np.asarray(histogram.counts, dtype=np.float64)
    edges = np.asarray(histogram.bin_edges, dtype=np.float64)
    return counts, edges if len(edges) == len(counts) + 1 else np.linspace(edges[0], edges[-1], len(counts) + 1)


def clipped_share(histogram: Histogram) -> float:
    """Share of values beyond amax, 0 to 1; a bin that amax cuts counts in proportion."""
    counts, edges = bins_of(histogram)
    total = counts.sum()
    if not total:
        return 0.0
    width = np.maximum(np.diff(edges), np.finfo(np.float64).tiny)
    above = np.clip((edges[1:] - histogram.amax) / width, 0, 1)
    below = np.clip((-histogram.amax - edges[:-1]) / width, 0, 1)
    return float((counts * np.minimum(above + below, 1)).sum() / total)


def largest(histogram: Histogram) -> float:
    counts, edges = bins_of(histogram)
    filled = np.flatnonzero(counts)
    return float(max(abs(edges[filled[0]]), abs(edges[filled[-1] + 1]))) if len(filled) else 0.0


def expected_sqnr_db(histogram: Histogram, *, num_bits: int = 8) -> float:
    counts, edges = bins_of(histogram)
    centres = np.abs(edges[:-1] + edges[1:]) / 2
    step = histogram.amax / (2 ** (num_bits - 1) - 1 if histogram.signed else 2**num_bits - 1)
    noise = np.where(centres <= histogram.amax, step**2 / 12, (centres - histogram.amax) ** 2)
    signal, lost = float((counts * centres**2).sum()), float((counts * noise).sum())
    return 10 * math.log10(signal / lost) if signal > 0 and lost > 0 else math.inf


def interesting(histograms: Sequence[Histogram], count: int = SHOWN) -> tuple[Histogram, ...]:
    usable = [h for h in histograms if sum(h.counts) > 0 and finite(h.amax) and h.amax > 0]
    return tuple(sorted(usable, key=expected_sqnr_db)[:count])


def draw_histograms(histograms: Sequence[Histogram], form: Format) -> Figure:
    columns = min(len(histograms), 2 if form.narrow else 3)
    rows = math.ceil(len(histograms) / columns)
    figure = new_figure(form, rows * (1.75 if form.narrow else 2.05))
    panels = figure.subplots(nrows=rows, ncols=columns, squeeze=False).ravel()
    names = distinct([h.name for h in histograms])
    for axes, histogram, name in zip(panels, histograms, names, strict=False):
        _panel(axes, histogram)
        axes.set_title(shorten(name, 17 if form.narrow else 32), fontsize=8 if form.narrow else 8.5)
    for axes in panels[len(histograms) :]:
        axes.set_visible(False)
    figure.supxlabel("magnitude" if all(h.bin_edges[0] >= 0 for h in histograms) else "value", fontsize=9)
    figure.supylabel("values per bin (log)", fontsize=9)
    return figure


def _panel(axes: Axes, histogram: Histogram) -> None:
    counts, edges = bins_of(histogram)
    shown = np.where(counts > 0, counts, np.nan)
    inside = (edges[1:] <= histogram.amax * (1 + 1e-9)) & (edges[:-1] >= -histogram.amax * (1 + 1e-9))
    for part, colour in ((inside, "blue"), (~inside, "alarm")):
        patch = axes.stairs(np.where(part, shown, np.nan), edges, fill=True, baseline=0.5, color=LIGHT[colour])
        where = "within amax" if colour == "blue" else "clipped"
        tip(patch, f"{histogram.name}: {compact(float(np.nansum(np.where(part, counts, 0))))} values {where}")
    axes.set(yscale="log", ylim=(0.5, max(2.0, float(counts.max()) * 12)))
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(compact))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    for line in {histogram.amax, -histogram.amax if edges[0] < 0 else histogram.amax}:
        axes.axvline(line, color=LIGHT["ink"], linewidth=1.1, linestyle=(0, (4, 2)))
    clipped = clipped_share(histogram)
    note = f"amax {significant(histogram.amax)} of {significant(largest(histogram))}\nclipped {_share(clipped)}"
    box = {"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 1.5}
    axes.text(1, 0.99, note, transform=axes.transAxes, ha="right", va="top", fontsize=7.5, linespacing=1.35, bbox=box)
    bare(axes)


def _share(share: float) -> str:
    percent = 100 * share
    return "0 %" if percent == 0 else "<0.001 %" if percent < 0.001 else f"{percent:.2g} %"
