"""Histograms of magnitudes that widen as larger values come, on the tensor's own device, without losing a count.

A histogram has rows: one for a whole tensor, or one for each channel. The first batch that is not all zero fixes
the width of its bins, largest magnitude / 2048, as pytorch-quantization's does, so that both choose among the same
edges. When a later batch holds a larger magnitude, bins are added at the upper end, at the same width: nothing that
was counted moves. That alone has no bound (a first batch of 1e-6 followed by 1.0 would want two billion bins), so
past `max_bins` neighbouring bins are merged in pairs and the width doubles, as often as needed. Counts are int64:
float32 counts, the usual choice, stop growing at 16,777,216, which the zeros of a ReLU exceed within a few batches.

The trade-off: up to 4 times growth costs nothing in resolution and 64 KiB a tensor; beyond it the resolution is
between range / 8192 and range / 4096, still finer than at the start. Per-channel rows merge pairs at once.

Widening depends on the values. Reading a value from a GPU would stop the queue at every layer, so there width and range
stay tensors and every step, merging included, is computed even if it is not needed; a whole tensor by a CUDA kernel
that reads it once (`compress.kernels.cuda.histogram`). A CPU has nothing to wait for and counts in blocks that fit the
cache, on all threads (`torch.histc` takes 4 times as long). There, counting every value would take as long as the
network itself, so that of a large tensor a sample is counted (`samples`); the largest magnitude is always that of all
values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.kernels.cuda.histogram import Watch, collect_amax, takes
from compress.quantization.calibration.amax import live_bins, row_amax
from compress.quantization.calibration.samples import Sample, drawn_from

BINS = 2048
"""Bins that the first batch is spread over."""

MAX_BINS = 8192
"""Bins of one tensor before neighbours are merged."""

_BLOCK = (1 << 15) - 64  # elements counted at a time: below torch's grain, so that no operation waits for its threads
_SHARE = 1 << 18  # elements that are worth a thread
_EXACT = 1 << 24  # float32 counts of more elements than this need not be exact


@dataclass(kw_only=True, eq=False)
class Histogram:
    """Counts of |x|, in bins of equal width that start at zero.

    Attributes:
        counts: (rows, max_bins) int64; bin k of a row holds [k * width, (k + 1) * width).
        width: (rows,) float32; 0 as long as a row has only zeros, all of which are then in bin 0.
        amax: (rows,) float32, the largest magnitude; NaN or Inf once such a value has come, after which the counts
            mean nothing.
    """

    counts: Tensor
    width: Tensor
    amax: Tensor
    _watch: Watch | None = None

    @classmethod
    def empty(cls, rows: int, max_bins: int, device: torch.device) -> Histogram:
        """Return a histogram without counts."""
        return cls(
            counts=torch.zeros(rows, max_bins, dtype=torch.int64, device=device),
            width=torch.zeros(rows, device=device),
            amax=torch.zeros(rows, device=device),
        )

    def add(self, values: Tensor) -> None:
        """Count `values`, (rows, n) of any floating type, on the device of the histogram; n > 0."""
        if takes(values, self.counts.shape[1]):
            if self._watch is None:
                self._watch = Watch(self.amax, self.width, self.counts, BINS)
            self._watch.collect(values)
            return
        self._watch = None
        if values.device.type == "cpu" and len(values) == 1:
            self.add_parts([drawn_from(values[0])])
            return
        batch_amax = row_amax(values)
        self.amax = torch.maximum(self.amax, batch_amax)
        self.width = torch.where(self.width > 0, self.width, batch_amax / BINS)
        self._fit()
        width = torch.where(self.width > 0, self.width, 1.0)
        live = (self.amax / width).ceil().clamp(1, self.counts.shape[1])
        self.counts += count_on_device(values, width, live, self.counts.shape[1])

    def counted(self, sample: Sample) -> Sample | Counted:
        """Count the sample of a stretch of a tensor before those of its other stretches are there.

        It is copied instead as long as there is no width, or where its largest magnitude does not fit. Several threads
        may call this while one calls `add_parts`.
        """
        width = self.width.numpy()[0]
        if width == 0 or not np.float32(sample.amax) <= width * np.float32(self.counts.shape[1]):
            return sample.copied()
        return _counted(sample, width, self.counts.shape[1])

    def add_parts(self, parts: Sequence[Sample | Counted]) -> None:
        """Count one row on a CPU, from the samples of all its stretches.

        It computes with numbers: operations on tensors take longer than to count small ones.
        """
        batch_amax = np.max([np.float32(part.amax) for part in parts])  # NaN where one is
        with np.errstate(all="ignore"):
            amax, width = np.maximum(self.amax.numpy()[0], batch_amax), self.width.numpy()[0]
            width = width if width > 0 else batch_amax / np.float32(BINS)
            self.amax, self.width = torch.from_numpy(np.array([amax])), torch.from_numpy(np.array([width]))
            if not np.isfinite(amax):
                return
            if amax > width * np.float32(self.counts.shape[1]):
                self._fit()
                width = self.width.numpy()[0]
            width = width if width > 0 else np.float32(1)
            bins = min(max(int(np.ceil(amax / width)), 1), self.counts.shape[1])
        counts = np.zeros(bins, np.int64)
        for part in parts:
            whole = part if isinstance(part, Counted) else _counted(part, width, bins)
            _add_counts(counts, _wider(whole, width))
        if parts[0].every > 1:
            _count_largest(counts, min(int(float(batch_amax) / float(width)), bins - 1))
        held = self.counts.numpy()[0, :bins]
        held += counts

    def rescaled(self, width: Tensor, amax: Tensor) -> Histogram:
        """Return this histogram on bins of `width` (rows,), none narrower than now, up to `amax` (rows,)."""
        wider = Histogram(counts=resample(self.counts, self.width, width), width=width, amax=amax)
        wider._fit()
        return wider

    def live(self) -> tuple[Tensor, Tensor]:
        """Return (counts, width) on the CPU, up to the last bin in use: (rows, bins), (rows,)."""
        counts = self.counts.cpu()
        return counts[:, : int(live_bins(counts).max())], self.width.cpu()

    def _fit(self) -> None:
        """Merge neighbouring bins until the largest magnitude lies in one."""
        crowding = self.amax / self.width / self.counts.shape[1]
        doublings = crowding.log2().ceil().nan_to_num(0.0).clamp(0, 126)  # 0 / 0 where there are only zeros
        if self.counts.device.type == "cpu" and not doublings.any():
            return
        self.counts = merge_neighbours(self.counts, doublings.long())
        self.width = self.width * doublings.exp2()


def raise_amax(values: Tensor, amax: Tensor) -> None:
    """Raise `amax`, (rows,), to the largest magnitude of (rows, n) values, in place; NaN where there is one."""
    if takes(values):
        collect_amax(values, amax)
    else:
        amax.copy_(torch.maximum(amax, row_amax(values)))


def merge_neighbours(counts: Tensor, doublings: Tensor) -> Tensor:
    """Merge each 2**doublings neighbouring bins into one; the upper bins become empty.

    Args:
        counts: (rows, bins) int64.
        doublings: (rows,) int64, at least 0.
    """
    target = torch.arange(counts.shape[1], device=counts.device) >> doublings[:, None].clamp(max=62)
    return torch.zeros_like(counts).scatter_add_(1, target, counts)


def resample(counts: Tensor, width: Tensor, new_width: Tensor) -> Tensor:
    """Move counts onto wider bins, as if each bin's values were spread evenly over it.

    The cumulative counts are interpolated at the new edges and rounded, so that the total stays exact, and nothing
    moves when the new width is the old one or an exact multiple of it.

    Args:
        counts: (rows, bins) int64.
        width: (rows,) the present widths; 0 where only bin 0 is filled.
        new_width: (rows,), none less than `width`.

    Returns:
        (rows, bins) int64.
    """
    bins = counts.shape[1]
    ratio = torch.where(width > 0, new_width.double() / width.double(), 1.0)
    edge = (torch.arange(bins + 1, device=counts.device) * ratio[:, None]).clamp(max=bins)
    whole = edge.floor().long()
    below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    inside = torch.nn.functional.pad(counts, (0, 1)).gather(1, whole)
    return (below.gather(1, whole) + ((edge - whole) * inside).round().long()).diff(dim=1)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts of a stretch of a tensor.

    Attributes:
        counts: (n,), each value of the sample for all that it stands for. The last bin may hold values that are the
            upper edge of the one before.
        width: of a bin.
        amax, every: as of the sample.
    """

    counts: NDArray[np.int64]
    width: np.float32
    amax: float
    every: int


