"""Times a program by the GPU's own clock, with and without the copies of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import GpuTimes
from compress.engines.cuda.program import Program
from compress.errors import EngineError


def time_program(program: Program, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int, runs: int) -> GpuTimes:
    """Time a batch on the current device.

    Args:
        program: of the inputs' shapes.
        inputs: one batch.
        warmup: runs that are not timed.
        runs: runs that are.

    Raises:
        EngineError: a number is out of range.
    """
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    pinned = {name: torch.from_numpy(array).pin_memory() for name, array in inputs.items()}
    given = {name: tensor.to(program.executor.device) for name, tensor in pinned.items()}
    results = program.run(given)
    back = {name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for name, tensor in results.items()}

    def copy_in() -> None:
        for name, tensor in given.items():
            tensor.copy_(pinned[name], non_blocking=True)

    def compute() -> None:
        results.update(program.run(given))

    def copy_out() -> None:
        for name, tensor in back.items():
            tensor.copy_(results[name], non_blocking=True)

    for _ in range(warmup):
        compute()
    marks = [_marked((copy_in, compute, copy_out)) for _ in range(runs)]
    torch.cuda.current_stream().synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    moved_in, computed, moved_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=_batch(given),
        copy_in_ms=moved_in,
        compute_ms=computed,
        copy_out_ms=moved_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )


def _batch(given: Mapping[str, Tensor]) -> int:
    return int(next(iter(given.values())).shape[0])


def _marked(steps: tuple[Callable[[], None], ...]) -> list[torch.cuda.Event]:
    """Queue the steps of one batch, with an event before the first and after each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    return events
