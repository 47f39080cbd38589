"""Accuracy of four networks on the data set `shapes`, float and compressed in every way, from the exported files.

Units (a network and a seed) run side by side, each in a process of its own; other processes export and evaluate the
files. Rows are written as they come, and the next call continues with units without a row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import deque
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from analysis.common.study import Row, command_line, study_parser
from analysis.shapes_accuracy import report
from analysis.shapes_accuracy.finish import finish_all
from analysis.shapes_accuracy.methods import methods_of, run_unit
from analysis.shapes_accuracy.setting import FULL, NETWORKS, QUICK, QUICK_NETWORKS, Network, Setting
from compress.files import write_json
from compress.measure import describe_machine

RESULTS = Path("results/h200")
Key = tuple[str, int]
DRAIN_S = 25.0  # seconds before the end after which no method is begun, so that the written files can be evaluated
SEEDS = 3


class Study:
    """The rows of a file, and the rows that this call adds."""

    def __init__(self, out: Path, before: Path, setting: Setting, networks: dict[str, Network]) -> None:
        self.path, self.networks = out / "shapes_accuracy.json", networks
        source = self.path if self.path.is_file() else before
        known: Row = json.loads(source.read_text()) if source.is_file() else {}
        described = json.loads(json.dumps(asdict(setting)))
        if known and known["setting"] != described:
            raise SystemExit(f"{source} was measured with another setting; choose another --out, or move the file")
        self.rows: dict[str, Row] = {name_of(row): row for row in known.get("rows", [])}
        self.calls: list[Row] = known.get("calls", [])
        self.setting = described
        self.missing: list[str] = []
        self.call: Row = {"command": command_line(), "machine": describe_machine().to_dict()}

    def left(self, wanted: list[str]) -> deque[Key]:
        """Return the units to run, in order: those without a row, or those of `wanted` that lack a method."""
        every = {f"{name}/{seed}": (name, seed) for name, seed in order(self.networks)}
        if unknown := [name for name in wanted if name not in every]:
            raise SystemExit(f"no unit {', '.join(unknown)}; there are {', '.join(every)}")
        if wanted:
            return deque(every[name] for name in wanted if self.lacks(every[name]))
        return deque(key for key in every.values() if len(self.lacks(key)) == len(methods_of(self.networks[key[0]])))

    def lacks(self, key: Key) -> list[str]:
        """Return the methods of a unit without a row."""
        return [m for m in methods_of(self.networks[key[0]]) if f"{key[0]}/{key[1]}/{m}" not in self.rows]

    def forget(self, key: Key) -> None:
        """Remove the rows of a unit, which come from another training."""
        self.rows = {name: row for name, row in self.rows.items() if (row["network"], row["seed"]) != key}

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows[name_of(row)] = row | {"call": len(self.calls)}
        self.write()

    def hopeless(self, least: float) -> bool:
        """Return True if a float network of this call stays below `least` percent: comparisons then mean nothing."""
        rows = [row for row in self.rows.values() if row["call"] == len(self.calls) and row["method"] == "float"]
        poor = [row for row in rows if row["top1_torch"] < least]
        for row in poor:
            self.missing.append(
                f"{name_of(row)} reached only {row['top1_torch']:.1f} %: stopped; try a smaller --clutter"
            )
        return bool(poor)

    def write(self) -> None:
        """Write the file with the present rows."""
        lacking = [f"{n}/{s}/{m}" for n, s in order(self.networks) for m in self.lacks((n, s))]
        document = {"setting": self.setting, "calls": [*self.calls, self.call], "rows": list(self.rows.values())}
        write_json(self.path, document | {"missing": self.missing, "not_measured": lacking})


def name_of(row: Row) -> str:
    """Return a name such as resnet18/0/QAT W8A8."""
    return f"{row['network']}/{row['seed']}/{row['method']}"


def order(networks: dict[str, Network]) -> list[Key]:
    """Return every network's first seed, then the other seeds."""
    return [(name, 0) for name in networks] + [(name, seed) for seed in range(1, SEEDS) for name in networks]


