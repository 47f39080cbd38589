"""Accuracy of four networks, float and compressed in every way that the library has, on one GPU.

    python analysis/study_h200.py --budget-s 330                      what results/h200/study.json lacks, in order
    python analysis/study_h200.py --units resnet18/0 vgg16_bn/0       only these networks and seeds
    python analysis/study_h200.py --quick --out /tmp/quick            narrow networks, few small pictures, on a CPU
    python analysis/study_h200.py --draw results/h200/study.json      table and figure from a file

The data are `shapes` at 224 px with 100 classes. A unit is a
network and a seed: the float network is trained (bf16 autocast, AdamW, first at 128 px), then quantized by every
calibrator (W8A8 and W4A8, target TensorRT), trained with quantizers (QAT), made 2:4 sparse, fine-tuned, and both.
Everything that trains on does so for one epoch of 19,200 images, taught by the float network; "float, trained on" is
what that alone brings. QAT's rate (AdamW) is 3e-5 at W8A8 and 5e-5 at W4A8; "higher rate" is a fifth of the float
training's, 1e-4 to 6e-4. These rows came after the first call, so that some seeds lack them. Two top-1 stand in each
row, both on the whole evaluation split (4,000 images): `torch` is the network in torch (fake quantization, float32 with
TF32), `file` is the exported ONNX file, run node by node on the GPU in integer arithmetic (analysis/onnx_on_torch.py).
`ORT` is the share of some images on which ONNX Runtime's CPU kernels name the same class.

Units run side by side, each in a process of its own; other processes export and evaluate what they hand on. Rows are
written as they come. When the time of --budget-s is over, the script says what is missing; the next call goes on with
units of which the file holds no row. A unit that is there in part is made anew where --units names it.
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
from study_file import finish_all
from study_report import draw, table
from study_unit import FULL, NETWORKS, QUICK, QUICK_NETWORKS, Network, Row, Setting, methods_of, run_unit

from compress.files import write_json
from compress.measure import describe_machine

Key = tuple[str, int]
DRAIN_S = 25.0  # before the end no method is begun, so that the files that were handed on can be finished
SEEDS = 3


class Study:
    """The rows of a file, and what this call adds to them."""

    def __init__(self, out: Path, before: Path, setting: Setting, networks: dict[str, Network]) -> None:
        self.path, self.networks = out / "study.json", networks
        source = self.path if self.path.is_file() else before
        known: Row = json.loads(source.read_text()) if source.is_file() else {}
        described = json.loads(json.dumps(asdict(setting)))
        if known and known["setting"] != described:
            raise SystemExit(f"{source} was measured with another setting; use another --out, or move it away")
        self.rows: dict[str, Row] = {name_of(row): row for row in known.get("rows", [])}
        self.calls: list[Row] = known.get("calls", [])
        self.setting = described
        self.missing: list[str] = []
        self.call: Row = {"command": " ".join(["python", *sys.argv]), "machine": describe_machine().to_dict()}

    def left(self, wanted: list[str]) -> deque[Key]:
        """Units to run, in order: those without a row, or, of the wanted ones, those without all."""
        every = {f"{name}/{seed}": (name, seed) for name, seed in order(self.networks)}
        if unknown := [name for name in wanted if name not in every]:
            raise SystemExit(f"no unit {', '.join(unknown)}; there are {', '.join(every)}")
        if wanted:
            return deque(every[name] for name in wanted if self.lacks(every[name]))
        return deque(key for key in every.values() if len(self.lacks(key)) == len(methods_of(self.networks[key[0]])))

    def lacks(self, key: Key) -> list[str]:
        """Methods of a unit without a row."""
        return [m for m in methods_of(self.networks[key[0]]) if f"{key[0]}/{key[1]}/{m}" not in self.rows]

    def forget(self, key: Key) -> None:
        """Drop a unit's rows: they were of another training."""
        self.rows = {name: row for name, row in self.rows.items() if (row["network"], row["seed"]) != key}

    def add(self, row: Row) -> None:
        """Keep a row, and write."""
        self.rows[name_of(row)] = row | {"call": len(self.calls)}
        self.write()

    def hopeless(self, least: float) -> bool:
        """Whether a float network of this call has learned so little that the study says nothing."""
        rows = [row for row in self.rows.values() if row["call"] == len(self.calls) and row["method"] == "float"]
        poor = [row for row in rows if row["top1_torch"] < least]
        for row in poor:
            self.missing.append(
                f"{name_of(row)} got to {row['top1_torch']:.1f} % only: stopped; try a smaller --clutter"
            )
        return bool(poor)

    def write(self) -> None:
        """The file as it stands."""
        lacking = [f"{n}/{s}/{m}" for n, s in order(self.networks) for m in self.lacks((n, s))]
        document = {"setting": self.setting, "calls": [*self.calls, self.call], "rows": list(self.rows.values())}
        write_json(self.path, document | {"missing": self.missing, "not_measured": lacking})


