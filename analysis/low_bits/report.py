"""The page of the study, from its rows."""

from __future__ import annotations

import statistics
from pathlib import Path

from analysis.common.study import Row, listed, read_rows, report_from_file


def write(folder: Path) -> str:
    """Write `low_bits.md` into the folder of the rows, and return it."""
    jobs: dict[str, list[Row]] = {}
    runs: dict[str, dict[str, None]] = {}
    for row in read_rows(folder / "rows.jsonl"):
        jobs.setdefault(row["job"], []).append(row)
        runs.setdefault(f"`{row['command']}`; {listed(row['software'])}", {})[row["job"]] = None
    lines = [
        "# Training at few bits, and with 2:4 masks, on CIFAR-10",
        "",
        "The pictures are a JPEG copy of CIFAR-10: compare gaps, not absolutes. Gap: mean difference to the float "
        "network that each seed began from, in points, and the deviation between seeds. The last column is how "
        "the step ran.",
        "",
        "| training | seeds | top-1 % | float % | gap | epochs | images/s | step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in jobs.items():
        top1 = statistics.mean(r["top1"] for r in rows)
        gaps = [r["top1"] - r["float_top1"] for r in rows if r["float_top1"] is not None]
        spread = f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else ""
        gap = f"{statistics.mean(gaps):+.2f}{spread}" if gaps else ""
        base = f"{statistics.mean(r['float_top1'] for r in rows):.2f}" if gaps else ""
        speed = statistics.mean(r["images_per_s"] for r in rows)
        epochs = ", ".join(str(count) for count in sorted({r["epochs"] for r in rows}))
        cells = (name, len(rows), f"{top1:.2f}", base, gap, epochs, f"{speed:,.0f}", rows[0]["mode"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *(f"- {', '.join(names)}: {run}." for run, names in runs.items())]
    page = "\n".join(lines) + "\n"
    (folder / "low_bits.md").write_text(page)
    return page


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
