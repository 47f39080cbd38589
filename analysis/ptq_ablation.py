"""What each way to better post-training quantization brings, alone and together, on networks trained here.

    python analysis/ptq_ablation.py --processes 2 --out results
    python analysis/ptq_ablation.py --processes 16 --budget-s 480     # as far as eight minutes go; again: it goes on

Three networks, each trained from three seeds on scikit-learn's digits (1,348 to train on, 449 to evaluate):

1. MobileNetV2, W8A8 with one scale a weight tensor: the case of "Data-Free Quantization" (arXiv 1906.04721). Networks
   trained for minutes do not get the channel ranges of ImageNet's MobileNetV2, which differ by two orders of
   magnitude; so besides the network as trained, the same network is quantized after its channels were rescaled by
   log-normal factors (sigma 1, the inverse of equalization, exact behind ReLU), which changes nothing it computes.
2. ResNet-18, W4A8, one scale a weight tensor and one a channel: the case of AdaRound (arXiv 2004.10568). Four bits
   cost a network of ten digits little, so W3A8 and MobileNetV2 at W4A8 stand beside it.
3. A small ViT, W8A8: the case of SmoothQuant (arXiv 2211.10438), as trained and with outliers: 3 channels of each
   LayerNorm's result times 100, taken back in the weights that read it.

Accuracy is of fake quantization in torch on the evaluation split; SQNR is of the logits against the float network that
was quantized. "Recovered" is the share of the top-1 that rounding to nearest loses against float which a row gives
back. Networks are trained, then cases are measured, --processes at a time, each a process with one thread
(ptq_ablation_unit.py). Float weights and finished rows are kept in --cache, and a second run goes on from there. Writes
ptq_ablation.md, .json and .png; a case that is not finished in all seeds is named and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ptq_ablation_unit import ADAROUND, CALIBRATION, CASES, Case, Row, Setup, missing, read_rows
from side_by_side import side_by_side

from compress.files import replacing, write_json, write_text

UNIT = str(Path(__file__).with_name("ptq_ablation_unit.py"))


def run(cases: list[str], seeds: int, setup: Setup, options: argparse.Namespace) -> None:
    """Train what has no weights, then measure what has no rows."""
    end = None if options.budget_s is None else time.monotonic() + options.budget_s
    networks = {CASES[name].network: None for name in cases}
    training = [
        ("train", network, seed)
        for network in networks
        for seed in range(seeds)
        if not setup.weights(network, seed).is_file()
    ]
    measuring = [
        ("measure", name, seed)
        for name in sorted(cases, key=lambda name: -adaround_rows(CASES[name]))  # those that take long first
        for seed in range(seeds)
        if missing(name, seed, setup)
    ]
    for units in (training, measuring):
        commands = [(" ".join(map(str, unit)), [UNIT, *map(str, unit), *setup.arguments()]) for unit in units]
        left = None if end is None else max(0.0, end - time.monotonic())
        done = 0
        for ended in side_by_side(commands, processes=options.processes, timeout=options.timeout, budget_s=left):
            text = ended.why if ended.returncode else ended.last_line
            print(f"{ended.name}: {text} ({ended.seconds:.0f} s)", flush=True)
            done += 1
        if done < len(units):
            print(f"{len(units) - done} of {len(units)} units not done in time; run again to go on", flush=True)
            return


def adaround_rows(case: Case) -> int:
    """How many rows of a case learn their rounding, which takes most of the time."""
    return sum("adaround" in changes for changes in case.rows.values())


def summary(name: str, seeds: int, setup: Setup) -> list[Row]:
    """Mean, spread and share recovered of each row of a case that is finished."""
    table = []
    kept = [read_rows(name, seed, setup) for seed in range(seeds)]
    of: dict[str, list[Row]] = {row: [found[row] for found in kept] for row in ("float", *CASES[name].rows)}
    top1 = {r: [100 * x["top1"] for x in found] for r, found in of.items()}
    lost = statistics.mean(top1["float"]) - statistics.mean(top1["nearest"])
    for row, found in of.items():
        mean = statistics.mean(top1[row])
        gained = (mean - statistics.mean(top1["nearest"])) / lost if lost > 0.5 and row != "float" else None
        noise = [x["sqnr_db"] for x in found if x["sqnr_db"] is not None]
        table.append(
            {
                "row": row,
                "top1_percent": mean,
                "top1_lowest": min(top1[row]),
                "top1_highest": max(top1[row]),
                "sqnr_db": statistics.mean(noise) if noise else None,
                "recovered": None if row == "nearest" else gained,
                "seconds": statistics.median(x["seconds"] for x in found),
                "notes": found[0]["notes"],
                "machines": sorted({f"{x['machine']['cpu']}, torch {x['machine']['torch']}" for x in found}),
            }
        )
    return table


def text(report: Row) -> str:
    """The tables in Markdown."""
    machines = sorted({m for case in report["cases"] for row in case["rows"] for m in row["machines"]})
    lines = [
        "# What each way to better post-training quantization brings",
        "",
        f"`{report['command']}`",
        "",
        f"{'; '.join(machines)}; {report['seeds']} seeds, means with the lowest and the highest; "
        f"449 evaluation images, {CALIBRATION} for calibration; AdaRound "
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


def draw(report: Row, path: Path) -> None:
    """A panel a case: top-1 of each row with the spread of its seeds, the float network as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = report["cases"]
    heights = [len(case["rows"]) for case in cases]
    figure, panels = plt.subplots(
        len(cases), 1, figsize=(8, 0.32 * sum(heights) + 0.9 * len(cases)), height_ratios=heights, squeeze=False
    )
    for case, axes in zip(cases, panels[:, 0], strict=True):
        rows = [row for row in case["rows"] if row["row"] != "float"][::-1]
        whole = next(row["top1_percent"] for row in case["rows"] if row["row"] == "float")
        means = [row["top1_percent"] for row in rows]
        spread = [
            [m - row["top1_lowest"] for m, row in zip(means, rows, strict=True)],
            [row["top1_highest"] - m for m, row in zip(means, rows, strict=True)],
        ]
        colours = ["#9aa5b1" if row["row"].startswith("nearest") else "#3366aa" for row in rows]
        axes.barh([row["row"] for row in rows], means, xerr=spread, color=colours, height=0.7, ecolor="#222222")
        axes.axvline(whole, color="#aa3333", linewidth=1)
        axes.set_title(f"{case['title']} (line: float, {whole:.1f} %)", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 100)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1, 0].set_xlabel("top-1, %", fontsize=8)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)


