"""Noise of quantization and bytes by layer; activation histograms with their amax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    tip,
    variant_colours,
)
from compress.records.rows import Histogram, LayerRow
from compress.support.text import finite, in_bytes, shorten, significant

WORST = 5
_GROUPS = 12

_SERIES = {
    "activation_sqnr_db": "Layer output against float's",
    "weight_sqnr_db": "Weight",
}


def sqnr_series(layers: Sequence[LayerRow]) -> dict[str, list[tuple[str, float]]]:
    """Panel title -> (layer, dB) in network order."""
    series = {}
    for attribute, title in _SERIES.items():
        values = [(row.name, float(getattr(row, attribute))) for row in layers if finite(getattr(row, attribute))]
        if values:
            series[title] = values
    return series


def worst(values: Sequence[tuple[str, float]], count: int = WORST) -> list[tuple[str, float]]:
    """The layers of the lowest SQNR, lowest first; none where all are alike."""
    return sorted(values, key=lambda item: item[1])[: min(count, max(1, len(values) // 2))]


def draw_sqnr(series: Mapping[str, Sequence[tuple[str, float]]], form: Format) -> Figure:
    """Bars of SQNR in network order; the worst are named."""
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
    if form.narrow:
        corner, offset = (0, 0), (0, -24)
    else:
        corner, offset = (1, 1), (10, 0)
        lines.insert(0, "lowest")
    axes.annotate(
        "\n".join(lines), corner, offset, "axes fraction", "offset points", va="top", fontsize=8, linespacing=1.5
    )
    axes.set_ylabel("SQNR, dB")
    axes.set_xlim(-0.8, len(values) - 0.2)
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
    """Bytes of weights by block, and the sizes of files."""
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
_BINS = 160  # bins drawn; calibration's thousands would only make the file large

Array = NDArray[np.float64]


def bins_of(histogram: Histogram) -> tuple[Array, Array]:
    """(counts, edges) with every edge."""
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
    """The largest magnitude, to a bin."""
    counts, edges = bins_of(histogram)
    filled = np.flatnonzero(counts)
    return float(max(abs(edges[filled[0]]), abs(edges[filled[-1] + 1]))) if len(filled) else 0.0


def expected_sqnr_db(histogram: Histogram, *, num_bits: int = 8) -> float:
    """Expected signal to quantization noise, dB, from the histogram alone."""
    counts, edges = bins_of(histogram)
    centres = np.abs(edges[:-1] + edges[1:]) / 2
    levels = 2 ** (num_bits - 1) - 1 if histogram.signed else 2**num_bits - 1
    step = histogram.amax / levels
    noise = np.where(centres <= histogram.amax, step**2 / 12, (centres - histogram.amax) ** 2)
    signal, lost = float((counts * centres**2).sum()), float((counts * noise).sum())
    return 10 * math.log10(signal / lost) if signal > 0 and lost > 0 else math.inf


def interesting(histograms: Sequence[Histogram], count: int = SHOWN) -> tuple[Histogram, ...]:
    """The `count` tensors of the worst expected SQNR, worst first."""
    usable = [h for h in histograms if sum(h.counts) > 0 and finite(h.amax) and h.amax > 0]
    return tuple(sorted(usable, key=expected_sqnr_db)[:count])


def draw_histograms(histograms: Sequence[Histogram], form: Format) -> Figure:
    """Log counts, amax as a line, the clipped part in another colour."""
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
    counts, edges = _coarse(*bins_of(histogram))
    shown = np.where(counts > 0, counts, np.nan)
    inside = (edges[1:] <= histogram.amax * (1 + 1e-9)) & (edges[:-1] >= -histogram.amax * (1 + 1e-9))
    for part, colour in ((inside, "blue"), (~inside, "alarm")):
        patch = axes.stairs(np.where(part, shown, np.nan), edges, fill=True, baseline=0.5, color=LIGHT[colour])
        where = "within amax" if colour == "blue" else "clipped"
        tip(patch, f"{histogram.name}: {compact(float(np.nansum(np.where(part, counts, 0))))} values {where}")
    axes.set_yscale("log")
    axes.set_ylim(0.5, max(2.0, float(counts.max()) * 12))
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


def _coarse(counts: Array, edges: Array) -> tuple[Array, Array]:
    factor = math.ceil(len(counts) / _BINS)
    if factor == 1:
        return counts, edges
    starts = np.arange(0, len(counts), factor)
    return np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])


def _share(share: float) -> str:
    percent = 100 * share
    return "0 %" if percent == 0 else "<0.001 %" if percent < 0.001 else f"{percent:.2g} %"
