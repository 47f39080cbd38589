"""Write qat_curve.md and .png from qat_curve.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from analysis.common.study import Row, listed, report_from_file
from compress.files import write_text
from compress.plots.style import LIGHT, save_figure, styled

RUNS = ("plain", "plain again", "fused", "fused, INT8")
WINDOW = 20  # steps over which a curve is smoothed


def smoothed(losses: list[float]) -> list[float]:
    """Return means over the last `WINDOW` steps; the first ones over fewer."""
    return [statistics.fmean(losses[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(losses))]


def distance(one: list[float], other: list[float]) -> float:
    """Return the mean distance of two smoothed curves."""
    return statistics.fmean(abs(a - b) for a, b in zip(smoothed(one), smoothed(other), strict=True))


def table(report: Row) -> str:
    """Return the seeds as Markdown."""
    others = RUNS[1:]
    titles = ["seed", "first loss", *(f"last loss: {run}" for run in RUNS), *(f"plain to {run}" for run in others)]
    titles += ["scales compared", "the same"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in report["seeds"]:
        curves = row["losses"]
        last = [statistics.fmean(curves[run][-WINDOW:]) for run in RUNS]
        cells = [f"{curves['plain'][0]:.3f}", *(f"{value:.3f}" for value in last)]
        cells += [f"{distance(curves['plain'], curves[run]):.4f}" for run in others]
        cells += [str(row["scales"]), "yes" if all(row["same_scales"].values()) else "no"]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text())
    lines = [
        "# Fused and plain training",
        "",
        f"`{report['command']}`; {listed(report['machine'])}. Curves are means over {WINDOW} steps; distances are "
        "the mean absolute differences of curves.",
        "",
        table(report),
    ]
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")
    save_figure(draw(report), file.with_suffix(".png"))


def draw(report: Row) -> Figure:
    """Draw the curves, a panel a seed; widths and dashes differ, so that curves on top of each other are visible."""
    looks = (("grey", 3.0, "-"), ("amber", 1.4, "-"), ("blue", 1.2, "--"), ("alarm", 1.0, ":"))
    with styled():
        figure = Figure(figsize=(3.4 * len(report["seeds"]), 3.2), layout="constrained")
        panels = figure.subplots(1, len(report["seeds"]), sharey=True, squeeze=False)[0]
        for axis, row in zip(panels, report["seeds"], strict=True):
            for run, (colour, width, style) in zip(RUNS, looks, strict=True):
                curve = smoothed(row["losses"][run])
                axis.plot(curve, color=LIGHT[colour], label=run, linewidth=width, linestyle=style)
            axis.set(title=f"seed {row['seed']}", xlabel="step")
        panels[0].set_ylabel(f"training loss, mean of {WINDOW} steps")
        panels[-1].legend()
    return figure


if __name__ == "__main__":
    report_from_file(__doc__, write)
