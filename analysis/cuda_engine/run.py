"""INT8 networks on the cuda engine: exactness, the fastest kernel of each layer, images/s beside fp16.

    python -m analysis.cuda_engine.run --networks resnet50:1 resnet50:128 --baseline

Needs a GPU; `--tiny` runs a small network in exact arithmetic on the CPU. Writes cuda_engine.json (every candidate of
every layer) after each network, the plan file and the page, prints each network's layers when they are measured, and a
line for each network, last.
"""

import argparse
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from analysis.common.study import BudgetSpentError, command_line, gpu_software, option, study_options, time_limit
from analysis.cuda_engine.baseline import SETTINGS, Baseline, call_ms
from analysis.cuda_engine.networks import image_size, images, qdq_file
from analysis.cuda_engine.report import write
from compress.engines import build_engine
from compress.engines.cuda.engine import CudaEngine
from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.steps import Attention, Convolution, Linear, Step
from compress.engines.cuda.program import Program, bare_ms, differences
from compress.files import write_json

Report = dict[str, Any]
# Seconds of one network's part at most, and seconds that are left for each network that follows.
_MOST_S, _LEAST_S = 75.0, 8.0


def main() -> None:
    arguments = _arguments()
    words = [[*word.split(":"), "128"] for word in arguments.networks]
    asked = [(word[0], int(word[1])) for word in words]
    options = [dict(text.partition("=")[::2] for text in word[2:-1]) for word in words]
    report: Report = {"command": command_line(), "baseline": SETTINGS, "networks": [], "failed": []}
    file, plan = arguments.out / "cuda_engine.json", arguments.out / "plan.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.plan is not None and arguments.plan.is_file():
        plan.write_bytes(arguments.plan.read_bytes())
    end = time.monotonic() + arguments.budget_s
    report["machine"] = gpu_software("triton")
    if arguments.cold_build:
        with _part(report, "cold build", end, 2 * _MOST_S):
            report["cold_build"] = _cold_build(*asked[0], options[0], arguments)
            print(report["cold_build"], flush=True)
    fp16: dict[tuple[str, int], Report] = {}
    baselines = {pair: Baseline(*pair) for pair in dict.fromkeys(asked)} if arguments.baseline else {}
    prepared_end = time.monotonic() + arguments.prepare_s
    if not arguments.tiny:
        report["prepared"] = _prepared(list(dict.fromkeys(asked)), arguments)
        print(report["prepared"], flush=True)
    for baseline in baselines.values():  # nothing compiles while something is timed
        baseline.compiled(max(0.0, prepared_end - time.monotonic()))
    if arguments.prepare_only:
        os._exit(0)
    for index, ((name, batch), further) in enumerate(zip(asked, options, strict=True)):
        row: Report = {"network": name, "batch": batch, "options": further}
        report["networks"].append(row)
        last = end - _LEAST_S * (len(asked) - 1 - index)
        jobs = 0 if "kernels in" in report.get("prepared", {}).get(f"{name}:{batch}", "") else arguments.jobs
        made: tuple[Program, dict[str, Tensor]] | None = None
        with _part(report, f"{name} b{batch}", last):
            made = _network(plan, arguments, row, jobs)
        if (name, batch) in baselines:
            seconds = max(0.0, min(_MOST_S, last - time.monotonic()))
            fp16[name, batch] = baselines.pop((name, batch)).measured(seconds)
        row |= fp16.get((name, batch), {})
        for what in (_layers, _check) if made else ():
            with _part(report, f"{name} b{batch} {what.__name__}", last):
                what(*made, row)
        write_json(file, report)
        print({key: value for key, value in row.items() if key != "layers"}, flush=True)
    write_json(file, report)
    if not arguments.tiny:
        write(file)
    print(*(f"FAILED {text}" for text in report["failed"]), sep="\n", flush=True)
    os._exit(0)  # a process that still compiles would keep the terminal's pipe open


