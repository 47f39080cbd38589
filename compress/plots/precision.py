"""Precision of detectors by recall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from compress.plots.style import Format, bare, label, new_figure, tip, variant_colours
from compress.records.rows import PrecisionRow
from compress.support.text import plain

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
