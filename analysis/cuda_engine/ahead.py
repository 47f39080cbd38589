"""All that needs no quiet GPU, before anything is timed: files, compiled baselines, compiled kernels of our own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLongError
from pathlib import Path
from typing import Any

import torch

from analysis.cuda_engine.baseline import compile_ahead
from analysis.cuda_engine.networks import prepare
from compress.engines.cuda.bind import Bindings, candidates
from compress.engines.cuda.executor import Executor
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.tuning import kernel_requests
from compress.kernels.triton.ahead import compile_requests

Network = tuple[str, int]


def prepared(
    networks: Sequence[Network], folder: Path, baselines: Sequence[tuple[str, int, str]], *, seconds: float, jobs: int
) -> dict[str, Any]:
    """Export every network, and compile what will be timed, until the time is over.

    Args:
        networks: (name, batch).
        folder: of the ONNX files.
        baselines: (name, batch, mode of torch.compile); one that takes longer is left for the timing to compile.
        seconds: after which everything that still compiles is ended.
        jobs: processes that compile our kernels.

    Returns:
        What became of each part.
    """
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    exports = ProcessPoolExecutor(4, mp_context=context)
    names = dict.fromkeys(name for name, _ in networks)
    files = {name: exports.submit(prepare, name, str(folder)) for name in names}
    compiling = {mode: ProcessPoolExecutor(3, mp_context=context) for mode in {mode for *_, mode in baselines}}
    compiled = {
        f"{name}:{batch} {mode}": compiling[mode].submit(compile_ahead, name, batch, mode)
        for name, batch, mode in baselines
    }
    found: dict[str, Any] = {}
    for name, batch in networks:
        problem = _result(files[name], end)
        found[f"{name}:{batch} kernels"] = problem or _kernels(folder / f"{name}.onnx", batch, jobs, end)
    for what, future in compiled.items():
        found[what] = _result(future, end)
    for process in multiprocessing.active_children():
        process.kill()
    return found


def _result(future: Future[str], end: float) -> str:
    try:
        return future.result(max(0.0, end - time.monotonic()))
    except WaitedTooLongError:
        return "not ready in time"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _kernels(path: Path, batch: int, jobs: int, end: float) -> str:
    """Compile the kernels of all candidates into Triton's cache."""
    start = time.monotonic()
    if start >= end:
        return "not begun in time"
    try:
        device = torch.device("cuda")
        layout = lay_out(make_plan(path, batch_size=batch))
        bindings = Bindings(device, {})
        ways = [candidates(step, layout, bindings) for step in layout.steps]
        executor = Executor(layout, [way[0].run for way in ways], device)
        requests = kernel_requests(executor, ways)
        results = compile_requests(requests, torch.cuda.get_device_capability(), jobs=jobs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    failed = [result.error for result in results if result.error]
    return f"{len(requests)} in {time.monotonic() - start:.1f} s" + (f", failed: {failed[:3]}" if failed else "")
