"""Curves: training on one axis of epochs; precision of detectors by recall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compress.measure.metric import Judged
from compress.plots.style import LIGHT, Format, bare, label, new_figure, nice_limits, tip, variant_colours
from compress.records.rows import PrecisionRow
from compress.support.meters import shown
from compress.support.text import finite, plain
from compress.training.log import EpochRow

TOP1 = Judged()

Phases = Sequence[tuple[str, str, Sequence[EpochRow]]]
"""(name, palette colour, epochs) in the order in which they ran."""


def phases(
    train: Sequence[EpochRow],
    qat: Sequence[EpochRow],
    sparse: Sequence[EpochRow] = (),
    sparse_qat: Sequence[EpochRow] = (),
) -> list[tuple[str, str, Sequence[EpochRow]]]:
    """The trainings in their order."""
    every = (
        ("float training", "grey", train),
        ("fine-tuning after pruning", "green", sparse),
        ("QAT", "blue", qat),
        ("sparse QAT", "purple", sparse_qat),
    )
    return [(name, colour, rows) for name, colour, rows in every if rows]


def draw_training(parts: Phases, form: Format, *, judged: Judged = TOP1) -> Figure:
    """Loss and metric by epoch; QAT goes on where float ended."""
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
    handles, labels = score.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if form.narrow else 4, handlelength=1.8)
    return figure


_TIPS = 80
"""Points of a curve up to which each shows its value under the pointer."""

Values = Sequence[tuple[int, float | None]]
"""(epoch, value); None = not measured after this epoch."""


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
        axes.set_xlim(0.5, epochs + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch")
        bare(axes)


MOST_CLASSES = 6
"""Panels of a figure."""


def draw_precision(rows: Sequence[PrecisionRow], form: Format) -> Figure:
    """A panel for each class, a line for each variant."""
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
        axes.set_title(plain(name))
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 102)
        axes.set_yticks(range(0, 101, 25))
        bare(axes)
    for axes in grid.ravel()[len(classes) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("recall, %")
    for axes in grid[:, 0]:
        axes.set_ylabel("precision, %")
    for variant in variants:
        grid[0, 0].plot([], [], color=colours[variant], linewidth=3, label=label(variant))
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(variants), handlelength=1.2)
    return figure
