"""INT8 networks on the cuda engine: exactness, the fastest kernel of each layer, images/s beside fp16.

    python -m analysis.cuda_engine.run --networks resnet50 mobilenet_v2 --batches 128 1 --baseline

Needs a GPU; `--tiny` runs a small network in Triton's interpreter (with TRITON_INTERPRET=1). Writes cuda_engine.json
(every candidate of every layer) and prints one table, last.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.common.study import command_line, gpu_software, study_parser
from analysis.cuda_engine.networks import image_size, images, network, prepare
from compress.engines.cuda.bind import Bindings, candidates
from compress.engines.cuda.costs import cost_of
from compress.engines.cuda.exactness import differences
from compress.engines.cuda.executor import Candidate, Executor
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.timing import captured, launch_ms
from compress.engines.cuda.tuning import Measured, kernel_requests, measure
from compress.files import write_json
from compress.kernels.triton.ahead import compile_requests

Report = dict[str, Any]


class BudgetSpentError(BaseException):
    """The time has run out. Not an Exception, so that nothing takes it for a failure of its own."""


def main() -> None:
    """Networks one after another, until all are done or the time has run out."""
    parser = study_parser(__doc__, out="results/cuda_engine")
    parser.add_argument("--networks", nargs="+", default=["resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 1])
    parser.add_argument("--candidates", type=int, default=40, help="most ways to compute a step that are tried")
    parser.add_argument("--baseline", action="store_true", help="torch.compile(mode='max-autotune') in fp16 too")
    parser.add_argument("--no-tuning", action="store_true", help="the first guess of each layer")
    parser.add_argument("--budget-s", type=float, default=500.0)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--files", type=Path, default=Path("/tmp/cuda_engine_files"))
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    report: Report = {"command": command_line(), "networks": [], "failed": []}

    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, arguments.budget_s)
    try:
        report["failed"] += _files(arguments.networks, arguments.files)
        report["machine"] = gpu_software("triton")
        for name in arguments.networks:
            for batch in arguments.batches:
                _guarded(report, f"{name} b{batch}", lambda n=name, b=batch: _network(n, b, device, arguments, report))
                _save(report, arguments.out)
            for batch in arguments.batches if arguments.baseline else ():
                _guarded(report, f"{name} b{batch} baseline", lambda n=name, b=batch: _baseline(n, b, report))
                _save(report, arguments.out)
    except BudgetSpentError:
        report["failed"].append("no time left")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    _save(report, arguments.out)
    print(_table(report), flush=True)
    os._exit(0)  # processes of a compiler may still be at work


def _save(report: Report, out: Path) -> None:
    write_json(out / "cuda_engine.json", report)


def _guarded(report: Report, what: str, run: Any) -> None:
    """Run; a failure is noted, and the next network is measured."""
    try:
        run()
    except Exception as error:
        trace = traceback.format_exc()[-1500:]
        report["failed"].append(f"{what}: {type(error).__name__}: {str(error)[:300]} | {trace}")


def _files(names: list[str], folder: Path) -> list[str]:
    """Make all files, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(4, len(names)), mp_context=context) as pool:
        problems = list(pool.map(prepare, names, [str(folder)] * len(names)))
    return [f"{name}: {problem}" for name, problem in zip(names, problems, strict=True) if problem]


def _network(name: str, batch: int, device: torch.device, arguments: Any, report: Report) -> None:
    """Check, tune and time one network at one batch size."""
    row: Report = {"network": name, "batch": batch}
    report["networks"].append(row)
    start = time.monotonic()
    side = image_size(name)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    layout = lay_out(make_plan(arguments.files / f"{name}.onnx", batch_size=batch, dtype=dtype))
    bindings = Bindings(device, {})
    ways = [candidates(step, layout, bindings)[: arguments.candidates] for step in layout.steps]
    executor = Executor(layout, [w[0].run for w in ways], device)
    row |= {"plan_s": _since(start), "steps": len(ways), "arena_mb": layout.arena_bytes / 1e6}
    measured: list[Measured] = []
    if not arguments.no_tuning:
        start = time.monotonic()
        if device.type == "cuda":
            requests = kernel_requests(executor, ways)
            compiled = compile_requests(requests, torch.cuda.get_device_capability(), jobs=arguments.jobs)
            row |= {"kernels": len(requests), "not_compiled": [c.error for c in compiled if c.error][:5]}
            row["compile_s"] = _since(start)
        start = time.monotonic()
        measured = measure(executor, ways)
        row["tune_s"] = _since(start)
    x = {layout.plan.inputs[0]: images(batch, side).to(device)}
    row["check"] = _checked(executor, x)
    _time_layers(row, executor, ways, measured, x)
    if device.type == "cuda":
        _time_network(row, executor, x, batch)


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)


