"""Sensitivity of layers as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping

from compress.quantization.sensitivity.sensitivity import LayerSensitivity, Sensitivity
from compress.support.meters import metric_title, score_text

_COLUMNS = ("format", "layer", "kind", "weights", "macs")
_EFFECT = ("sqnr_db", "agreement")


def sensitivity_csv(reports: Mapping[str, Sensitivity]) -> str:
    """Shares are from 0 to 1; an empty field is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = next(iter(reports.values())).metric if reports else "top1"
    writer.writerow([*_COLUMNS, *(f"{part}_{name}" for part in ("alone", "left_out") for name in (*_EFFECT, metric))])
    for name, report in reports.items():
        writer.writerows(_cells(name, row) for row in report.rows)
    return text.getvalue()


def _cells(name: str, row: LayerSensitivity) -> list[object]:
    effects = [cell for e in (row.alone, row.left_out) for cell in (e.sqnr_db, e.agreement, e.score)]
    return [name, row.layer, row.kind, row.weight_elements, row.macs, *effects]


def sensitivity_markdown(reports: Mapping[str, Sensitivity]) -> str:
    """A table for each format, the worst layer first."""
    return "\n".join(_table(name, report) for name, report in reports.items())


def _table(name: str, report: Sensitivity) -> str:
    whole, title = report.quantized, metric_title(report.metric)
    unit = report.unit
    lines = [
        f"## {name}",
        "",
        f"{report.images} images; float {title} {score_text(report.float_score, unit)}; all quantized: "
        f"SQNR {whole.sqnr_db:.1f} dB, agreement {_share(whole.agreement)}, {title} {score_text(whole.score, unit)}.",
        "",
        f"| layer | weights | alone: SQNR, dB | agreement | {title} | left float: SQNR, dB | won back, dB | {title} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(report.rows, key=lambda row: row.alone.sqnr_db):
        alone, left = row.alone, row.left_out
        won = "" if math.isinf(left.sqnr_db) else f"{left.sqnr_db - whole.sqnr_db:+.2f}"
        lines.append(
            f"| {row.layer} | {row.weight_elements:,} | {alone.sqnr_db:.1f} | {_share(alone.agreement)} | "
            f"{score_text(alone.score, unit)} | {left.sqnr_db:.1f} | {won} | {score_text(left.score, unit)} |"
        )
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"
