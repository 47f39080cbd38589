"""The table and the figure of `qat_cost.py`, from the files of one or several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.files import replacing, write_text

Row = dict[str, Any]


def table(reports: Sequence[Row]) -> str:
    """The cases of all runs as Markdown; the first column tells the run."""
    lines = ["| run | case | variant | ms a step | time / float | peak GiB | memory / float |", "|" + "---|" * 7]
    passes = ["| run | case | calibrator | images/s | of plain inference | ms a pass | ms a call |", "|" + "---|" * 7]
    for number, report in enumerate(reports, 1):
        for case in [*report["cases"], *report.get("unfinished", [])]:
            title = f"| {number} | {case['network']} b{case['batch']} {case['precision']} {case['mode']} |"
            for row in case["rows"]:
                if case["mode"] == "calibration":
                    passes.append(f"{title} {row['variant']} | {_pass(row)} |")
                else:
                    lines.append(f"{title} {row['variant']} | {_step(row)} |")
    missing = [
        f"Not measured in run {n}: {m['case']} ({m['reason']})." for n, r in enumerate(reports, 1) for m in r["missing"]
    ]
    return "\n".join([*lines, *(["", *passes] if len(passes) > 2 else []), "", *missing])


def _step(row: Row) -> str:
    numbers = (row["ms"], row.get("time_ratio"), row.get("peak_gib"), row.get("memory_ratio"))
    return " | ".join("" if n is None else f"{n:.1f}" if i in (0, 2) else f"{n:.2f}" for i, n in enumerate(numbers))


def _pass(row: Row) -> str:
    return f"{row['images_per_s']:.0f} | {row['throughput_ratio']:.2f} | {row['pass_ms']:.2f} | {row['fixed_ms']:.1f}"


def draw(files: Sequence[Path], about: str) -> None:
    """Write table and figure of the runs in JSON files beside the folder that they lie in; of one file beside it.

    Args:
        files: of `qat_cost.py`.
        about: how it was measured, as paragraphs of Markdown.
    """
    from matplotlib.figure import Figure

    from compress.report.style import LIGHT, styled, to_png

    file = files[0] if len(files) == 1 else files[0].parent
    reports = [json.loads(path.read_text()) for path in files]
    runs = [f"{n}. `{r['command']}`; {_machine(r)}" for n, r in enumerate(reports, 1)]
    body = ["# The cost of quantization-aware training", "", about, "", "Runs, each row naming its own:", "", *runs]
    write_text(file.with_suffix(".md"), "\n".join([*body, "", table(reports)]) + "\n")
    best: dict[str, Row] = {}
    for case in (case for report in reports for case in report["cases"]):
        for row in case["rows"]:
            if "time_ratio" in row and row["variant"] != "float":
                name = f"{case['network']} {case['precision']} {case['mode']}: {row['variant']}"
                best.setdefault(name, row)
    if not best:
        return
    with styled():
        figure = Figure(figsize=(9, 0.9 + 0.27 * len(best)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        names = list(best)[::-1]
        titles = (("time_ratio", "time of a step"), ("memory_ratio", "peak memory"))
        for axis, (key, title) in zip(axes, titles, strict=True):
            values = [best[name].get(key) or 0.0 for name in names]
            colours = [LIGHT["blue" if "fused" in name else "grey"] for name in names]
            axis.barh(names, values, color=colours, height=0.7)
            axis.axvline(1.0, color=LIGHT["ink"], linewidth=0.8)
            axis.set(title=f"{title}, float = 1")
            for place, value in enumerate(values):
                axis.text(value, place, f" {value:.2f}" if value else " not measured", va="center", fontsize=8)
        image = to_png(figure)
    with replacing(file.with_suffix(".png")) as temporary:
        temporary.write_bytes(image)


def _machine(report: Row) -> str:
    found = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    return f"{found}; {report['note']}" if "note" in report else found
