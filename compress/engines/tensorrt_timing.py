"""Time of a TensorRT engine on the GPU's own clock: events in the stream, with and without the copies.

The host's clock sees launches and waiting too; events see what the GPU does. Both matter: a service pays for the
copies, and a network inside a larger GPU program does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from compress.engines.tensorrt_engine import TensorRTEngine
from compress.engines.tensorrt_lane import Lane
from compress.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class GpuTimes:
    """Times of one batch, in ms, one number a run.

    Attributes:
        batch_size: images of one run.
        copy_in_ms, compute_ms, copy_out_ms: from pinned memory to the GPU, the network, and back.
        total_ms: all three in one stream, measured as one.
    """

    batch_size: int
    copy_in_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    copy_out_ms: tuple[float, ...]
    total_ms: tuple[float, ...]

    @property
    def images_per_s(self) -> float:
        """Batch over the median time without transfers."""
        return self.batch_size / float(np.median(self.compute_ms)) * 1e3


def time_on_gpu(
    engine: TensorRTEngine, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int = 10, runs: int = 100
) -> GpuTimes:
    """Time a batch with CUDA events.

    Args:
        engine: on a GPU.
        inputs: one batch.
        warmup: runs that are not timed.
        runs: runs that are.

    Raises:
        EngineError: numbers out of range, or as in `TensorRTEngine.run`.
    """
    if runs < 1 or warmup < 0:
        raise EngineError(f"time_on_gpu: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    lane = engine.warm(inputs)
    for _ in range(warmup):
        lane.compute()
    steps = (lane.copy_in, lane.compute, lane.copy_out)
    marks = [_marked(lane, steps) for _ in range(runs)]
    lane.stream.synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    copy_in, compute, copy_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=len(next(iter(inputs.values()))),
        copy_in_ms=copy_in,
        compute_ms=compute,
        copy_out_ms=copy_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )


def _marked(lane: Lane, steps: tuple[Callable[[], None], ...]) -> list[torch.cuda.Event]:
    """Queue the steps of one batch, with an event before the first and behind each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record(lane.stream)
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record(lane.stream)
    return events


def best_batch(times: Mapping[int, GpuTimes]) -> int:
    """Batch size of the highest throughput without transfers; the smaller one of two that are equal.

    Args:
        times: by batch size.

    Raises:
        EngineError: there are none.
    """
    if not times:
        raise EngineError("best_batch: there are no times to choose from")
    return max(sorted(times), key=lambda batch: times[batch].images_per_s)
