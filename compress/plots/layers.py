"""Noise of quantization and bytes, by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compress.plots.style import (
    LIGHT,
    Format,
    bare,
    byte_ticks,
    distinct,
    label,
    name_rows,
    new_figure,
    tip,
    variant_colours,
)
from compress.records.rows import LayerRow
from compress.support.text import finite, in_bytes, shorten

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