def _counted(sample: Sample, width: np.float32, most: int) -> Counted:
    """Count the magnitudes of a sample, none of which is larger than most * width."""
    bins = min(max(int(np.ceil(np.float32(sample.amax) / width)), 1), most)
    counts = _count(sample.values, float(width), bins).numpy()
    if sample.every > 1:
        counts *= sample.every
        counts += _count(sample.rest, float(width), bins).numpy()
    return Counted(counts=counts, width=width, amax=sample.amax, every=sample.every)


def _wider(part: Counted, width: np.float32) -> NDArray[np.int64]:
    """Return counts in bins of `width`, the part's own or a power of two times as wide.

    They are the same as if the values had been counted at that width, because division by a power of two is exact.
    """
    times = round(float(width / part.width))
    return part.counts if times == 1 else np.add.reduceat(part.counts, np.arange(0, part.counts.size, times))


def _add_counts(counts: NDArray[np.int64], found: NDArray[np.int64]) -> None:
    """Add counts in place; what lies beyond the last bin is counted in it."""
    inside = found[: counts.size]
    counts[: inside.size] += inside
    if found.size > counts.size:
        counts[-1] += found[counts.size :].sum()


def _count_largest(counts: NDArray[np.int64], last: int) -> None:
    """Count the largest magnitude, in bin `last`, if no sample held it; the number of values stays."""
    if counts[last] == 0:
        counts[last] += 1
        counts[counts.argmax()] -= 1


