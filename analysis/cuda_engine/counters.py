"""Hardware counters of the longest layers on a GPU: which unit of it is the busiest while a layer is computed.

    python -m analysis.cuda_engine.counters --networks resnet50:128 mobilenet_v2:128

Needs a GPU and Nsight Compute (`ncu`). Each network is built first, unless `--plan` is there. Then a second
process runs its steps under ncu, and one of each kind that takes long is profiled. Writes engine_counters.json and its
page, and prints it: microseconds of each layer, and the shares of the peaks of memory, of the second cache, of the
first cache with shared memory, of the tensor cores and of the slots in which schedulers issue an instruction.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from analysis.common.study import command_line, gpu_software, listed, study_parser
from analysis.cuda_engine.networks import image_size, images, qdq_file
from compress.engines import build_engine
from compress.engines.cuda.costs import cost_of
from compress.engines.cuda.engine import CudaEngine
from compress.files import write_json, write_text

_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy")
_LEAST_SHARE = 0.02  # of a network's time; shorter layers are left out
_SHOWN = {
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "second cache": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "its busiest part": "lts__throughput.max.pct_of_peak_sustained_elapsed",
    "first cache": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Units, and the counters that give the shares of their peaks, in percent."""
_TIME = "gpu__time_duration.sum"
_STALLS = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active.ratio")
"""For each instruction that is issued: cycles that warps wait, by the reason."""
_NO_STALLS = frozenset({"selected", "not_selected"})

Row = dict[str, Any]


def main() -> None:
    """Build and profile one network after another."""
    parser = study_parser(__doc__, out="results/cuda_engine")
    parser.add_argument("--networks", nargs="+", default=["resnet50:128"], metavar="NAME:BATCH")
    parser.add_argument("--plan", type=Path, help="plan file; it is made where it is not there")
    parser.add_argument("--files", type=Path, default=Path("/tmp/cuda_engine_files"))
    parser.add_argument("--steps", type=Path, help=argparse.SUPPRESS)  # where the process that ncu watches writes
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.plan = arguments.plan or arguments.out / "plan.json"
    if arguments.steps:
        _run_steps(arguments)
        return
    report: Row = {"command": command_line(), "machine": gpu_software("triton"), "networks": []}
    for text in arguments.networks:
        name, batch = text.split(":")
        path = qdq_file(name, arguments.files)
        if not arguments.plan.is_file():
            build_engine(path, "cuda", batch_size=int(batch), plan=str(arguments.plan), floats="layers").close()
        layers = _profiled(text, arguments)
        report["networks"].append({"network": name, "batch": int(batch), "layers": layers})
        write_json(arguments.out / "engine_counters.json", report)
        write_text(arguments.out / "engine_counters.md", "\n".join(page(report)) + "\n")
    print("\n".join(page(report)), flush=True)


