"""Write gpu_tradeoff.md and .png from gpu_tradeoff.json.

    python -m analysis.gpu_tradeoff.report results/h100/gpu_tradeoff.json

Findings stand in `gpu_tradeoff.notes.md` beside the data, and become a part of the page.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from analysis.common.study import Row, listed, report_from_file
from compress.files import write_text
from compress.plots.style import WIDE, save_figure, styled
from compress.plots.tradeoff import Point, draw_tradeoff
from compress.text import display

ACCURACIES = Path("results/h200/shapes_accuracy.json")
METHODS = {"float": "float", "ptq": "PTQ W8A8 entropy", "sparse-ptq": "2:4 permuted, PTQ W8A8"}
"""Variants of this study by their names in `shapes_accuracy`."""


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = [row | {"top1": accuracy(report["network"], row["variant"])} for row in report["rows"]]
    base = next((row.get("gpu_p50_ms") for row in rows if row["variant"] == "float"), None)
    lines = [f"# {report['network']} on a GPU: fp16, INT8 and 2:4 INT8", ""]
    lines += [
        f"Time: {report['pixels']} px, batches of {report['batch']}, calls queued one after another, random weights; "
        f"fp16 by {report['baseline']}. {listed(report['machine'])}. `{report['command']}`, {report['seconds']} s."
    ]
    lines += [
        "",
        "Top-1: means of three seeds on `shapes`, of the files ([shapes_accuracy](../h200/shapes_accuracy.md)).",
    ]
    lines += ["", "| network | engine | top-1 % | GPU ms | of fp16 |", "|" + "---|" * 5]
    lines += [_row(row, base) for row in rows]
    notes = file.with_suffix(".notes.md")
    lines += ["", *(notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else [])]
    write_text(file.with_suffix(".md"), "\n".join(lines).rstrip() + "\n")
    points = [
        Point(
            variant=r["variant"], engine=r["engine"], batch_size=report["batch"], score=r["top1"],
            p50_ms=r["gpu_p50_ms"],
        ) for r in rows if r["top1"] is not None and "gpu_p50_ms" in r
    ]  # fmt: skip
    if points:
        with styled():
            save_figure(draw_tradeoff(points, WIDE), file.with_suffix(".png"))


def accuracy(network: str, variant: str) -> float | None:
    """Return the mean top-1 over all seeds, in percent; None where it was not measured."""
    measured = json.loads(ACCURACIES.read_text(encoding="utf-8"))["rows"]
    found = [r["top1"] for r in measured if (r["network"], r["method"]) == (network, METHODS[variant]) and "top1" in r]
    return statistics.mean(found) if found else None


def _row(row: Row, base: float | None) -> str:
    ms, score = row.get("gpu_p50_ms"), row.get("top1")
    cells = [f"{score:.2f}" if score else "", f"{ms:.3f}" if ms else "", f"{ms / base:.2f}" if ms and base else ""]
    return f"| {display(row['variant'])} | {display(row['engine'])} | {' | '.join(cells)} |"


if __name__ == "__main__":
    report_from_file(__doc__, write)
