"""Accuracy of each improvement of post-training quantization, alone and together, on networks trained here."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from analysis.common.side_by_side import side_by_side
from analysis.common.study import Row, command_line, study_parser
from analysis.ptq_ablation import report
from analysis.ptq_ablation.cases import ADAROUND, CALIBRATION, CASES, Case
from analysis.ptq_ablation.unit import Setup, missing, read_rows
from compress.files import write_json

UNIT = "analysis.ptq_ablation.unit"


def run(cases: list[str], seeds: int, setup: Setup, options: argparse.Namespace) -> None:
    """Train the networks without weights, then measure the cases without rows."""
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
        for name in sorted(cases, key=lambda name: -adaround_rows(CASES[name]))  # the longest first
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
            print(f"{len(units) - done} of {len(units)} units not done in time; the same command continues", flush=True)
            return


def adaround_rows(case: Case) -> int:
    """Return how many rows of a case use AdaRound, which takes most of the time."""
    return sum("adaround" in changes for changes in case.rows.values())


def summary(name: str, seeds: int, setup: Setup) -> list[Row]:
    """Return mean, spread and recovered share of each row of a finished case."""
    table = []
    seen = [read_rows(name, seed, setup) for seed in range(seeds)]
    of: dict[str, list[Row]] = {row: [found[row] for found in seen] for row in ("float", *CASES[name].rows)}
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


def main() -> None:
    """Train, quantize, measure and write."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--processes", type=int, default=1, help="units side by side, one thread each")
    parser.add_argument("--budget-s", type=float, help="seconds for all; unfinished units are then ended")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for a unit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the epochs, few steps")
    parser.add_argument("--cache", type=Path, default=Path("runs/ptq_ablation"))
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
    document = {
        "command": command_line(),
        "seeds": seeds,
        "side_by_side": a.processes,
        "setup": {"epochs": setup.epochs, "steps": setup.steps, "calibration": CALIBRATION},
        "unfinished": [CASES[name].title for name in a.cases if name not in finished],
        "cases": [{"name": name, "title": CASES[name].title, "rows": summary(name, seeds, setup)} for name in finished],
    }
    file = write_json(a.out / "ptq_ablation.json", document)
    report.write(file)
    print(file.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
