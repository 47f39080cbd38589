"""Accuracy against latency, with labels that do not overlap; the spread of latency; the front of a search."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from compress.measure.metric import Judged
from compress.plots.style import (
    LIGHT,
    MARKERS,
    Format,
    bare,
    compact,
    label,
    new_figure,
    nice_limits,
    settle,
    tip,
    variant_colours,
)
from compress.records.summary import SummaryRow
from compress.support.text import significant
from compress.variants import Variant

_Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 with x0 <= x1 and y0 <= y1."""

_RINGS = (4.0, 9.0, 16.0, 26.0, 40.0, 60.0, 85.0)
_ANGLES = 16
_SWEEPS = 3
_CLEARLY = 3.0
"""By how much a label is nearer to its own point than to any other."""


def place_labels(
    anchors: Sequence[_Place],
    sizes: Sequence[_Place],
    *,
    bounds: Box,
    obstacles: Sequence[Box] = (),
    point_radius: float = 5.0,
    gap: float = 1.5,
) -> list[Box]:
    """A box for each label.

    Args:
        anchors: points that every label avoids.
        sizes: in the units of `anchors`.
        bounds: the area for labels.
        obstacles: boxes to avoid.
        point_radius: half the side of a point.
        gap: room kept around labels.
    """
    taken = [_around(a, point_radius) for a in anchors] + list(obstacles)
    crowding = [-sum(1.0 / (1.0 + math.dist(a, b)) for b in anchors) for a in anchors]
    order = sorted(range(len(anchors)), key=lambda i: (crowding[i], i))
    boxes: list[Box | None] = [None] * len(anchors)
    for _ in range(_SWEEPS):
        before = list(boxes)
        for i in order:
            others = taken + [_grown(box, gap) for j, box in enumerate(boxes) if box is not None and j != i]
            candidates = _candidates(anchors[i], sizes[i], point_radius)
            rivals = [anchor for j, anchor in enumerate(anchors) if j != i]
            boxes[i] = min(candidates, key=lambda box: _cost(box, anchors[i], others, bounds, rivals))
        if boxes == before:
            break
    return [box for box in boxes if box is not None]


def overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _candidates(anchor: _Place, size: _Place, radius: float) -> list[Box]:
    boxes = []
    for ring in _RINGS:
        reach = radius + ring
        for k in range(_ANGLES):
            dx, dy = math.cos(2 * math.pi * k / _ANGLES), math.sin(2 * math.pi * k / _ANGLES)
            x, y = anchor[0] + reach * dx + dx * size[0] / 2, anchor[1] + reach * dy + dy * size[1] / 2
            boxes.append((x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2))
    return boxes


def _cost(box: Box, anchor: _Place, others: Sequence[Box], bounds: Box, rivals: Sequence[_Place]) -> float:
    area = max((box[2] - box[0]) * (box[3] - box[1]), 1e-9)
    covered = sum(overlap(box, other) for other in others) / area
    outside = 1 - overlap(box, bounds) / area
    own = _distance(anchor, box)
    mistaken = any(_distance(rival, box) < own + _CLEARLY for rival in rivals)  # it would be read as another's
    return 1e4 * (covered + 2 * outside) + 300 * mistaken + own


def _distance(point: _Place, box: Box) -> float:
    return math.dist(point, (min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])))


def _around(point: _Place, radius: float) -> Box:
    return (point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius)


def _grown(box: Box, gap: float) -> Box:
    return (box[0] - gap, box[1] - gap, box[2] + gap, box[3] + gap)


TOP1 = Judged()
_LOG_FROM = 6.0  # largest over smallest latency beyond which a linear axis hides the fast end
ALL_RIGHT = 100.4
"""Top of the accuracy axis, in percent: room for a label above 100 and for nothing else."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A variant on an engine with score, the ends of its 95 % interval if they are known, and latency."""

    variant: str
    engine: str
    batch_size: int
    score: float
    p50_ms: float
    interval: tuple[float, float] | None = None


