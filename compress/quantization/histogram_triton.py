"""Triton kernels that watch a tensor at the speed at which memory is read: its largest magnitude, and its histogram.

`collect_amax` reads once: integers order magnitudes as floats do, with NaN above infinity, so an integer maximum finds
the largest, and NaN where there is one.

`collect` keeps what `Histogram.add` keeps, bin for bin, and never asks the host. How wide bins must be is known only
after a batch was read; but it rarely changes. So the batch is counted with the present width while its maximum is taken
(`_count_kernel`), into counts of its own; then `_settle_kernel` decides. If all values had a bin, these counts are
added. If not (the first batch; a value beyond the last bin), they are dropped, the width is chosen and neighbours are
merged, and the second launch of `_count_kernel`, which otherwise returns at once, counts again.

Bins are counted by atomic additions to global memory, in a few copies so that values of one bin do not all queue for
one address; bin 0, which holds the zeros of a ReLU, is summed within each program first.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.quantization.launch import Kept, Launch

_BLOCK = 4096  # elements that a program reads at a time
_PROGRAMS = 2112  # 16 on each of 132 multiprocessors
_COPIES = 64  # of 8 and 64, on an H200: 603 and 292 us for 25.7 million values
_SLICE = 256  # bins of a program of `_settle_kernel`


@triton.jit(do_not_specialize=["steps"])  # or it is compiled again where a tensor needs one step
def _amax_kernel(x_ptr, amax_ptr, n, steps, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(steps):
        begin = first + step * BLOCK
        at = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + begin + at, mask=at < n - begin, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(largest, axis=0)
    if top > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, top)


@triton.jit(do_not_specialize=["steps"])
def _count_kernel(
    x_ptr, amax_ptr, width_ptr, again_ptr, fresh_ptr, n, steps,
    SECOND: tl.constexpr, BINS: tl.constexpr, STRIDE: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    width = tl.load(width_ptr)
    counts = width > 0
    if SECOND:
        counts = tl.load(again_ptr) != 0
        width = tl.where(width > 0, width, 1.0)
    if (not SECOND) or counts:
        first = tl.program_id(0).to(tl.int64) * steps * BLOCK
        copy_ptr = fresh_ptr + (tl.program_id(0) % COPIES) * STRIDE
        largest = tl.zeros([BLOCK], dtype=tl.int32)
        zeros = tl.zeros([BLOCK], dtype=tl.int32)
        for step in range(steps):
            begin = first + step * BLOCK
            at = tl.arange(0, BLOCK)
            there = at < n - begin
            x = tl.abs(tl.load(x_ptr + begin + at, mask=there, other=0.0).to(tl.float32))
            if not SECOND:
                largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            if counts:
                position = tl.div_rn(x, tl.full([BLOCK], 0.0, tl.float32) + width)
                position = tl.where(position < BINS, position, BINS)  # NaN too
                index = position.to(tl.int32)
                tl.atomic_add(copy_ptr + index, 1, mask=there & (index > 0), sem="relaxed")
                zeros += (there & (index == 0)).to(tl.int32)
        if counts:
            tl.atomic_add(copy_ptr, tl.sum(zeros, axis=0), sem="relaxed")
        if not SECOND:
            top = tl.max(largest, axis=0)
            if top > tl.load(amax_ptr):
                tl.atomic_max(amax_ptr, top)


@triton.jit
def _settle_kernel(
    amax_ptr, width_ptr, again_ptr, counts_ptr, fresh_ptr, new_width_ptr, new_again_ptr, new_counts_ptr, other_ptr,
    START: tl.constexpr, BINS: tl.constexpr, STRIDE: tl.constexpr, COPIES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    amax = tl.load(amax_ptr)
    old = tl.load(width_ptr)
    width = tl.where(old > 0, old, amax / START)  # a power of two
    crowding = tl.div_rn(amax, width) / BINS
    power = tl.arange(0, 128)
    above = crowding > ((power + 127) << 23).to(tl.float32, bitcast=True)  # 1, 2, 4, ...
    doublings = tl.sum((above & (power < 126)).to(tl.int32), axis=0)
    width = width * ((doublings + 127) << 23).to(tl.float32, bitcast=True)
    fits = (doublings == 0) & ((old > 0) | (tl.load(again_ptr) != 0))
    if tl.program_id(0) == 0:
        tl.store(new_width_ptr, width)
        tl.store(new_again_ptr, tl.where(fits, 0, 1))
    position = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    shift = tl.minimum(doublings, 16)
    total = tl.zeros([SLICE], dtype=tl.int64)
    for k in range(0, tl.minimum(1 << shift, BINS)):
        source = (position.to(tl.int64) << shift) + k
        total += tl.load(counts_ptr + source, mask=source < BINS, other=0)
    live = tl.ceil(tl.div_rn(amax, tl.where(width > 0, width, 1.0)))
    live = tl.where(live > 1, live, 1.0)
    live = tl.where(fits, tl.where(live < BINS, live, BINS), 0.0).to(tl.int32)
    inside = position < live
    last = position == live - 1  # closed above: it has what lies at its upper end, too
    for copy in tl.static_range(0, COPIES):  # unrolled, so that the loads do not wait for each other
        at = fresh_ptr + copy * STRIDE + position
        total += tl.load(at, mask=inside, other=0) + tl.load(at + 1, mask=last, other=0)
        tl.store(other_ptr + copy * STRIDE + position, tl.zeros([SLICE], dtype=tl.int32))
    tl.store(new_counts_ptr + position, total, mask=position < BINS)


def collect_amax(values: Tensor, amax: Tensor) -> None:
    """Raise `amax` to the largest magnitude; NaN if there is one.

    Args:
        values: (1, n), without gaps.
        amax: (1,) float32, at least 0 or NaN; changed in place.
    """
    _run(_amax_kernel, values, amax.view(torch.int32))


class Watch:
    """The tables between launches, on the device: two of each that a launch reads while it writes the other.

    Args:
        amax, width: (1,) float32, and
        counts: (1, bins) int64: of the histogram, changed in place.
        start: bins that the first batch is spread over, a power of two.
    """

    def __init__(self, amax: Tensor, width: Tensor, counts: Tensor, start: int) -> None:
        device, bins = counts.device, counts.shape[1]
        self._amax, self._order = amax, amax.view(torch.int32)
        self._state = [(width, _zeros(1, device), counts), (torch.empty_like(width), _zeros(1, device), counts.clone())]
        stride = -(-(bins + 1) // _SLICE) * _SLICE
        self._fresh = [_zeros(_COPIES * stride, device) for _ in range(2)]
        self._count = (bins, stride, _COPIES, _BLOCK)
        self._settle = (start, bins, stride, _COPIES, _SLICE)
        self._slices = stride // _SLICE

    def collect(self, values: Tensor) -> None:
        """Take (1, n) values without gaps into the histogram."""
        for second in (False, True):
            width, again, _ = self._state[second]
            _run(_count_kernel, values, self._order, width, again, self._fresh[second], second, *self._count)
            key = (_settle_kernel, values.get_device(), self._settle)
            if key not in _LAUNCHES:
                _LAUNCHES[key] = Launch(_settle_kernel, (self._slices,), *self._settle)
            # amax, width, again and counts are read, and what they become is written to the other ones
            tensors = (
                self._amax,
                *self._state[second],
                self._fresh[second],
                *self._state[not second],
                self._fresh[not second],
            )
            _LAUNCHES[key](values.get_device(), *tensors)


_LAUNCHES = Kept()


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _run(kernel: Any, values: Tensor, *tables: Any) -> None:
    """Launch a kernel that reads all values; what follows the tables are its constants."""
    tensors = [table for table in tables if isinstance(table, Tensor)]
    constants = tables[len(tensors) :] or (_BLOCK,)
    n = values.numel()
    key = (kernel, n, values.dtype, values.get_device(), constants)
    if key not in _LAUNCHES:
        steps = triton.cdiv(n, _PROGRAMS * _BLOCK)
        _LAUNCHES[key] = Launch(kernel, (triton.cdiv(n, steps * _BLOCK),), n, steps, *constants)
    _LAUNCHES[key](values.get_device(), values, *tensors)