def _arguments() -> argparse.Namespace:
    return study_options(
        __doc__,
        option("--networks", nargs="+", default=["resnet50:128"], metavar="NAME:BATCH[:KEY=VALUE]"),
        option("--baseline", action="store_true", help="torch.compile in fp16 too, with CUDA graphs"),
        option("--budget-s", type=float, default=480.0, help="of the whole; default: 480"),
        option("--prepare-s", type=float, default=180.0, help="of compiling before anything is timed"),
        option("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile"),
        option("--plan", type=Path, help="plan file to begin with; default: an empty one"),
        option("--files", type=Path, default=Path("/tmp/cuda_engine_files")),
        option("--tiny", action="store_true", help="on the CPU, in exact arithmetic"),
        option("--prepare-only", action="store_true", help="export and compile, and measure nothing"),
        option(
            "--cold-build",
            action="store_true",
            help="first build the first network with an empty plan and an empty cache of kernels, beside nothing else",
        ),
        out="results/cuda_engine",
    )


def _cold_build(name: str, batch: int, further: dict[str, str], arguments: argparse.Namespace) -> Report:
    path = qdq_file(name, arguments.files)
    with TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/kernels"
        try:
            start = time.monotonic()
            build_engine(path, "cuda", batch_size=batch, **_engine_options(plan, arguments, further)).close()
            seconds = _since(start)
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            os.environ |= {} if before is None else {"TRITON_CACHE_DIR": before}
    return {"network": name, "batch": batch, "build_s": seconds, "jobs": arguments.jobs}


def _engine_options(plan: Path, arguments: argparse.Namespace, further: dict[str, str]) -> dict[str, Any]:
    options = {"device": "cpu"} if arguments.tiny else {"plan": str(plan), "jobs": str(arguments.jobs)}
    return options | further


def _prepared(asked: Sequence[tuple[str, int]], arguments: argparse.Namespace) -> Report:
    from analysis.cuda_engine.ahead import prepared  # lazy: --tiny runs where Triton is not installed

    jobs, device = max(1, arguments.jobs - 4), torch.device("cuda")
    return dict(prepared(asked, arguments.files, seconds=arguments.prepare_s, jobs=jobs, device=device))


@contextmanager
def _part(report: Report, what: str, end: float, most: float = _MOST_S) -> Iterator[None]:
    try:
        with time_limit(min(most, end - time.monotonic())):
            yield
    except BudgetSpentError:
        report["failed"].append(f"{what}: no time left")
    except Exception as error:
        trace = traceback.format_exc()[-1500:]
        report["failed"].append(f"{what}: {type(error).__name__}: {str(error)[:300]} | {trace}")


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)


def _network(plan: Path, arguments: argparse.Namespace, row: Report, jobs: int) -> tuple[Program, dict[str, Tensor]]:
    path = qdq_file(row["network"], arguments.files)
    options = _engine_options(plan, arguments, {} if arguments.tiny else {"jobs": str(jobs)} | row["options"])
    row["compiled_ahead"] = not jobs
    start = time.monotonic()
    engine = cast(CudaEngine, build_engine(path, "cuda", batch_size=row["batch"], **options))
    row["build_s"] = _since(start)
    program = engine.program({tensor.name: tensor.shape for tensor in engine.inputs})
    parts = len(program.executors)
    row |= {"steps": len(program.kernels), "parts": parts, "arena_mb": parts * program.layout.arena_bytes / 1e6}
    row |= {"floats": program.floats, "graphs_ms": program.graphs_ms}
    if plan.is_file():
        start = time.monotonic()
        build_engine(path, "cuda", batch_size=row["batch"], **options).close()
        row["build_with_plan_s"] = _since(start)
    x = images(row["batch"], image_size(row["network"]))
    given = {engine.inputs[0].name: x.to(program.executor.device)}
    if not arguments.tiny:
        row["ms"], row["waiting_ms"] = call_ms(partial(engine.run_tensors, given))
        row["images_per_s"] = row["batch"] / row["ms"] * 1e3
        times = engine.gpu_times({engine.inputs[0].name: x.numpy()}, warmup=5, runs=20)
        assert times is not None
        row["with_copies_ms"] = float(np.median(times.total_ms))
    return program, given


