"""Write qat_cost.md and .png from qat_cost.json; further files add their runs to the first one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.common.study import Row, listed, option, study_options
from compress.files import write_json, write_text
from compress.plots.style import LIGHT, save_figure, styled

ORDER = (
    "resnet50",
    "resnet18",
    "mobilenet_v2",
    "vgg16",
    "vit_s",
    "regnet_y_3_2gf",
    "efficientnet_v2_s",
    "mobilenet_v3_large",
    "convnext_tiny",
    "swin_t",
    "densenet121",
    "tiny",
)
MODES = ("compiled", "regions", "graphs", "recorded", "eager", "calibration")


def read_runs(file: Path) -> list[Row]:
    runs: list[Row] = json.loads(file.read_text())["runs"]
    return runs


def cases_of(runs: Sequence[Row]) -> list[tuple[int, Row]]:
    found = [(run["run"], case) for run in runs for case in [*run["cases"], *run.get("unfinished", [])]]
    places = {name: place for place, name in enumerate((*ORDER, *MODES))}
    return sorted(found, key=lambda x: (places[x[1]["network"]], x[1]["precision"], places[x[1]["mode"]], x[0]))


def table(runs: Sequence[Row]) -> str:
    steps = ["| case | variant | ms a step | time / float | peak GiB | memory / float | run |", "|" + "---|" * 7]
    passes = ["| case | calibrator | images/s | of plain inference | ms a pass | ms a call | run |", "|" + "---|" * 7]
    for number, case in cases_of(runs):
        title = f"| {case['network']} b{case['batch']} {case['precision']} {case['mode']}"
        for row in case["rows"]:
            if case["mode"] == "calibration":
                rate = f"{row['images_per_s']:.0f} | {row['throughput_ratio']:.2f} | {row['pass_ms']:.2f}"
                passes.append(f"{title} | {row['variant']} | {rate} | {row['fixed_ms']:.1f} | {number} |")
            else:
                steps.append(f"{title} | {row['variant']} | {_step(row)} | {number} |")
    missing = [f"- Not measured in run {r['run']}: {m['case']} ({m['reason']})." for r in runs for m in r["missing"]]
    return "\n".join([*steps, *(["", *passes] if len(passes) > 2 else []), "", *missing])


def _step(row: Row) -> str:
    numbers = (row["ms"], row.get("time_ratio"), row.get("peak_gib"), row.get("memory_ratio"))
    return " | ".join("" if n is None else f"{n:.1f}" if i in (0, 2) else f"{n:.2f}" for i, n in enumerate(numbers))


def overview(runs: Sequence[Row]) -> str:
    newest: dict[tuple[str, str], dict[str, str]] = {}
    dates = {run["run"]: run["recorded"] for run in runs}
    oldest_first = sorted(cases_of(runs), key=lambda found: dates[found[0]])
    for number, case in oldest_first:
        column = "recorded" if case["mode"] == "graphs" else str(case["mode"])
        for row in case["rows"] if case["precision"] == "bf16" and case["batch"] == 128 else ():
            if row["variant"] != "float" and "time_ratio" in row:
                memory = f", {row['memory_ratio']:.2f}" if "memory_ratio" in row else ""
                cells = newest.setdefault((case["network"], row["variant"]), {})
                cells[column] = f"{row['time_ratio']:.2f}{memory} ({number})"
    lines = ["| network | variant | compiled | regions | CUDA graphs | eager |", "|" + "---|" * 6]
    for (network, variant), cells in sorted(newest.items(), key=lambda item: ORDER.index(item[0][0])):
        values = (cells.get(mode, "") for mode in ("compiled", "regions", "recorded", "eager"))
        lines.append(f"| {network} | {variant} | {' | '.join(values)} |")
    return "\n".join(lines)


def longest_kernels(runs: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for number, case in cases_of(runs):
        for row in case["rows"]:
            if "kernels" in row:
                title = f"{case['network']} {case['mode']}, {row['variant']}, run {number}"
                lines += ["", f"{title}: all kernels of a step take {row['kernels_ms']:.1f} ms.", ""]
                lines += ["| ms | count | kernel | shapes |", "|---|---|---|---|"]
                lines += [
                    f"| {k['ms']:.3f} | {k['count']:.0f} | `{k['kernel'][:90]}` | {k.get('shapes', '')[:90]} |"
                    for k in row["kernels"]
                ]
    return ["", "## The longest kernels", *lines] if lines else []


def write(file: Path) -> None:
    runs = read_runs(file)
    machines = list(dict.fromkeys(listed(run["machine"]) for run in runs))
    lines = ["# The cost of quantization-aware training", "", *(f"{text}." for text in machines), ""]
    lines += [
        "Time and, after the comma, memory of a step over those of float training in the same run, whose number is"
    ]
    lines += ["in brackets; bf16, batch 128, the newest run of each. Runs, machines and milliseconds are below.", ""]
    lines += [overview(runs), "", "## All rows", "", table(runs), ""]
    lines += ["## Runs", "", "| run | recorded | GPU | command | remarks |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['run']} | {r['recorded']} | {r['machine'].get('gpu', '')} | `{r['command']}` | {r.get('note', '')} |"
        for r in runs
    ]
    lines += longest_kernels(runs)
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")
    save_figure(draw(runs), file.with_suffix(".png"))


DRAWN = ("fused", "modelopt", "torch-ops", "pytorch-quantization")


def draw(runs: Sequence[Row]) -> Figure:
    best: dict[str, Row] = {}
    dates = {run["run"]: run["recorded"] for run in runs}
    for _, case in sorted(cases_of(runs), key=lambda found: (dates[found[0]], found[0])):
        mode = "CUDA graphs" if case["mode"] in ("graphs", "recorded") else case["mode"]
        for row in case["rows"] if case["precision"] == "bf16" else ():
            if "time_ratio" in row and row["variant"] in DRAWN:
                best[f"{case['network']}, {mode}: {row['variant']}"] = row
    best = dict(sorted(best.items(), key=lambda item: ORDER.index(item[0].partition(",")[0])))
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
            axis.set_ylim(-0.7, len(names) - 0.3)
            axis.grid(visible=False, axis="y")
            axis.set(title=f"{title}, float = 1")
            for row, value in enumerate(values):  # in a column of their own, where no line and no bar passes
                text = f"{value:.2f}" if value else "not measured"
                place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
                axis.annotate(text, (1.0, row), xycoords=("axes fraction", "data"), **place, fontsize=8)
    return figure


def main() -> None:
    arguments = study_options(
        __doc__,
        option("file", type=Path),
        option("others", type=Path, nargs="*", help="files of other runs, which are added to the first file"),
    )
    runs = read_runs(arguments.file)
    for other in arguments.others:
        runs += [run | {"run": len(runs) + i} for i, run in enumerate(read_runs(other), 1)]
    if arguments.others:
        write_json(arguments.file, {"runs": runs})
    write(arguments.file)


if __name__ == "__main__":
    main()
