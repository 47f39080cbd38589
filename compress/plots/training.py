"""Training curves: the float baseline, then QAT, on one axis of epochs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compress.plots.style import LIGHT, Format, bare, new_figure, nice_limits
from compress.text import finite
from compress.training.log import EpochRow

Phases = Sequence[tuple[str, str, Sequence[EpochRow]]]
"""(name, palette colour, epochs) in the order in which they ran."""


def phases(train: Sequence[EpochRow], qat: Sequence[EpochRow]) -> list[tuple[str, str, Sequence[EpochRow]]]:
    """The trainings of the run, float first."""
    both = (("float training", "grey", train), ("QAT", "blue", qat))
    return [(name, colour, rows) for name, colour, rows in both if rows]


def draw_training(parts: Phases, form: Format) -> Figure:
    """Loss and accuracy by epoch; QAT goes on where float training ended.

    Args:
        parts: of `phases`, not empty.
        form: what it is drawn for.
    """
    figure = new_figure(form, 5.4 if form.narrow else 3.1)
    loss, top1 = figure.subplots(2 if form.narrow else 1, 1 if form.narrow else 2, squeeze=False).ravel()
    start = 0
    for name, colour, rows in parts:
        _curve(loss, rows, start, "train_loss", 1, colour=colour, dashed=True)
        _curve(loss, rows, start, "val_loss", 1, colour=colour)
        _curve(top1, rows, start, "train_top1", 100, colour=colour, dashed=True)
        _curve(top1, rows, start, "val_top1", 100, colour=colour)
        _last(top1, rows, start)
        if start:
            for axes in (loss, top1):
                axes.axvline(start + 0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
        start += rows[-1].epoch
        top1.plot([], [], color=LIGHT[colour], linewidth=3, label=name)
    top1.plot([], [], color=LIGHT["muted"], label="evaluation", marker="o", markersize=3.5)
    top1.plot([], [], color=LIGHT["muted"], linestyle=(0, (3, 2)), label="training images")
    _limits(loss, top1, parts, start)
    loss.set_title("Loss")
    top1.set_title("Top-1, %")
    handles, labels = top1.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if form.narrow else 4, handlelength=1.8)
    return figure


def _curve(
    axes: Axes, rows: Sequence[EpochRow], start: int, name: str, factor: float, *, colour: str, dashed: bool = False
) -> None:
    points = [(start + row.epoch, factor * getattr(row, name)) for row in rows if finite(getattr(row, name))]
    if not points:
        return
    style = {"linestyle": (0, (3, 2)), "linewidth": 1.2} if dashed else {"linewidth": 1.8}
    marker = "" if (dashed and len(points) > 1) or len(points) > 40 else "o"
    fill = LIGHT["paper" if dashed else colour]
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


def _last(axes: Axes, rows: Sequence[EpochRow], start: int) -> None:
    """Write the last evaluated top-1 at its point."""
    known = [row for row in rows if finite(row.val_top1)]
    if known and known[-1].val_top1 is not None:
        value = 100 * known[-1].val_top1
        above = value >= 100 * known[-1].train_top1  # away from the other curve
        axes.annotate(
            f"{value:.2f}",
            (start + known[-1].epoch, value),
            (0, 6 if above else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=8,
        )


def _limits(loss: Axes, top1: Axes, parts: Phases, epochs: int) -> None:
    values = [
        100 * v for _, _, rows in parts for r in rows for v in (r.train_top1, r.val_top1) if finite(v) and v is not None
    ]
    if values:
        top1.set_ylim(*nice_limits(values, least_span=2.0))
    losses = [
        v for _, _, rows in parts for r in rows for v in (r.train_loss, r.val_loss) if v is not None and finite(v)
    ]
    loss.set_ylim(min([0.0, *losses]), 1.1 * max([0.0, *losses]) or 1.0)
    for axes in (loss, top1):
        axes.set_xlim(0.5, epochs + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch")
        bare(axes)