def _checked(executor: Executor, x: dict[str, Tensor]) -> Report:
    """Every step against exact arithmetic."""
    found = differences(executor, x)
    return {
        "compared": len(found),
        "codes": sum(d.codes for d in found),
        "differing": sum(d.differing for d in found),
        "largest": max((d.largest for d in found), default=0),
        "relative": max((d.relative for d in found), default=0.0),
        "wrong": [vars(d) for d in found if d.wrong][:10],
    }


def _time_layers(
    row: Report, executor: Executor, ways: list[list[Candidate]], measured: list[Measured], x: dict[str, Tensor]
) -> None:
    """Time of each step alone, with the candidate that was chosen."""
    tensors = executor.start(x)
    layers = []
    for index, step in enumerate(executor.layout.steps):
        run = executor.runners[index]
        ms = launch_ms(lambda run=run: run(tensors), executor.device, rounds=3)  # type: ignore[misc]
        executor.step(index, tensors)
        cost = cost_of(step, executor.layout)
        name = next((c.name for c in ways[index] if c.run is run), "")
        layer = {
            "step": step.name, "kind": type(step).__name__, "kernel": name, "ms": ms, "bytes": cost.moved_bytes,
            "macs": cost.int8_macs, "shape": [list(executor.layout.plan.tensors[n].shape) for n in step.writes[:1]
                                              if n in executor.layout.plan.tensors],
        }  # fmt: skip
        if measured:
            layer |= {"times_ms": dict(measured[index].times_ms), "refused": dict(measured[index].refused)}
        layers.append(layer)
    row["layers"] = layers
    row["layers_ms"] = sum(layer["ms"] for layer in layers)


def _time_network(row: Report, executor: Executor, x: dict[str, Tensor], batch: int) -> None:
    executor.run(x)
    graph = captured(lambda: executor.run(x))
    for _ in range(5):
        graph.replay()
    row["ms"] = _replay_ms(graph)
    row["images_per_s"] = batch / row["ms"] * 1e3


def _replay_ms(graph: torch.cuda.CUDAGraph, rounds: int = 30) -> float:
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(sorted(times)[rounds // 2])


def _baseline(name: str, batch: int, report: Report) -> None:
    """torch.compile(mode="max-autotune"), fp16, channels_last; its own CUDA graphs."""
    start = time.monotonic()
    model = network(name).cuda().half().to(memory_format=torch.channels_last)
    x = images(batch, image_size(name)).cuda().half().contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        fast = torch.compile(model, mode="max-autotune")
        for _ in range(4):
            fast(x)
        torch.cuda.synchronize()
        compile_s = _since(start)
        times = []
        for _ in range(30):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fast(x)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    ms = sorted(times)[15]
    row = next((r for r in report["networks"] if r["network"] == name and r["batch"] == batch), None)
    if row is None:
        row = {"network": name, "batch": batch}
        report["networks"].append(row)
    row |= {"fp16_ms": ms, "fp16_images_per_s": batch / ms * 1e3, "fp16_compile_s": compile_s}


def _table(report: Report) -> str:
    lines = [f"{report['command']}", f"{report.get('machine')}"]
    for row in report["networks"]:
        lines.append("")
        numbers = {k: (round(v, 3) if isinstance(v, float) else v) for k, v in row.items() if k != "layers"}
        check = numbers.pop("check", None)
        lines.append(f"== {json.dumps(numbers)}")
        if check:
            lines.append(f"   check {json.dumps(check)[:600]}")
        total = row.get("layers_ms", 0) or 1
        grouped: dict[tuple[Any, ...], list[Report]] = {}
        for layer in row.get("layers", ()):
            grouped.setdefault((layer["kind"], layer["kernel"], str(layer["shape"]), layer["bytes"]), []).append(layer)
        for (kind, kernel, shape, moved), group in sorted(grouped.items(), key=lambda p: -sum(x["ms"] for x in p[1])):
            ms = sum(x["ms"] for x in group)
            if ms > 0.015 * total:
                each = ms / len(group)
                tops = 2e-9 * group[0]["macs"] / each
                lines.append(
                    f"   {ms:7.3f} = {len(group):2d} x {each:.4f} ms {moved / each / 1e6:6.0f} GB/s {tops:5.0f} TOPS "
                    f"{kind} {shape} {kernel} [{group[0]['step'][-24:]}]"
                )
    lines += [f"FAILED {text}" for text in report["failed"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