def tradeoff_points(
    rows: Sequence[SummaryRow], intervals: Mapping[tuple[str, str], tuple[float, float]] = MappingProxyType({})
) -> tuple[Point, ...]:
    """The variants with accuracy and latency, at the smallest batch size that has any.

    `intervals` are ends of the metric's interval by variant and engine.
    """
    points = [
        Point(
            variant=row.variant,
            engine=row.engine,
            batch_size=row.batch_size,
            score=row.score,
            p50_ms=row.p50_ms,
            interval=intervals.get((row.variant, row.engine)),
        )
        for row in rows
        if row.batch_size is not None and row.score is not None and row.p50_ms is not None and row.p50_ms > 0
    ]
    smallest = min((point.batch_size for point in points), default=0)
    return tuple(point for point in points if point.batch_size == smallest)


def draw_tradeoff(points: Sequence[Point], form: Format, *, judged: Judged = TOP1) -> Figure:
    """p50 to the right, the metric upwards; colour = variant, shape = engine."""
    figure = new_figure(form, 4.4 if not form.narrow else 4.2)
    axes = figure.subplots()
    _scale(axes, points, judged)
    variants = tuple(dict.fromkeys(point.variant for point in points))
    engines = tuple(dict.fromkeys(point.engine for point in points))
    colours = variant_colours(variants)
    for k, engine in enumerate(engines):
        mine = [point for point in points if point.engine == engine]
        marker = MARKERS[k % len(MARKERS)]
        if form.narrow:
            axes.plot([], [], marker, color=LIGHT["muted"], markersize=6, label=label(engine))
        for point in mine:
            (mark,) = axes.plot(
                [point.p50_ms],
                [point.score],
                marker,
                color=colours[point.variant],
                markersize=8.5,
                markeredgecolor=LIGHT["paper"],
                markeredgewidth=0.8,
                zorder=3,
            )
            tip(mark, _said(point, judged))
            if point.interval is not None:
                axes.vlines(point.p50_ms, *point.interval, color=colours[point.variant], linewidth=1.2, zorder=2)
    axes.set_xlabel(f"p50 latency, ms (batch {points[0].batch_size})")
    axes.set_ylabel(f"{judged.title}, {judged.unit}" if judged.unit else judged.title)
    if form.narrow:
        figure.legend(loc="outside upper left", ncols=2, handletextpad=0.2, columnspacing=1.2)
    better = _better(axes)
    names = [label(p.variant) if form.narrow else f"{label(p.variant)}, {label(p.engine)}" for p in points]
    _label(figure, axes, points, names, better)
    return figure


def _said(point: Point, judged: Judged) -> str:
    value = f"{judged.title} {judged.text(point.score)}"
    return f"{label(point.variant)}, {label(point.engine)}: {value}, p50 {significant(point.p50_ms)} ms"


def _scale(axes: Axes, points: Sequence[Point], judged: Judged) -> None:
    latencies = [point.p50_ms for point in points]
    low, high = min(latencies), max(latencies)
    if high / low > _LOG_FROM:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.45, high * 1.45)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(compact))
    else:
        axes.set_xlim(0, high * 1.18)
    ends = [end for point in points for end in (point.score, *(point.interval or ()))]
    low, high = nice_limits(ends, least_span=1.0)
    if judged.unit == "%":
        low, high = max(low, 100.0 - ALL_RIGHT), min(high, ALL_RIGHT)
    axes.set_ylim(low, high)
    if judged.direction == "lower":
        axes.invert_yaxis()  # better is up, as in every figure of this kind
    axes.yaxis.set_major_locator(MaxNLocator(6))
    if judged.unit == "%":  # there may be room above 100 % and below zero, and nothing to be read there
        low, high = axes.get_ylim()
        bounds = sorted((low, high))
        axes.set_yticks([tick for tick in axes.get_yticks() if max(0.0, bounds[0]) <= tick <= min(100.0, bounds[1])])
        axes.set_ylim(low, high)