def _profiled(text: str, arguments: argparse.Namespace) -> list[Row]:
    """Run the steps of a network in a process that ncu watches; the steps with their counters."""
    steps, log = arguments.out / "steps.json", arguments.out / "ncu.csv"
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    own = ["--networks", text, "--plan", str(arguments.plan), "--files", str(arguments.files)]
    command = [
        "ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", *sections,
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        sys.executable, "-m", "analysis.cuda_engine.counters", *own, "--steps", str(steps), "--out", str(arguments.out),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = joined(
        json.loads(steps.read_text(encoding="utf-8")), counters(log.read_text(encoding="utf-8").splitlines())
    )
    for file in (steps, log):
        file.unlink()
    return found


def _run_steps(arguments: argparse.Namespace) -> None:
    """Run a network step by step, the longest of each kind within the range that is profiled."""
    name, batch = arguments.networks[0].split(":")
    path, plan = qdq_file(name, arguments.files), str(arguments.plan)
    engine = cast(CudaEngine, build_engine(path, "cuda", batch_size=int(batch), plan=plan, floats="layers"))
    program = engine.program({tensor.name: tensor.shape for tensor in engine.inputs})
    executor, layout = program.executor, program.layout
    x = {engine.inputs[0].name: images(int(batch), image_size(name)).to(executor.device)}
    times = program.step_ms(x)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, step in enumerate(layout.steps):
        shape = layout.plan.tensors[step.writes[0]].shape if step.writes[0] in layout.plan.tensors else ()
        key = (type(step).__name__, program.kernels[index], str(list(shape)), str(cost_of(step, layout).moved_bytes))
        kinds.setdefault(key, []).append(index)
    wanted = {
        indices[0]: {"kind": key[0], "kernel": key[1], "shape": key[2], "count": len(indices)}
        for key, indices in kinds.items()
        if sum(times[i] for i in indices) >= _LEAST_SHARE * sum(times) and key[1].startswith("triton")
    }
    tensors, runtime = executor.start(x), torch.cuda.cudart()
    for index in range(len(layout.steps)):
        if index in wanted:
            executor.runners[index](tensors)
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            executor.runners[index](tensors)
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
        executor.step(index, tensors)
    write_json(arguments.steps, [wanted[index] for index in sorted(wanted)])


def counters(lines: Iterable[str]) -> list[dict[str, str]]:
    """The rows of ncu's raw page as CSV, of our own kernels; its other messages and the row of units are left out."""
    table = [line for line in lines if line.startswith('"')]
    return [row for row in csv.DictReader(table) if re.fullmatch(r"_\w+_kernel", row.get("Kernel Name") or "")]


def joined(steps: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, str]]) -> list[Row]:
    """Each step with the counters of its kernel.

    Raises:
        ValueError: there are not as many kernels as steps.
    """
    if len(steps) != len(rows):
        raise ValueError(f"{len(rows)} kernels of {len(steps)} steps were profiled: {[r['Kernel Name'] for r in rows]}")
    return [{**step, **_read(row)} for step, row in zip(steps, rows, strict=True)]


def _read(row: Mapping[str, str]) -> Row:
    """Microseconds, shares of the peaks from 0 to 1, and the reasons of which warps wait the longest."""
    stalls = {match[1]: _number(row[key]) for key in row if (match := _STALLS.fullmatch(key))}
    longest = sorted(stalls.keys() - _NO_STALLS, key=lambda reason: -stalls[reason])[:2]
    shares = {unit: _number(row[name]) / 100 for unit, name in _SHOWN.items() if name in row}
    return {"us": _number(row[_TIME]) / 1e3, "shares": shares, "waits": {name: stalls[name] for name in longest}}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def page(report: Row) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"# Hardware counters of the engine's layers, {report['machine']['gpu']}"
    yield ""
    yield (
        "Shares of each unit's peak while one layer is computed, by Nsight Compute; of warps, the share of the most "
        "that a multiprocessor takes. Then why warps wait the longest, in cycles for each instruction."
    )
    yield ""
    yield f"`{report['command']}`, {listed(report['machine'])}"
    for network in report["networks"]:
        yield ""
        yield f"## {network['network']}, batch {network['batch']}"
        yield ""
        yield f"| layer, result | count | us | {' | '.join(_SHOWN)} | warps wait | kernel |"
        yield f"|{'---|' * (len(_SHOWN) + 5)}"
        yield from map(_line, network["layers"])


def _line(layer: Row) -> str:
    shape = "x".join(str(n) for n in json.loads(layer["shape"]))
    shares = [f"{layer['shares'][unit]:.2f}" if unit in layer["shares"] else "" for unit in _SHOWN]
    waits = ", ".join(f"{name.replace('_', ' ')} {cycles:.1f}" for name, cycles in layer["waits"].items())
    kernel = layer["kernel"].removeprefix("triton ")
    cells = [f"{layer['kind']} {shape}", str(layer["count"]), f"{layer['us']:.1f}", *shares, waits, kernel]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
