"""INT8 networks on the cuda engine: exactness, the fastest kernel of each layer, images/s beside fp16.

    python -m analysis.cuda_engine.run --networks resnet50:1 resnet50:128 --baseline

Needs a GPU; `--tiny` runs a small network in exact arithmetic on the CPU. Writes cuda_engine.json (every candidate of
every layer), the plan file, and prints one table, last.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from analysis.common.study import command_line, gpu_software, study_parser
from analysis.cuda_engine.networks import image_size, images, network, prepare
from analysis.cuda_engine.table import table
from compress.engines import build_engine
from compress.engines.cuda.costs import cost_of
from compress.engines.cuda.engine import CudaEngine
from compress.engines.cuda.exactness import differences
from compress.engines.cuda.program import Program
from compress.files import write_json

Report = dict[str, Any]


class BudgetSpentError(BaseException):
    """The time has run out. Not an Exception, so that nothing takes it for a failure of its own."""


def main() -> None:
    """Networks one after another, until all are done or the time has run out."""
    parser = study_parser(__doc__, out="results/cuda_engine")
    parser.add_argument("--networks", nargs="+", default=["resnet50:128"], metavar="NAME:BATCH")
    parser.add_argument("--baseline", action="store_true", help="torch.compile(mode='max-autotune') in fp16 too")
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--plan", type=Path, help="plan file to begin with; default: an empty one")
    parser.add_argument("--files", type=Path, default=Path("/tmp/cuda_engine_files"))
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in exact arithmetic")
    arguments = parser.parse_args()
    report: Report = {"command": command_line(), "networks": [], "failed": []}

    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, arguments.budget_s)
    asked = [(name, int(batch)) for name, _, batch in (word.partition(":") for word in arguments.networks)]
    plan = arguments.out / "plan.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.plan is not None and arguments.plan.is_file():
        plan.write_bytes(arguments.plan.read_bytes())
    pool = ProcessPoolExecutor(min(4, len(asked)), mp_context=multiprocessing.get_context("spawn"))
    files = {name: pool.submit(prepare, name, str(arguments.files)) for name in dict.fromkeys(n for n, _ in asked)}
    try:
        report["machine"] = gpu_software("triton")
        for name, batch in asked:
            row: Report = {"network": name, "batch": batch}
            report["networks"].append(row)
            ours = (f"{name} b{batch}", partial(_network, files[name], plan, arguments, row))
            fp16 = (f"{name} b{batch} fp16", partial(_baseline, name, batch, row))
            for what, run in ((ours, fp16) if batch == 1 else (fp16, ours)) if arguments.baseline else (ours,):
                _guarded(report, what, run)
                write_json(arguments.out / "cuda_engine.json", report)
    except BudgetSpentError:
        report["failed"].append("no time left")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    write_json(arguments.out / "cuda_engine.json", report)
    print(table(report), flush=True)
    for process in multiprocessing.active_children():
        process.kill()  # one that still exports would keep the terminal's pipe open
    os._exit(0)


def _guarded(report: Report, what: str, run: Any) -> None:
    """Run; a failure is noted, and the next network is measured."""
    try:
        run()
    except Exception as error:
        trace = traceback.format_exc()[-1500:]
        report["failed"].append(f"{what}: {type(error).__name__}: {str(error)[:300]} | {trace}")


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)


def _network(file: Future[str], plan: Path, arguments: Any, row: Report) -> None:
    """Build, check and time one network at one batch size."""
    problem = file.result()
    if problem:
        raise RuntimeError(problem)
    path = arguments.files / f"{row['network']}.onnx"
    options: dict[str, Any] = {"device": "cpu"} if arguments.tiny else {"plan": str(plan), "jobs": str(arguments.jobs)}
    start = time.monotonic()
    engine = cast(CudaEngine, build_engine(path, "cuda", batch_size=row["batch"], **options))
    row["build_s"] = _since(start)
    shapes = {tensor.name: tensor.shape for tensor in engine.inputs}
    program = engine.program(shapes)
    row |= {"steps": len(program.kernels), "arena_mb": program.layout.arena_bytes / 1e6}
    if plan.is_file():
        start = time.monotonic()
        build_engine(path, "cuda", batch_size=row["batch"], **options).close()
        row["build_with_plan_s"] = _since(start)
    x = images(row["batch"], image_size(row["network"]))
    given = {engine.inputs[0].name: x.to(program.executor.device)}
    if not arguments.tiny:
        times = engine.gpu_times({engine.inputs[0].name: x.numpy()}, warmup=20, runs=50)
        assert times is not None
        row["with_copies_ms"] = float(np.median(times.total_ms))
        row["ms"], row["waiting_ms"] = _call_ms(lambda: engine.run_tensors(given))
        row["images_per_s"] = row["batch"] / row["ms"] * 1e3
    row["check"] = _checked(program, given)
    _layers(row, program, given)
    engine.close()


def _checked(program: Program, x: dict[str, Tensor]) -> Report:
    """Every step against exact arithmetic."""
    found = differences(program.executor, x)
    return {
        "compared": len(found),
        "codes": sum(d.codes for d in found),
        "differing": sum(d.differing for d in found),
        "largest": max((d.largest for d in found), default=0),
        "relative": max((d.relative for d in found), default=0.0),
        "wrong": [vars(d) for d in found if d.wrong][:10],
    }


def _layers(row: Report, program: Program, x: dict[str, Tensor]) -> None:
    """Time and work of each step, and the times of all candidates where they were measured now."""
    layout = program.layout
    row["layers"] = []
    for index, (step, ms) in enumerate(zip(layout.steps, program.step_ms(x), strict=True)):
        cost = cost_of(step, layout)
        shape = [list(layout.plan.tensors[n].shape) for n in step.writes[:1] if n in layout.plan.tensors]
        layer = {
            "step": step.name, "kind": type(step).__name__, "kernel": program.kernels[index], "ms": ms,
            "bytes": cost.moved_bytes, "macs": cost.int8_macs, "shape": shape,
        }  # fmt: skip
        if program.measured:
            found = program.measured[index]
            layer |= {"times_ms": dict(found.times_ms), "refused": dict(found.refused)}
        row["layers"].append(layer)
    row["layers_ms"] = sum(layer["ms"] for layer in row["layers"])


def _call_ms(run: Callable[[], object], *, calls: int = 50, warmup: int = 20) -> tuple[float, float]:
    """Milliseconds of a call: (of many that are queued one after another, median of one that is waited for).

    The first is the GPU's time where the host keeps up; the second also holds the host's time before the GPU starts.
    """

    def between(action: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def queued() -> None:
        for _ in range(calls):
            run()

    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    return between(queued) / calls, float(np.median([between(run) for _ in range(calls)]))


def _baseline(name: str, batch: int, row: Report) -> None:
    """torch.compile(mode="max-autotune"), fp16, channels_last; its own CUDA graphs."""
    import torch._inductor.config as inductor_config  # lazy: processes that compile kernels import this file too

    inductor: Any = inductor_config
    inductor.autotune_num_choices_displayed = 0
    start = time.monotonic()
    model = network(name).cuda().half().to(memory_format=torch.channels_last)
    x = images(batch, image_size(name)).cuda().half().contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        fast = torch.compile(model, mode="max-autotune")
        fast(x)
        row["fp16_compile_s"] = _since(start)
        row["fp16_ms"], row["fp16_waiting_ms"] = _call_ms(lambda: fast(x))
    row["fp16_images_per_s"] = batch / row["fp16_ms"] * 1e3
    torch.compiler.reset()


if __name__ == "__main__":
    main()
