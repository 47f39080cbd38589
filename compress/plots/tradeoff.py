"""Accuracy against latency, and the spread of latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from compress.measure.metric import Judged
from compress.plots.labels import place_labels
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

TOP1 = Judged()
_LOG_FROM = 6.0  # largest over smallest latency beyond which a linear axis hides the fast end
ALL_RIGHT = 100.4
"""Top of the accuracy axis, in percent: room for a label above 100 and for nothing else."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A variant on an engine with score and latency."""

    variant: str
    engine: str
    batch_size: int
    score: float
    p50_ms: float


def tradeoff_points(rows: Sequence[SummaryRow]) -> tuple[Point, ...]:
    """The variants with accuracy and latency, at the smallest batch size that has any."""
    points = [
        Point(variant=row.variant, engine=row.engine, batch_size=row.batch_size, score=row.score, p50_ms=row.p50_ms)
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
    low, high = nice_limits([point.score for point in points], least_span=1.0)
    axes.set_ylim(low, min(high, ALL_RIGHT) if judged.unit == "%" else high)
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
