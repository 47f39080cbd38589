"""Sensitivity of layers as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping

from compress.quantization.sensitivity.sensitivity import LayerSensitivity, Sensitivity

_COLUMNS = (
    *("format", "layer", "kind", "weights", "macs", "alone_sqnr_db", "alone_agreement", "alone_top1"),
    *("left_out_sqnr_db", "left_out_agreement", "left_out_top1"),
)


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