def count_on_host(values: Tensor, width: float, bins: int) -> Tensor:
    """Count |values| in bins of `width`, the last of which is closed above.

    Args:
        values: (n,) on the CPU, finite, none of them larger than bins * width.
        width: width of a bin, > 0.
        bins: number of bins.

    Returns:
        (bins,) int64.
    """
    counts = _count(values, width, bins)
    counts[bins - 1] += counts[bins]
    return counts[:bins]


def _count(values: Tensor, width: float, bins: int) -> Tensor:
    """Count as `count_on_host` does; (bins + 1,), the last one counts values equal to bins * width."""
    workers = max(1, min(torch.get_num_threads(), values.numel() // _SHARE))
    if workers == 1:
        return _count_serially(values, width, bins)
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(lambda part: _count_serially(part, width, bins), values.chunk(workers))
        return torch.stack(list(parts)).sum(0)


class _Memory(threading.local):
    """Memory that a thread counts in: new pages for each tensor would cost a third of counting it."""

    def __init__(self) -> None:
        self.position, self.index = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
        self.tensor = torch.from_numpy(self.index)


_MEMORY = _Memory()


def _count_serially(values: Tensor, width: float, bins: int) -> Tensor:
    """Count in blocks that fit the cache, with numpy where it can: its operations begin sooner than those of torch."""
    counts, numbers = torch.zeros(bins + 1, dtype=torch.int64), values.float().numpy()
    for start in range(0, numbers.size, _BLOCK):
        block = numbers[start : start + _BLOCK]
        position, index = _MEMORY.position[: block.size], _MEMORY.index[: block.size]
        np.divide(block, np.float32(width), out=position)
        np.copyto(index, np.absolute(position, out=position), casting="unsafe")
        counts += torch.bincount(_MEMORY.tensor[: block.size], minlength=bins + 1)
    return counts


def count_on_device(values: Tensor, width: Tensor, live: Tensor, bins: int) -> Tensor:
    """Count |values| without ever waiting for the device; NaN and Inf land anywhere or nowhere.

    Args:
        values: (rows, n).
        width: (rows,) width of the bins, > 0.
        live: (rows,) float; values beyond bin live - 1 are counted in it.
        bins: columns of the result.

    Returns:
        (rows, bins) int64.
    """
    rows = len(values)
    counts = torch.zeros(rows, bins, dtype=torch.int64, device=values.device)
    first = torch.arange(rows, device=values.device)[:, None] * bins
    one = counts.new_ones(1)
    # torch.histc gathers in fast on-chip memory, which matters where half of the values share bin 0; its float32
    # counts are exact up to 2**24, and torch refuses it under use_deterministic_algorithms
    by_histc = rows == 1 and not torch.are_deterministic_algorithms_enabled()
    for block in values.split(max(1, _EXACT // rows), dim=1):
        position = torch.minimum(block.float().abs() / width[:, None], live[:, None] - 0.5)
        if by_histc:
            counts[0] += torch.histc(position, bins=bins, min=0, max=bins).long()
        else:
            index = (position.long().clamp_(0, bins - 1) + first).flatten()
            counts.view(-1).scatter_add_(0, index, one.expand(index.numel()))
    return counts
