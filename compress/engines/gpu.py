"""What the engines of a GPU share: tensors as inputs and arrays as outputs, times by the GPU's clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import GpuTimes, TensorInfo
from compress.errors import EngineError


def check_tensors(
    inputs: Mapping[str, Tensor], expected: Sequence[TensorInfo], device: torch.device, *, label: str
) -> None:
    """Refuse other names, types and devices than an engine takes."""
    names = [tensor.name for tensor in expected]
    if set(inputs) != set(names):
        raise EngineError(f"{label}: got inputs {', '.join(inputs) or 'none'}; the engine takes {', '.join(names)}")
    for tensor in expected:
        given = inputs[tensor.name]
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype != tensor.dtype:
            raise EngineError(f"{label}: input {tensor.name!r} is {dtype}; the engine takes {tensor.dtype}")
        if given.device != device:
            raise EngineError(f"{label}: input {tensor.name!r} is on {given.device}; the engine runs on {device}")


def array_of(tensor: Tensor) -> NDArray[np.generic]:
    """A tensor on the CPU, bfloat16 as float32, which numpy has."""
    tensor = tensor.detach().cpu()
    array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def time_batch(
    copy_in: Callable[[], None],
    compute: Callable[[], None],
    copy_out: Callable[[], None],
    stream: torch.cuda.Stream,
    *,
    batch_size: int,
    warmup: int,
    runs: int,
) -> GpuTimes:
    """Time a batch whose three parts are queued on `stream`."""
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    for _ in range(warmup):
        compute()
    marks = []
    for _ in range(runs):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record(stream)
        for step, event in zip((copy_in, compute, copy_out), events[1:], strict=True):
            step()
            event.record(stream)
        marks.append(events)
    stream.synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    moved_in, computed, moved_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=batch_size,
        copy_in_ms=moved_in,
        compute_ms=computed,
        copy_out_ms=moved_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )
