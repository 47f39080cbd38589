"""Figures of what a run measured: training, precision, accuracy against latency, stages, bytes; a front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from compress.measure.latency import STAGES, EndToEnd, Stage
from compress.measure.metric import Judged
from compress.plots.style import (
    LIGHT,
    MARKERS,
    Format,
    bare,
    byte_ticks,
    compact,
    label,
    name_rows,
    new_figure,
    nice_limits,
    settle,
    tip,
    variant_colours,
)
from compress.records.files import EngineRow, PrecisionRow
from compress.records.summary import SummaryRow
from compress.support.meters import shown
from compress.support.text import display, finite, in_bytes, plain, significant
from compress.training.log import EpochRow
from compress.variants import Variant

TOP1 = Judged()

Phases = Sequence[tuple[str, str, Sequence[EpochRow]]]  # (name, palette colour, epochs) in the order in which they ran


def phases(
    train: Sequence[EpochRow],
    qat: Sequence[EpochRow],
    sparse: Sequence[EpochRow] = (),
    sparse_qat: Sequence[EpochRow] = (),
) -> list[tuple[str, str, Sequence[EpochRow]]]:
    every = (
        ("float training", "grey", train),
        ("fine-tuning after pruning", "green", sparse),
        ("QAT", "blue", qat),
        ("sparse QAT", "purple", sparse_qat),
    )
    return [(name, colour, rows) for name, colour, rows in every if rows]


def draw_training(parts: Phases, form: Format, *, judged: Judged = TOP1) -> Figure:
    figure = new_figure(form, 5.4 if form.narrow else 3.1)
    loss, score = figure.subplots(2 if form.narrow else 1, 1 if form.narrow else 2, squeeze=False).ravel()
    start = 0
    for name, colour, rows in parts:
        training, evaluation = f"{name}, training images", f"{name}, evaluation"
        _curve(loss, start, [(row.epoch, row.train_loss) for row in rows], training, colour=colour, dashed=True)
        _curve(loss, start, [(row.epoch, row.val_loss) for row in rows], evaluation, colour=colour)
        if judged == TOP1:
            seen = [(row.epoch, _shown(row.train_top1, judged)) for row in rows]
            _curve(score, start, seen, training, colour=colour, dashed=True)
        values = [(row.epoch, _shown(row.figure(judged.name), judged)) for row in rows]
        _curve(score, start, values, evaluation, colour=colour)
        _last(score, start, values, [_shown(row.train_top1, judged) for row in rows])
        if start:
            for axes in (loss, score):
                axes.axvline(start + 0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
        start += rows[-1].epoch
        score.plot([], [], color=LIGHT[colour], linewidth=3, label=name)
    score.plot([], [], color=LIGHT["muted"], label="evaluation", marker="o", markersize=3.5)
    score.plot([], [], color=LIGHT["muted"], linestyle=(0, (3, 2)), label="training images")
    _limits(loss, score, parts, start, judged)
    loss.set_title("Loss")
    title = "Top-1" if judged == TOP1 else judged.title
    score.set_title(f"{title}, {judged.unit}" if judged.unit else title)
    figure.legend(loc="outside lower center", ncols=2 if form.narrow else 4, handlelength=1.8)
    return figure


_TIPS = 80  # points of a curve up to which each shows its value under the pointer

Values = Sequence[tuple[int, float | None]]  # (epoch, value); None = not measured after this epoch


def _shown(value: float | None, judged: Judged) -> float | None:
    return None if value is None else shown(value, judged.unit)


def _curve(axes: Axes, start: int, values: Values, name: str, *, colour: str, dashed: bool = False) -> None:
    points = [(start + epoch, value) for epoch, value in values if finite(value)]
    if not points:
        return
    style = {"linestyle": (0, (3, 2)), "linewidth": 1.2} if dashed else {"linewidth": 1.8}
    marker = "" if (dashed and len(points) > 1) or len(points) > 40 else "o"
    fill = LIGHT["paper" if dashed else colour]
    if len(points) <= _TIPS:
        for epoch, value in points:
            (mark,) = axes.plot([epoch], [value], "o", markersize=7, alpha=0, zorder=4)
            tip(mark, f"{name}, epoch {epoch - start}: {value:.4g}")
    epochs, values = zip(*points, strict=True)
    axes.plot(
        epochs,
        values,
        color=LIGHT[colour],
        marker=marker,
        markersize=4 if dashed else 3.5,
        markerfacecolor=fill,
        **style,
    )


def _last(axes: Axes, start: int, values: Values, training: Sequence[float | None]) -> None:
    known = [(i, epoch, value) for i, (epoch, value) in enumerate(values) if finite(value)]
    if known:
        i, epoch, value = known[-1]
        above = value >= (training[i] or 0.0)  # away from the other curve
        axes.annotate(
            f"{value:.2f}",
            (start + epoch, value),
            (0, 6 if above else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=8,
        )


def _limits(loss: Axes, score: Axes, parts: Phases, epochs: int, judged: Judged) -> None:
    rows = [row for _, _, phase in parts for row in phase]
    seen = [_shown(v, judged) for row in rows for v in (row.train_top1, row.figure(judged.name))]
    if values := [value for value in seen if finite(value)]:
        low, high = nice_limits(values, least_span=2.0)
        score.set_ylim(low if min(values) < 0 else max(0.0, low), high)
    losses = [v for row in rows for v in (row.train_loss, row.val_loss) if finite(v)]
    loss.set_ylim(min([0.0, *losses]), 1.1 * max([0.0, *losses]) or 1.0)
    for axes in (loss, score):
        axes.set(xlim=(0.5, epochs + 0.5), xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        bare(axes)


MOST_CLASSES = 6  # panels of a figure


def draw_precision(rows: Sequence[PrecisionRow], form: Format) -> Figure:
    classes = list(dict.fromkeys(row.label for row in rows))
    variants = tuple(dict.fromkeys(row.variant for row in rows))
    colours = variant_colours(variants)
    columns = 1 if form.narrow else min(3, len(classes))
    lines = -(-len(classes) // columns)
    figure = new_figure(form, 2.4 * lines + 0.5)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, name in zip(grid.ravel(), classes, strict=False):
        for row in (r for r in rows if r.label == name):
            recall = np.linspace(0, 100, len(row.precision))
            mean = 100 * float(np.mean(row.precision))
            (line,) = axes.plot(recall, 100 * np.asarray(row.precision), color=colours[row.variant], linewidth=1.6)
            tip(line, f"{label(row.variant)}, {plain(name)}: AP50 {mean:.1f} %")
        axes.set(title=plain(name), xlim=(0, 100), ylim=(0, 102), yticks=range(0, 101, 25))
        bare(axes)
    for axes in grid.ravel()[len(classes) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("recall, %")
    for axes in grid[:, 0]:
        axes.set_ylabel("precision, %")
    for variant in variants:
        grid[0, 0].plot([], [], color=colours[variant], linewidth=3, label=label(variant))
    figure.legend(loc="outside lower center", ncols=len(variants), handlelength=1.2)
    return figure


_SHOWN: dict[Stage, tuple[str, str]] = {
    "decode": ("decoding", "purple"),
    "preprocess": ("resizing and normalizing", "amber"),
    "engine": ("the engine", "blue"),
    "postprocess": ("softmax and top 5", "green"),
}
_READABLE = 0.08  # share of the longest bar from which a stage has room for its share in words


def draw_end_to_end(results: Sequence[EndToEnd], form: Format) -> Figure:
    figure = new_figure(form, 0.5 * len(results) + (2.1 if form.narrow else 1.5))
    axes = figure.subplots()
    longest = max(result.total_ms / result.batch_size for result in results)
    drawn: set[Stage] = set()
    for y, result in enumerate(results):
        left = 0.0
        for stage in (stage for stage in STAGES if stage in result.stage_ms):
            title, colour = _SHOWN[stage]
            width = result.stage_ms[stage] / result.batch_size
            named = None if stage in drawn else title
            bars = axes.barh(y, width, left=left, height=0.6, color=LIGHT[colour], label=named)
            tip(bars[0], f"{result.label}, {title}: {width:.3g} ms an image")
            if width >= _READABLE * longest * (2 if form.narrow else 1):
                shade = LIGHT["ink"] if stage == "preprocess" else LIGHT["paper"]
                text = f"{result.share(stage):.0%}"
                axes.text(left + width / 2, y, text, ha="center", va="center", fontsize=8, color=shade)
            drawn.add(stage)
            left += width
        axes.text(left + 0.015 * longest, y, f"{left:.3g} ms", va="center", fontsize=8)
    name_rows(axes, [_name(result, form) for result in results], end=(1.35 if form.narrow else 1.15) * longest)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("ms an image" if form.narrow else "ms an image, to its classes; median of each stage")
    figure.legend(loc="outside lower left", ncols=2 if form.narrow else 4, handlelength=1.0)
    return figure


def _name(result: EndToEnd, form: Format) -> str:
    variant, colon, engine = result.label.partition(": ")
    name = f"{display(variant)}, {display(engine)}" if colon else display(result.label)
    return f"{label(name, 20 if form.narrow else 34)}\nbatch {result.batch_size}"


_ROLES = {
    "weighted": ("convolutions and products", "blue"),
    "pool": ("pools", "sky"),
    "add": ("sums that did not fuse", "alarm"),
    "requantize": ("requantizing", "amber"),
    "quantize": ("quantizing the input", "purple"),
    "reformat": ("changing layout or type", "green"),
    "float": ("other kernels", "grey"),
}


def role_bytes(engine: EngineRow) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(_ROLES, 0.0)
    for layer in engine.layers:
        sums[layer.role if layer.role in sums else "float"] += layer.activation_bytes
    return {role: moved for role, moved in sums.items() if moved}


def draw_engines(engines: Sequence[EngineRow], form: Format) -> Figure:
    figure = new_figure(form, 0.5 * len(engines) + (2.2 if form.narrow else 1.5))
    axes = figure.subplots()
    longest = max(max(e.activation_bytes, e.fp16_bytes) for e in engines)
    seen: set[str] = set()
    for y, engine in enumerate(engines):
        left = 0.0
        for role, moved in role_bytes(engine).items():
            title, colour = _ROLES[role]
            named = None if role in seen else title
            bars = axes.barh(y, moved, left=left, height=0.55, color=LIGHT[colour], label=named)
            tip(bars[0], f"{label(engine.variant)}, {label(engine.engine)}, {title}: {in_bytes(moved)}")
            seen.add(role)
            left += moved
        axes.text(
            left + longest * 0.015,
            y,
            in_bytes(left) + (" and more" if engine.unknown_sizes else ""),
            va="center",
            fontsize=8,
        )
        axes.plot(
            [engine.fp16_bytes] * 2,
            [y - 0.36, y + 0.36],
            color=LIGHT["ink"],
            linewidth=1.6,
            label=None if y else "the same network in fp16 (estimate)",
        )
    name_rows(axes, [f"{label(e.variant, 34)}\n{label(e.engine, 34)}" for e in engines], end=longest * 1.2)
    byte_ticks(axes, 4)
    axes.set_xlabel("activations moved for one image")
    figure.legend(loc="outside lower left", ncols=1 if form.narrow else 3, handlelength=1.0)
    return figure


_Place = tuple[float, float]
Box = tuple[float, float, float, float]  # x0, y0, x1, y1 with x0 <= x1 and y0 <= y1

_RINGS = (4.0, 9.0, 16.0, 26.0, 40.0, 60.0, 85.0)
_ANGLES = 16
_SWEEPS = 3
_CLEARLY = 3.0  # by how much a label is nearer to its own point than to any other


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
    taken = [
        (a[0] - point_radius, a[1] - point_radius, a[0] + point_radius, a[1] + point_radius) for a in anchors
    ] + list(obstacles)
    crowding = [-sum(1.0 / (1.0 + math.dist(a, b)) for b in anchors) for a in anchors]
    order = sorted(range(len(anchors)), key=lambda i: (crowding[i], i))
    boxes: list[Box | None] = [None] * len(anchors)
    for _ in range(_SWEEPS):
        before = list(boxes)
        for i in order:
            placed = [box for j, box in enumerate(boxes) if box is not None and j != i]
            others = taken + [(x0 - gap, y0 - gap, x1 + gap, y1 + gap) for x0, y0, x1, y1 in placed]
            candidates = _candidates(anchors[i], sizes[i], point_radius)
            rivals = [anchor for j, anchor in enumerate(anchors) if j != i]
            boxes[i] = min(candidates, key=lambda box: _cost(box, anchors[i], others, bounds, rivals))
        if boxes == before:
            break
    return [box for box in boxes if box is not None]


def overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _candidates(anchor: _Place, size: _Place, radius: float) -> list[Box]:
    angles = [2 * math.pi * k / _ANGLES for k in range(_ANGLES)]
    moves = [
        (reach, math.cos(angle), math.sin(angle)) for reach in (radius + ring for ring in _RINGS) for angle in angles
    ]
    (x, y), (width, height) = anchor, size
    centres = [(x + reach * dx + dx * width / 2, y + reach * dy + dy * height / 2) for reach, dx, dy in moves]
    return [(x - width / 2, y - height / 2, x + width / 2, y + height / 2) for x, y in centres]


def _cost(box: Box, anchor: _Place, others: Sequence[Box], bounds: Box, rivals: Sequence[_Place]) -> float:
    area = max((box[2] - box[0]) * (box[3] - box[1]), 1e-9)
    covered = sum(overlap(box, other) for other in others) / area
    outside = 1 - overlap(box, bounds) / area
    own = _distance(anchor, box)
    mistaken = any(_distance(rival, box) < own + _CLEARLY for rival in rivals)  # it would be read as another's
    return 1e4 * (covered + 2 * outside) + 300 * mistaken + own


def _distance(point: _Place, box: Box) -> float:
    return math.dist(point, (min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])))


_LOG_FROM = 6.0  # largest over smallest latency beyond which a linear axis hides the fast end
ALL_RIGHT = 100.4  # top of the accuracy axis, in percent: room for a label above 100 and for nothing else


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
            where = f"{label(point.variant)}, {label(point.engine)}: {judged.title} {judged.text(point.score)}"
            tip(mark, f"{where}, p50 {significant(point.p50_ms)} ms")
            if point.interval is not None:
                axes.vlines(point.p50_ms, *point.interval, color=colours[point.variant], linewidth=1.2, zorder=2)
    y_label = f"{judged.title}, {judged.unit}" if judged.unit else judged.title
    axes.set(xlabel=f"p50 latency, ms (batch {points[0].batch_size})", ylabel=y_label)
    if form.narrow:
        figure.legend(loc="outside upper left", ncols=2, handletextpad=0.2, columnspacing=1.2)
    better = _better(axes)
    names = [label(p.variant) if form.narrow else f"{label(p.variant)}, {label(p.engine)}" for p in points]
    _label(figure, axes, points, names, better)
    return figure


def _scale(axes: Axes, points: Sequence[Point], judged: Judged) -> None:
    latencies = [point.p50_ms for point in points]
    low, high = min(latencies), max(latencies)
    if high / low > _LOG_FROM:
        axes.set(xscale="log", xlim=(low / 1.45, high * 1.45))
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
        span = axes.get_ylim()
        low, high = max(0.0, min(span)), min(100.0, max(span))
        axes.set(yticks=[tick for tick in axes.get_yticks() if low <= tick <= high], ylim=span)


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
    axes.set(xlim=(0, longest * 1.28), ylim=(y + 0.5, 0.6))
    axes.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    bare(axes, grid="x")


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
    figure = new_figure(form, 3.4)
    axes = figure.subplots()
    for kind, colour in _COLOURS.items():
        own = [mark for mark in marks if mark.kind == kind]
        size = 7.7 if kind == "chosen" else 4.9
        for i, mark in enumerate(own):
            (point,) = axes.plot(
                mark.x, mark.y, "o", markersize=size, color=LIGHT[colour], label=_NAMES[kind] if not i else None
            )
            tip(point, mark.text)
    steps = sorted((m.x, m.y) for m in marks if m.kind in {"front", "chosen"})
    axes.plot([x for x, _ in steps], [y for _, y in steps], color=LIGHT["blue"], linewidth=1, zorder=1)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend()
    return figure