def _check(program: Program, x: dict[str, Tensor], row: Report) -> None:
    found = differences(program.executor, program.split(x)[0])
    row["check"] = {
        "graph_equal": all(map(torch.equal, program.run(x).values(), program.run_eagerly(x).values())),
        "compared": len(found),
        "codes": sum(d.codes for d in found),
        "differing": sum(d.differing for d in found),
        "largest": max((d.largest for d in found), default=0),
        "relative": max((d.relative for d in found), default=0.0),
        "wrong": [vars(d) for d in found if d.wrong][:10],
    }


def _layers(program: Program, x: dict[str, Tensor], row: Report) -> None:
    layout = program.layout
    row["layers"] = []
    for index, (step, ms) in enumerate(zip(layout.steps, program.step_ms(x), strict=True)):
        cost = cost_of(step, layout)
        shape = [list(layout.plan.tensors[n].shape) for n in step.writes[:1] if n in layout.plan.tensors]
        layer = {
            "step": step.name,
            "kind": type(step).__name__,
            "kernel": program.kernels[index],
            "ms": ms,
            "bytes": cost.moved_bytes,
            "macs": cost.int8_macs,
            "shape": shape,
        }
        if next(iter(x.values())).is_cuda:
            layer["fp16_ms"] = bare_ms(step, layout)
        if program.measured:
            found = program.measured[index]
            layer |= {"times_ms": dict(found.times_ms), "refused": dict(found.refused)}
        row["layers"].append(layer)
    row["layers_ms"] = sum(layer["ms"] for layer in row["layers"])


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Work of a step.

    Attributes:
        read_bytes, written_bytes: activations; each tensor once.
        weight_bytes: of constants.
        int8_macs: products of codes, multiplied and added.
    """

    read_bytes: int
    written_bytes: int
    weight_bytes: int
    int8_macs: int

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes + self.weight_bytes


def cost_of(step: Step, layout: Layout) -> Cost:
    weight = step.weight.numel() if isinstance(step, (Convolution, Linear)) else 0
    packs = type(step).__name__ == "PackImage"
    written = (step.target,) if isinstance(step, Copy) else step.writes[:1] if packs else step.writes
    return Cost(
        read_bytes=sum(_bytes(name, layout) for name in step.reads),
        written_bytes=sum(_bytes(name, layout) for name in written),
        weight_bytes=weight,
        int8_macs=_macs(step, layout),
    )


def _bytes(name: str, layout: Layout) -> int:
    place, tensor = layout.places.get(name), layout.plan.tensors.get(name)
    shape, dtype = (
        (place.shape, place.dtype) if place is not None else (tensor.shape, tensor.dtype) if tensor else ((), None)
    )
    if dtype is None:
        return 0
    size = dtype.itemsize
    for n in shape:
        size *= n
    whole = layout.buffer_bytes.get(place.buffer, size) if place is not None else size
    return min(size, whole)


def _macs(step: Step, layout: Layout) -> int:
    if isinstance(step, (Convolution, Linear)):
        out = layout.plan.tensors[step.epilogue.out.names[0]].shape
        return torch.Size(out).numel() // step.weight.shape[0] * step.weight.numel()
    if isinstance(step, Attention):
        *heads, length, depth = layout.plan.tensors[step.x.name].shape
        size, width = layout.plan.tensors[step.v.name].shape[-2:]
        each = length * size * (depth + width)
        for n in heads:
            each *= n
        return each
    return 0


if __name__ == "__main__":
    main()