def main() -> None:
    """Train, quantize, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="units side by side, one thread each")
    parser.add_argument("--budget-s", type=float, help="then no unit starts, and those that run are ended")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a unit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the epochs, few steps")
    parser.add_argument("--cache", type=Path, default=Path("runs/ptq_ablation"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    a = parser.parse_args()
    quick: dict[str, Any] = {"epochs": 0.25, "steps": 50} if a.quick else {"steps": ADAROUND.steps}
    setup = Setup(cache=a.cache, **quick)
    seeds = 1 if a.quick else a.seeds
    a.cache.mkdir(parents=True, exist_ok=True)
    run(a.cases, seeds, setup, a)
    finished = [name for name in a.cases if not any(missing(name, seed, setup) for seed in range(seeds))]
    if not finished:
        print("no case is finished in all seeds: nothing to write")
        return
    report = {
        "command": " ".join(["python", *sys.argv]),
        "seeds": seeds,
        "side_by_side": a.processes,
        "setup": {"epochs": setup.epochs, "steps": setup.steps},
        "unfinished": [CASES[name].title for name in a.cases if name not in finished],
        "cases": [{"name": name, "title": CASES[name].title, "rows": summary(name, seeds, setup)} for name in finished],
    }
    write_json(a.out / "ptq_ablation.json", report)
    write_text(a.out / "ptq_ablation.md", text(report))
    draw(report, a.out / "ptq_ablation.png")
    print(text(report))


if __name__ == "__main__":
    main()