def unit_process(
    key: Key, network: Network, setting: Setting, device: str, folder: Path, deadline: float, jobs: Any, results: Any
) -> None:
    """Run a unit in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)

    def hand_on(row: Row) -> None:
        results.put(("handed on", *key, row["method"]))
        jobs.put(row)

    def fail(method: str, reason: str) -> None:
        results.put(("failed", *key, method, reason))

    run_unit(key, network, setting, device=device, folder=folder, deadline=deadline, hand_on=hand_on, fail=fail)


def run(study: Study, units: deque[Key], setting: Setting, arguments: argparse.Namespace, end: float) -> None:
    """Run units side by side until all are done or the time has run out."""
    context = get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    folder = Path(tempfile.mkdtemp(prefix="shapes_accuracy"))
    devices = devices_of(arguments.device)
    finishers = [
        context.Process(
            target=finish_all,
            args=(jobs, results, setting, devices[i % len(devices)], folder, arguments.threads),
            daemon=True,
        )
        for i in range(arguments.finishers)
    ]
    running: dict[Key, Any] = {}
    placed: dict[Key, str] = {}
    handed_on: set[str] = set()
    for process in finishers:
        process.start()
    try:
        while time.time() < end and (units or running or handed_on) and any(p.is_alive() for p in finishers):
            if study.hopeless(arguments.least_top1):
                units.clear()
                break
            while len(running) < arguments.workers and (key := fitting(study, units, end)):
                units.remove(key)
                study.forget(key)
                network, deadline = study.networks[key[0]], end - DRAIN_S
                taken = [placed[other] for other in running]
                placed[key] = min(devices, key=taken.count)
                args = (key, network, setting, placed[key], folder, deadline, jobs, results)
                running[key] = context.Process(target=unit_process, args=args, daemon=True)
                running[key].start()
                say(f"{key[0]}/{key[1]} begins")
            listen(study, results, handed_on)
            for key, process in running.items():
                if process.exitcode:
                    say(f"{key[0]}/{key[1]} ended with status {process.exitcode}")
            running = {key: process for key, process in running.items() if process.is_alive()}
            if not running and not handed_on and not fitting(study, units, end):
                break
        while not results.empty():
            listen(study, results, handed_on)
    finally:
        for process in (*running.values(), *finishers):
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    study.missing += [f"{name}: its file was not evaluated in time" for name in sorted(handed_on)]
    study.missing += [f"{name}/{seed}: not begun, the time had run out" for name, seed in units]
    study.missing += [f"{name}/{seed}: stopped, the time had run out" for name, seed in running]


def devices_of(asked: str) -> list[str]:
    """Return all GPUs for `cuda`, else the device that is asked for."""
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if asked == "cuda" else [asked]


def fitting(study: Study, units: deque[Key], end: float) -> Key | None:
    """Return the first unit for which there is time."""
    return next((key for key in units if end - time.time() > study.networks[key[0]].least_s), None)


def listen(study: Study, results: Any, handed_on: set[str]) -> None:
    """Process one message; wait up to half a second for it."""
    try:
        kind, *rest = results.get(timeout=0.5)
    except Empty:
        return
    if kind == "row":
        row = rest[0]
        handed_on.discard(name_of(row))
        study.add(row)
        say(f"{name_of(row)}: {row['top1_torch']:.2f} % torch, {row['top1']:.2f} % file, {row['seconds']:.1f} s")
        return
    name = "{}/{}/{}".format(*rest[:3])
    if kind == "handed on":
        handed_on.add(name)
    else:
        handed_on.discard(name)
        study.missing.append(f"{name}: {rest[3]}")
        say(f"{name}: {rest[3]}")


BEGAN = time.time()


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"{time.time() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure the remaining units, then write the table and the figure."""
    gpu = torch.cuda.is_available()
    parser = study_parser(__doc__, out=str(RESULTS))
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds for all units")
    parser.add_argument("--units", nargs="+", default=[], metavar="NETWORK/SEED", help="these units, from the start")
    parser.add_argument("--clutter", type=float, help="opacity of the clutter, 0 to 1; see DataSpec.clutter")
    parser.add_argument("--workers", type=int, default=2, help="units side by side")
    parser.add_argument("--finishers", type=int, default=5, help="processes that export and evaluate files")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each of them")
    parser.add_argument("--least-top1", type=float, default=30.0, help="stop below it, percent")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--quick", action="store_true", help="narrow networks, few small images, one seed")
    parser.add_argument("--before", type=Path, default=RESULTS / "shapes_accuracy.json", help="earlier rows")
    arguments = parser.parse_args()
    end = BEGAN + arguments.budget_s
    setting, networks = (QUICK, QUICK_NETWORKS) if arguments.quick else (FULL, NETWORKS)
    if arguments.clutter is not None:
        setting = replace(setting, data=replace(setting.data, clutter=arguments.clutter))
    before = Path(os.devnull) if arguments.quick else arguments.before
    study = Study(arguments.out, before, setting, networks)
    units = study.left(arguments.units)
    if arguments.quick:
        arguments.least_top1 = 0.0
        units = deque(key for key in units if key[1] == 0)
    run(study, units, setting, arguments, end)
    study.call["seconds"] = time.time() - BEGAN
    study.write()
    report.write(study.path)
    print(report.table(json.loads(study.path.read_text())))


if __name__ == "__main__":
    main()
