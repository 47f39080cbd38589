"""Times a TensorRT engine by the GPU's own clock: CUDA events in the stream, with and without the copies.

The host's clock includes launches and waiting; events measure the work of the GPU alone. Both matter: a service pays
for the copies, and a network inside a larger GPU program does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from compress.engines.base import GpuTimes
from compress.engines.tensorrt.context import ExecutionContext
from compress.errors import EngineError


def time_context(context: ExecutionContext, batch_size: int, *, warmup: int, runs: int) -> GpuTimes:
    """Time the batch whose inputs an execution context holds on the GPU.

    Args:
        context: after one run of the batch.
        batch_size: images of the batch.
        warmup: runs that are not timed.
        runs: runs that are.

    Raises:
        EngineError: a number is out of range.
    """
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    for _ in range(warmup):
        context.compute()
    steps = (context.copy_in, context.compute, context.copy_out)
    marks = [_marked(context, steps) for _ in range(runs)]
    context.stream.synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    copy_in, compute, copy_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=batch_size,
        copy_in_ms=copy_in,
        compute_ms=compute,
        copy_out_ms=copy_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )


def _marked(context: ExecutionContext, steps: tuple[Callable[[], None], ...]) -> list[torch.cuda.Event]:
    """Queue the steps of one batch, with an event before the first and after each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record(context.stream)
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record(context.stream)
    return events


def best_batch(times: Mapping[int, GpuTimes]) -> int:
    """Return the batch size of the highest throughput without transfers; the smaller one of two that are equal.

    Args:
        times: by batch size.

    Raises:
        EngineError: there are none.
    """
    if not times:
        raise EngineError("best_batch: there are no times to choose from")
    return max(sorted(times), key=lambda batch: times[batch].images_per_s)
