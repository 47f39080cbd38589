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


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = report["rows"]
    base = next((row.get("gpu_p50_ms") for row in rows if row["variant"] == "float"), None)
    lines = [f"# {report['network']} on a GPU: fp16, INT8 and 2:4 INT8", ""]
    lines += [
        f"Time: random weights, {report['timed_pixels']} px, batches of {report['batch']}, calls queued one after "
        f"another; fp16 by {report['baseline']}. Top-1: trained on digits at {report['pixels']} px, computed by torch "
        f"(fake quantization). {listed(report['machine'])}. `{report['command']}`, {report['seconds']} s."
    ]
    lines += [""]
    lines += ["| network | engine | top-1 % | GPU ms | of fp16 |", "|" + "---|" * 5]
    lines += [_row(row, base) for row in rows]
    notes = file.with_suffix(".notes.md")
    lines += ["", *(notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else [])]
    write_text(file.with_suffix(".md"), "\n".join(lines).rstrip() + "\n")
    points = [
        Point(
            variant=r["variant"], engine=r["engine"], batch_size=report["batch"], score=r["top1"],
            p50_ms=r["gpu_p50_ms"],
        ) for r in rows if "top1" in r and "gpu_p50_ms" in r
    ]  # fmt: skip
    if points:
        with styled():
            save_figure(draw_tradeoff(points, WIDE), file.with_suffix(".png"))


def _row(row: Row, base: float | None) -> str:
    ms, score = row.get("gpu_p50_ms"), row.get("top1")
    cells = [f"{score:.2f}" if score else "", f"{ms:.3f}" if ms else "", f"{ms / base:.2f}" if ms and base else ""]
    return f"| {display(row['variant'])} | {display(row['engine'])} | {' | '.join(cells)} |"


if __name__ == "__main__":
    report_from_file(__doc__, write)