def _better(axes: Axes) -> Text:
    axes.annotate(
        "",
        xy=(0.015, 0.985),
        xytext=(0.07, 0.90),
        xycoords="axes fraction",
        arrowprops={"arrowstyle": "-|>", "color": LIGHT["green"], "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
    )
    return axes.text(0.08, 0.895, "better", transform=axes.transAxes, color=LIGHT["green"], weight="bold", va="center")


def _label(figure: Figure, axes: Axes, points: Sequence[Point], names: Sequence[str], better: Text) -> None:
    settle(figure)
    to_pixels = axes.transData.transform
    texts = [axes.text(0, 0, name, fontsize=8.5, va="bottom", ha="left") for name in names]
    extents = [text.get_window_extent() for text in texts]
    frame = axes.get_window_extent()
    mark = better.get_window_extent()
    pixels = [to_pixels((point.p50_ms, point.score)) for point in points]
    anchors = [(float(x), float(y)) for x, y in pixels]
    boxes = place_labels(
        anchors,
        [(e.width, e.height) for e in extents],
        bounds=(frame.x0, frame.y0, frame.x1, frame.y1),
        obstacles=[(frame.x0, mark.y0 - 4, mark.x1 + 10, frame.y1)],
        point_radius=7.0,
    )
    for text, anchor, box in zip(texts, anchors, boxes, strict=True):
        x, y = axes.transData.inverted().transform(box[:2])
        text.set_position((float(x), float(y)))
        near = (min(max(anchor[0], box[0]), box[2]), min(max(anchor[1], box[1]), box[3]))
        if max(abs(near[0] - anchor[0]), abs(near[1] - anchor[1])) > 16:
            line = axes.transData.inverted().transform([anchor, near])
            axes.plot(line[:, 0], line[:, 1], color=LIGHT["muted"], linewidth=0.6, zorder=1)


def draw_latency(rows: Sequence[SummaryRow], form: Format) -> Figure:
    """Bars to p50 and lines on to p99, a panel for each batch size."""
    batches = sorted({row.batch_size for row in rows if row.batch_size is not None})
    groups = [[row for row in rows if row.batch_size == batch] for batch in batches]
    tall = [0.21 * len(group) + 0.16 * len({r.engine for r in group}) + 0.75 for group in groups]
    columns = 1 if form.narrow else min(2, len(batches))
    rows_tall = [max(tall[i : i + columns]) for i in range(0, len(tall), columns)]
    figure = new_figure(form, sum(rows_tall))
    grid = figure.subplots(len(rows_tall), columns, squeeze=False, height_ratios=rows_tall)
    for axes, batch, group in zip(grid.ravel(), batches, groups, strict=False):
        _latency_bars(axes, group)
        axes.set_title(f"Batch {batch}")
    for axes in grid.ravel()[len(batches) :]:
        axes.set_visible(False)
    figure.supxlabel("latency, ms: bar to p50, line to p99", fontsize=9)
    return figure


def _latency_bars(axes: Axes, rows: Sequence[SummaryRow]) -> None:
    colours = variant_colours(tuple(dict.fromkeys(row.variant for row in rows)))
    longest = max(max(row.p50_ms or 0, row.p99_ms or 0) for row in rows)
    y, ticks = 0.0, []
    for engine in dict.fromkeys(row.engine for row in rows):
        axes.text(0, y, label(engine), fontsize=8.5, weight="bold", va="center", color=LIGHT["ink"])
        for row in (r for r in rows if r.engine == engine):
            y -= 1
            p50 = row.p50_ms or 0.0
            bars = axes.barh(y, p50, height=0.72, color=colours[row.variant])
            p99 = "" if row.p99_ms is None else f", p99 {significant(row.p99_ms)} ms"
            where = f"{label(row.variant)}, {label(row.engine)}, batch {row.batch_size}"
            tip(bars[0], f"{where}: p50 {significant(p50)} ms{p99}")
            end = max(p50, row.p99_ms or 0.0)
            axes.plot([p50, end], [y, y], color=LIGHT["ink"], linewidth=1.0)
            gain = f"\u2002{row.speedup:.2f}×" if row.speedup is not None and row.variant != Variant.FLOAT else ""
            axes.text(end + longest * 0.015, y, f"{significant(p50)}{gain}", va="center", fontsize=8)
            ticks.append((y, label(row.variant, 14)))
        y -= 1.15
    axes.set_xlim(0, longest * 1.28)
    axes.set_ylim(y + 0.5, 0.6)
    axes.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    bare(axes, grid="x")


_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 14.0, 12.0, 44.0
_RADIUS = {"front": 5.5, "chosen": 8.0}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the figure.

    Attributes:
        x: time over that of the float network.
        text: shown under the pointer.
    """

    x: float
    y: float
    kind: str
    text: str


_COLOURS = {"front": "blue", "chosen": "green", "trial": "grey", "baseline": "amber"}
_NAMES = {"front": "front", "chosen": "chosen", "trial": "other trials", "baseline": "uniform"}


def draw_front(marks: Sequence[Mark], form: Format, *, x_label: str, y_label: str) -> Figure:
    """The front as a figure."""
    figure = new_figure(form, 3.4)
    axes = figure.subplots()
    for kind, colour in _COLOURS.items():
        own = [mark for mark in marks if mark.kind == kind]
        if own:
            size = 60 if kind == "chosen" else 24
            axes.scatter([m.x for m in own], [m.y for m in own], s=size, color=LIGHT[colour], label=_NAMES[kind])
    steps = sorted((m.x, m.y) for m in marks if m.kind in {"front", "chosen"})
    axes.plot([x for x, _ in steps], [y for _, y in steps], color=LIGHT["blue"], linewidth=1, zorder=1)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend()
    return figure


def front_svg(marks: Sequence[Mark], *, width: float, label: str, x_label: str, y_label: str) -> str:
    """The front as <svg>, each mark with a title; `width` is in pixels, `label` the text alternative."""
    height = 0.62 * width
    right = max([mark.x for mark in marks] + [0.1]) * 1.06
    top = max([mark.y for mark in marks] + [1e-6]) * 1.06

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (width - _LEFT - _RIGHT) * x / right, (height - _TOP - _BOTTOM) * y / top
        return round(_LEFT + across, 1), round(height - _BOTTOM - up, 1)

    parts = []
    for i in range(6):
        x, y = at(right * i / 5, top * i / 5)
        parts.append(_line(x, _TOP, x, height - _BOTTOM) + _text(x, height - _BOTTOM + 16, f"{right * i / 5:.2f}"))
        parts.append(_line(_LEFT, y, width - _RIGHT, y) + _text(_LEFT - 6, y + 4, f"{top * i / 5:.2g}", anchor="end"))
    parts.append(_text(width / 2, height - 6, x_label))
    parts.append(f'<g transform="rotate(-90 12 {height / 2:.0f})">{_text(12, height / 2, y_label)}</g>')
    steps = " ".join("{},{}".format(*at(m.x, m.y)) for m in _sorted(marks) if m.kind in {"front", "chosen"})
    parts.append(f'<polyline points="{steps}" fill="none" stroke="var(--blue)"/>')
    for mark in sorted(marks, key=lambda m: list(_COLOURS).index(m.kind), reverse=True):
        x, y = at(mark.x, mark.y)
        title = html.escape(mark.text)
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{_RADIUS.get(mark.kind, 4.0)}" fill="var(--{_COLOURS[mark.kind]})" '
            f'tabindex="0"><title>{title}</title></circle>'
        )
    box = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def _sorted(marks: Sequence[Mark]) -> list[Mark]:
    return sorted(marks, key=lambda mark: mark.x)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}" stroke="var(--grid)"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    words = html.escape(text)
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="var(--muted)">{words}</text>'
