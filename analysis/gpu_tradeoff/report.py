"""Write gpu_tradeoff.md and .png from gpu_tradeoff.json.

    python -m analysis.gpu_tradeoff.report results/h100/gpu_tradeoff.json

Findings stand in `gpu_tradeoff.notes.md` beside the data, and become a part of the page.
"""

from __future__ import annotations

import json
from pathlib import Path

from analysis.common.study import Row, listed, report_from_file
from compress.files import write_text
from compress.plots.style import WIDE, save_figure, styled
from compress.plots.tradeoff import Point, draw_tradeoff
from compress.text import display

BATCH = 128


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text(encoding="utf-8"))
    timed = [row for row in report["rows"] if "gpu_p50_ms" in row]
    base = next((row["gpu_p50_ms"] for row in timed if row["variant"] == "float"), None)
    lines = ["# ResNet-50 on a GPU: fp16, INT8 and 2:4 INT8", ""]
    lines += [f"Recipe `resnet50-sparse` at {report['pixels']} px, engine `cuda`, batches of {BATCH}; "
              f"{listed(report['machine'])}. `{report['command']}`, {report['seconds']} s.", ""]  # fmt: skip
    lines += ["| network | engine | top-1 % | GPU ms | of float | with copies ms | SQNR dB |", "|" + "---|" * 7]
    lines += [_row(row, base) for row in timed]
    notes = file.with_suffix(".notes.md")
    lines += ["", *(notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else [])]
    write_text(file.with_suffix(".md"), "\n".join(lines).rstrip() + "\n")
    points = [
        Point(variant=r["variant"], engine=r["engine"], batch_size=BATCH, score=r["top1"], p50_ms=r["gpu_p50_ms"])
        for r in timed if "top1" in r
    ]  # fmt: skip
    if points:
        with styled():
            save_figure(draw_tradeoff(points, WIDE), file.with_suffix(".png"))


def _row(row: Row, base: float | None) -> str:
    share = "" if base is None else f"{row['gpu_p50_ms'] / base:.2f}"
    numbers = (row.get("top1"), row["gpu_p50_ms"], None, row.get("gpu_with_transfers_p50_ms"), row.get("sqnr_db"))
    cells = [share if i == 2 else "" if n is None else f"{n:.{(2, 3, 0, 3, 1)[i]}f}" for i, n in enumerate(numbers)]
    return f"| {display(row['variant'])} | {display(row['engine'])} | {' | '.join(cells)} |"


if __name__ == "__main__":
    report_from_file(__doc__, write)
