"""All that needs no quiet GPU, before anything is timed: ONNX files, and the kernels of our own engine."""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLongError
from pathlib import Path

import torch

from analysis.cuda_engine.networks import prepare
from compress.engines.cuda.bind import Bindings, candidates
from compress.engines.cuda.executor import Executor
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.program import kernel_requests, kernels_of
from compress.kernels.triton.ahead import compile_requests

_EXPORTS = 4


def prepared(
    networks: Sequence[tuple[str, int]], folder: Path, *, seconds: float, jobs: int, device: torch.device
) -> dict[str, str]:
    """Export every network and compile the kernels of all candidates into Triton's cache, until the time is over.

    Args:
        networks: (name, batch).
        folder: of the ONNX files.
        seconds: after which nothing more is begun.
        jobs: processes that compile.
        device: that runs them.

    Returns:
        The kernels and seconds of each network, or why there are none.
    """
    end = time.monotonic() + seconds
    found: dict[str, str] = {}
    exports = ProcessPoolExecutor(_EXPORTS, mp_context=multiprocessing.get_context("spawn"))
    files = {name: exports.submit(prepare, name, str(folder)) for name in dict.fromkeys(name for name, _ in networks)}
    for name, batch in networks:
        begin = time.monotonic()
        try:
            problem = files[name].result(max(0.0, end - begin))
            count, late = (0, 0) if problem else _compile(folder / f"{name}.onnx", batch, jobs, device, end)
            done = f"{count} kernels in {time.monotonic() - begin:.1f} s"
            found[f"{name}:{batch}"] = problem or (
                f"{late} of {count} kernels were not ready in time" if late else done
            )
        except WaitedTooLongError:
            found[f"{name}:{batch}"] = "not exported in time"
        except Exception as error:
            found[f"{name}:{batch}"] = f"{type(error).__name__}: {str(error)[:300]}"
    exports.shutdown(wait=False, cancel_futures=True)
    return found


def _compile(path: Path, batch: int, jobs: int, device: torch.device, end: float) -> tuple[int, int]:
    layout = lay_out(make_plan(path, batch_size=batch))
    bindings = Bindings(device, {})
    ways = [candidates(step, layout, bindings) for step in layout.steps]
    executor = Executor(layout, [way[0].run for way in ways], device)
    requests = kernel_requests(kernels_of(executor, ways))
    results = compile_requests(requests, bindings.capability, jobs=jobs, seconds=max(0.0, end - time.monotonic()))
    return len(requests), sum(error.startswith("not compiled in") for error in results)
