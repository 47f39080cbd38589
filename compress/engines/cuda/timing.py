"""Times what is launched on a GPU: several launches in one CUDA graph, so that the host's own time does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_TARGET_MS = 1.0
"""A graph of launches takes about this long: far longer than its own start, which takes 5 to 10 us."""
_MOST_LAUNCHES = 50


def launch_ms(run: Callable[[], None], device: torch.device, *, rounds: int = 5) -> float:
    """Median milliseconds of one call of `run`, which launches kernels and does not wait for them.

    Calls follow each other without a pause, so what fits into the cache is read from there, as it is in a network
    whose step before has just written it. On a CPU, where Triton's interpreter runs, one call is timed by the clock.

    Args:
        run: allocates nothing that it keeps; may be captured into a CUDA graph.
        device: on which it launches.
        rounds: of which the median is taken.

    Raises:
        Exception: what the first call raises, such as a kernel that needs more shared memory than there is.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        run()  # compiles, and fails here if it fails
        rough = min(_elapsed(run) for _ in range(3))
        launches = max(2, min(_MOST_LAUNCHES, round(_TARGET_MS / max(rough, 1e-3))))

        def repeated() -> None:
            for _ in range(launches):
                run()

        graph = captured(repeated)
        graph.replay()
        return statistics.median(_elapsed(graph.replay) / launches for _ in range(rounds))


def repeated_ms(run: Callable[[], object], *, calls: int = 20, rounds: int = 5) -> float:
    """Median milliseconds of a call of `run` whose calls are queued one after another, such as a graph's replay."""

    def repeated() -> None:
        for _ in range(calls):
            run()

    repeated()
    return statistics.median(_elapsed(repeated) / calls for _ in range(rounds))


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The launches of `run` as a CUDA graph that is not yet replayed."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _elapsed(run: Callable[[], object]) -> float:
    """Milliseconds between two events around a call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
