"""Write ptq_ablation.md and .png from ptq_ablation.json."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from analysis.common.study import Row, report_from_file
from compress.files import write_text
from compress.plots.style import LIGHT, save_figure, styled


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text())
    write_text(file.with_suffix(".md"), text(report))
    with styled():
        figure = draw(report)
    save_figure(figure, file.with_suffix(".png"))


def text(report: Row) -> str:
    """Return the tables in Markdown."""
    machines = sorted({m for case in report["cases"] for row in case["rows"] for m in row["machines"]})
    lines = [
        "# Improvements of post-training quantization, alone and together",
        "",
        f"`{report['command']}`",
        "",
        f"{'; '.join(machines)}; {report['seeds']} seeds, means with the lowest and the highest; "
        f"449 evaluation images, {report['setup'].get('calibration', 256)} for calibration; AdaRound "
        f"{report['setup']['steps']} steps a layer. Recovered: share of the top-1 lost by rounding to nearest (blank "
        f"where it loses half a point or less). Seconds are of `quantize` as a whole, one thread, "
        f"{report['side_by_side']} units side by side.",
    ]
    if report["unfinished"]:
        lines += ["", f"Not measured in all seeds: {', '.join(report['unfinished'])}."]
    for case in report["cases"]:
        lines += ["", f"## {case['title']}", ""]
        lines += [
            "| | top-1 % | lowest to highest | SQNR dB | recovered % | s |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in case["rows"]:
            noise = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
            gained = "" if row["recovered"] is None else f"{100 * row['recovered']:.0f}"
            lines.append(
                f"| {row['row']} | {row['top1_percent']:.2f} | {row['top1_lowest']:.2f} to {row['top1_highest']:.2f} | "
                f"{noise} | {gained} | {row['seconds']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def draw(report: Row) -> Figure:
    """Draw a panel a case: top-1 of each row with the spread of its seeds, the float network as a line."""
    cases = report["cases"]
    heights = [len(case["rows"]) for case in cases]
    figure = Figure(figsize=(8, 0.32 * sum(heights) + 0.9 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 1, height_ratios=heights, squeeze=False)
    for case, axes in zip(cases, panels[:, 0], strict=True):
        rows = [row for row in case["rows"] if row["row"] != "float"][::-1]
        whole = next(row["top1_percent"] for row in case["rows"] if row["row"] == "float")
        means = [row["top1_percent"] for row in rows]
        spread = [
            [m - row["top1_lowest"] for m, row in zip(means, rows, strict=True)],
            [row["top1_highest"] - m for m, row in zip(means, rows, strict=True)],
        ]
        colours = [LIGHT["grey" if row["row"].startswith("nearest") else "blue"] for row in rows]
        axes.barh([row["row"] for row in rows], means, xerr=spread, color=colours, height=0.7, ecolor=LIGHT["ink"])
        axes.axvline(whole, color=LIGHT["alarm"], linewidth=1)
        axes.set_title(f"{case['title']} (line: float, {whole:.1f} %)", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 100)
    panels[-1, 0].set_xlabel("top-1, %", fontsize=8)
    return figure


if __name__ == "__main__":
    report_from_file(__doc__, write)