def name_of(row: Row) -> str:
    """Such as resnet18/0/QAT W8A8."""
    return f"{row['network']}/{row['seed']}/{row['method']}"


def order(networks: dict[str, Network]) -> list[Key]:
    """Every network's first seed, then the other seeds."""
    return [(name, 0) for name in networks] + [(name, seed) for seed in range(1, SEEDS) for name in networks]


def unit_process(
    key: Key, network: Network, setting: Setting, device: str, folder: Path, deadline: float, jobs: Any, results: Any
) -> None:
    """A unit in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)

    def hand_on(row: Row) -> None:
        results.put(("handed on", *key, row["method"]))
        jobs.put(row)

    def fail(method: str, reason: str) -> None:
        results.put(("failed", *key, method, reason))

    run_unit(key, network, setting, device=device, folder=folder, deadline=deadline, hand_on=hand_on, fail=fail)


def run(study: Study, units: deque[Key], setting: Setting, arguments: argparse.Namespace, end: float) -> None:
    """Run units side by side until all are done or the time is over."""
    context = get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    folder = Path(tempfile.mkdtemp(prefix="study"))
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
    study.missing += [f"{name}/{seed}: not begun, the time was over" for name, seed in units]
    study.missing += [f"{name}/{seed}: stopped, the time was over" for name, seed in running]


def devices_of(asked: str) -> list[str]:
    """All GPUs for `cuda`, else the one that is asked for."""
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if asked == "cuda" else [asked]


def fitting(study: Study, units: deque[Key], end: float) -> Key | None:
    """The first unit that there is time for."""
    return next((key for key in units if end - time.time() > study.networks[key[0]].least_s), None)


def listen(study: Study, results: Any, handed_on: set[str]) -> None:
    """Take one message, or wait a little."""
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
    """A line with the seconds since the start."""
    print(f"{time.time() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is left, then write table and figure."""
    gpu = torch.cuda.is_available()
    here = Path("results/h200")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds, of all")
    parser.add_argument("--units", nargs="+", default=[], metavar="NETWORK/SEED", help="only these")
    parser.add_argument("--clutter", type=float, help="how opaque the clutter is, 0 to 1; see DataSpec.clutter")
    parser.add_argument("--workers", type=int, default=2, help="units side by side")
    parser.add_argument("--finishers", type=int, default=5, help="processes that export and evaluate files")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each of them")
    parser.add_argument("--least-top1", type=float, default=30.0, help="stop where a float network stays below")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--quick", action="store_true", help="narrow networks on few small pictures, one seed")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", here)))
    parser.add_argument("--before", type=Path, default=here / "study.json", help="rows of earlier calls")
    parser.add_argument("--draw", type=Path, help="measure nothing: table and figure from this JSON file, beside it")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw, __doc__ or "")
        return
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
    draw(study.path, __doc__ or "")
    print(table(json.loads(study.path.read_text())))


if __name__ == "__main__":
    main()
