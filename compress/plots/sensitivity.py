"""The loss of each layer quantized alone, and the gain when it alone stays float."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compress.plots.style import LIGHT, Format, bare, distinct, new_figure
from compress.quantization.sensitivity.sensitivity import Sensitivity
from compress.support.text import shorten

_COLOURS = ("blue", "amber", "green", "purple", "sky", "alarm")


def draw_sensitivity(reports: Mapping[str, Sensitivity], form: Format) -> Figure:
    """Both as panels over the layers, a row of marks for each format."""
    names = list(dict.fromkeys(row.layer for report in reports.values() for row in report.rows))
    height = max(2.6, 0.9 + 0.17 * len(names))
    figure = new_figure(form, 2 * height if form.narrow else height)
    rows, columns = (2, 1) if form.narrow else (1, 2)
    left, right = figure.subplots(rows, columns, squeeze=False).ravel()
    for colour, (name, report) in zip(_cycle(len(reports)), reports.items(), strict=True):
        whole = report.quantized.sqnr_db
        alone = {row.layer: row.alone.sqnr_db for row in report.rows}
        gain = {row.layer: row.left_out.sqnr_db - whole for row in report.rows}
        _marks(left, names, alone, colour, name)
        _marks(right, names, gain, colour, name)
        if math.isfinite(whole):
            left.axvline(whole, color=colour, linestyle=":", linewidth=1.2, label=f"all layers, {name}")
    left.set_title("Quantized alone")
    left.set_xlabel("SQNR of the logits, dB (less is worse)")
    right.set_title("Left float")
    right.set_xlabel("SQNR won back, dB")
    right.axvline(0, color=LIGHT["muted"], linewidth=0.8)
    short = [shorten(name, 26) for name in distinct(names)]
    for axes in (left, right):
        axes.set_yticks(range(len(names)), short, fontsize=7)
        axes.set_ylim(len(names) - 0.4, -0.6)
        bare(axes, grid="x")
    if not form.narrow:
        right.tick_params(labelleft=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if form.narrow else 4, fontsize=7)
    return figure


def _cycle(count: int) -> list[str]:
    return [LIGHT[_COLOURS[i % len(_COLOURS)]] for i in range(count)]


def _marks(axes: Axes, names: list[str], values: Mapping[str, float], colour: str, label: str) -> None:
    places = [(value, names.index(name)) for name, value in values.items() if math.isfinite(value)]
    axes.plot([x for x, _ in places], [y for _, y in places], "o", color=colour, markersize=4.5, label=label)
