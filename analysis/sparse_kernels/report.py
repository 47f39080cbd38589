"""Write sparse_kernels.md and .png from sparse_kernels.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.common.study import Row, listed, report_from_file
from analysis.sparse_kernels.table import details, speedup, summary
from compress.files import write_text
from compress.plots.style import LIGHT, compact, save_figure, styled


def write(file: Path) -> None:
    """Write the page, and the figure of the gain of each shape by its multiply-accumulates.

    Raises:
        SystemExit: no product was measured.
    """
    report = json.loads(file.read_text())
    about = listed({name: value for name, value in report["machine"].items() if value})
    note = f" {report['note']}." if report.get("note") else ""
    head = ["# Dense against 2:4 matrix products", "", f"`{report['command']}`; {about}.{note}", ""]
    body = [*summary(report["rows"]), "", *details(report["rows"]), "", "![gain by shape](sparse_kernels.png)"]
    write_text(file.with_suffix(".md"), "\n".join([*head, *body]) + "\n")
    measured = [r for r in report["rows"] if speedup(r)]
    shown = sorted({r["precision"] for r in measured})
    if not shown:
        raise SystemExit("sparse_kernels: no product was measured, so there is nothing to draw")
    with styled():
        figure = Figure(figsize=(1.2 + 3.9 * len(shown), 4.0), layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axis, precision in zip(panels, shown, strict=True):
            own = [r for r in measured if r["precision"] == precision]
            scatter(axis, own)
            searched = any(r["2:4"]["how"] == "searched" for r in own)
            how = "algorithm searched" if searched else "default algorithm: the search fails"
            axis.axhline(1.0, color=LIGHT["ink"], linewidth=0.8)
            axis.set(xscale="log", ylim=(0, 2.5), title=f"{precision.upper()}, {how}")
            axis.set_xlabel("multiply-accumulates of the dense product")
            axis.xaxis.set_major_formatter(compact)
        figure.axes[0].set_ylabel("dense time / 2:4 time (above 1: 2:4 is faster)")
        figure.axes[0].legend(loc="upper left", ncols=2)
        save_figure(figure, file.with_suffix(".png"))


def scatter(axis: Any, rows: list[Row]) -> None:
    """Draw a marker for each product; its shape and colour give the network, and filled ones the largest batch."""
    largest = max(r["batch"] for r in rows)
    looks = {"resnet50": ("o", "blue"), "vgg16": ("s", "amber"), "vit_b_16": ("^", "green")}
    for network, batch in dict.fromkeys((r["network"], r["batch"]) for r in rows):
        own = [r for r in rows if (r["network"], r["batch"]) == (network, batch)]
        mark, colour = looks[network][0], LIGHT[looks[network][1]]
        axis.scatter(
            [r["outputs"] * r["inputs"] * r["positions"] for r in own],
            [speedup(r) for r in own],
            marker=mark,
            s=22,
            label=f"{network}, batch {batch}",
            edgecolors=colour,
            facecolors=colour if batch == largest else "none",
        )


if __name__ == "__main__":
    report_from_file(__doc__, write)
