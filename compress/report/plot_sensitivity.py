"""Sensitivity for readers: a figure, and the same rows as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compress.quantization.sensitivity import LayerSensitivity, Sensitivity
from compress.report.style import LIGHT, Format, bare, distinct, new_figure, shorten

_COLOURS = ("blue", "amber", "green", "purple", "sky", "alarm")
_COLUMNS = (
    *("format", "layer", "kind", "weights", "macs", "alone_sqnr_db", "alone_agreement", "alone_top1"),
    *("left_out_sqnr_db", "left_out_agreement", "left_out_top1"),
)


def draw_sensitivity(reports: Mapping[str, Sensitivity], form: Format) -> Figure:
    """Two panels over the layers in network order: the noise of each alone, and what leaving it float wins back.

    Args:
        reports: by format, not empty; each becomes a row of marks.
        form: what it is drawn for.
    """
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


def sensitivity_csv(reports: Mapping[str, Sensitivity]) -> str:
    """All rows with a header line; shares from 0 to 1, an empty field where there is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for name, report in reports.items():
        writer.writerows(_cells(name, row) for row in report.rows)
    return text.getvalue()


def _cells(name: str, row: LayerSensitivity) -> list[object]:
    effects = [cell for e in (row.alone, row.left_out) for cell in (e.sqnr_db, e.agreement, e.top1)]
    return [name, row.layer, row.kind, row.weight_elements, row.macs, *effects]


def sensitivity_markdown(reports: Mapping[str, Sensitivity]) -> str:
    """A table a format, the worst layer first."""
    return "\n".join(_table(name, report) for name, report in reports.items())


def _table(name: str, report: Sensitivity) -> str:
    whole = report.quantized
    lines = [
        f"## {name}",
        "",
        f"{report.images} images; float top-1 {_share(report.float_top1)}; all quantized: SQNR {whole.sqnr_db:.1f} dB, "
        f"agreement {_share(whole.agreement)}, top-1 {_share(whole.top1)}.",
        "",
        "| layer | weights | alone: SQNR, dB | agreement | top-1 | left float: SQNR, dB | won back, dB | top-1 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(report.rows, key=lambda row: row.alone.sqnr_db):
        alone, left = row.alone, row.left_out
        won = "" if math.isinf(left.sqnr_db) else f"{left.sqnr_db - whole.sqnr_db:+.2f}"
        lines.append(
            f"| {row.layer} | {row.weight_elements:,} | {alone.sqnr_db:.1f} | {_share(alone.agreement)} | "
            f"{_share(alone.top1)} | {left.sqnr_db:.1f} | {won} | {_share(left.top1)} |"
        )
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"
