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
network itself, so that of a large tensor a sample is counted; the largest magnitude is always that of all values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.kernels.cuda.histogram import Watch, collect_amax, takes
from compress.quantization.calibration.amax import live_bins, row_amax

BINS = 2048
"""Bins that the first batch is spread over."""

MAX_BINS = 8192
"""Bins of one tensor before neighbours are merged."""

_BLOCK = (1 << 15) - 64  # elements counted at a time: below torch's grain, so that no operation waits for its threads
LOOK = 1 << 18  # elements that are searched for the largest, and then sampled while the cache holds them
_SHARE = 1 << 18  # elements that are worth a thread
_SAMPLED, _THINNEST = 1 << 17, 13
"""Values of a whole tensor that are counted at least, and one value in so many that is counted at least, on a CPU."""
_STRATA = 2503
"""Stretches after which the random numbers of the sample repeat: a prime, which no width of a picture divides."""

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
            self.add_sample(drawn_from(values[0]))
            return
        batch_amax = row_amax(values)
        self.amax = torch.maximum(self.amax, batch_amax)
        self.width = torch.where(self.width > 0, self.width, batch_amax / BINS)
        self._fit()
        width = torch.where(self.width > 0, self.width, 1.0)
        live = (self.amax / width).ceil().clamp(1, self.counts.shape[1])
        self.counts += count_on_device(values, width, live, self.counts.shape[1])

    def add_sample(self, sample: Sample) -> None:
        """Count one row on a CPU, with numbers: operations on tensors take longer than to count small ones."""
        batch_amax = np.float32(sample.amax)
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
        self.counts[0, :bins] += count_sample(sample, float(width), bins)

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
class Sample:
    """An evenly spread sample of a tensor on the CPU.

    Attributes:
        amax: largest magnitude of the whole tensor; NaN where it holds one.
        values: (n,), each of which counts for `every` values of the tensor.
        rest: (m,), which count once.
        every: 1 where all values are in the sample.
    """

    amax: float
    values: Tensor
    rest: Tensor
    every: int


def drawn_from(values: Tensor, *, start: int = 0, total: int | None = None) -> Sample:
    """Return a sample of (n,) values and the largest magnitude of all, in one pass.

    One value is drawn from each stretch of `every` neighbours, by the same random numbers in every call, so that no
    column or channel of a picture is preferred.

    Args:
        values: (n,), a whole tensor or one stretch of it: together their samples are the tensor's.
        start: place of the first value in the tensor.
        total: number of values of the tensor; None = n.
    """
    numbers = values.float().numpy()  # whose operations begin sooner than those of torch, and use one thread
    total = numbers.size if total is None else total
    every = min(_THINNEST, total // _SAMPLED)
    if every < 2:
        largest_of_all = float(largest_magnitude(numbers))
        return Sample(amax=largest_of_all, values=torch.from_numpy(numbers), rest=values[:0], every=1)
    place, period = _places(every), _STRATA * every
    end = min(max(total // period * period - start, 0), numbers.size)  # what comes after it counts as it is
    head = min(-start % period, end)
    tail = head + (end - head) // period * period
    before, after = _inside(place, start % period, head), _inside(place, 0, end - tail)
    drawn = np.empty(before.size + (tail - head) // every + after.size, np.float32)
    numbers[:head].take(before, out=drawn[: before.size], mode="clip")
    numbers[tail:end].take(after, out=drawn[drawn.size - after.size :], mode="clip")
    largest = [largest_magnitude(part) for part in (numbers[:head], numbers[tail:]) if part.size]
    rows, result = numbers[head:tail].reshape(-1, period), drawn[before.size : drawn.size - after.size]
    for i in range(0, len(rows), step := max(1, LOOK // period)):
        part = rows[i : i + step]
        largest.append(largest_magnitude(part))
        part.take(place, axis=1, out=result[i * _STRATA : (i + step) * _STRATA].reshape(-1, _STRATA), mode="clip")
    drawn_values, rest = (torch.from_numpy(part) for part in (drawn, numbers[end:]))
    return Sample(amax=float(np.max(largest)), values=drawn_values, rest=rest, every=every)


def largest_magnitude(numbers: NDArray[np.float32]) -> np.float32:
    """Return the largest magnitude; NaN where there is one."""
    found: np.float32 = np.maximum(numbers.max(), -numbers.min())
    return found


def drawn_places(start: int, size: int, total: int) -> tuple[NDArray[np.intp], int, int]:
    """Return where `drawn_from` finds the sample of a stretch, for a tensor that is held in another order.

    Args:
        start: place of the first value in the tensor.
        size: number of values of the stretch.
        total: number of values of the tensor.

    Returns:
        The places in the stretch, those of `Sample.values` and then those of `Sample.rest`, in order; the number of the
        former; `Sample.every`.
    """
    every = min(_THINNEST, total // _SAMPLED)
    if every < 2:
        return np.arange(size), size, 1
    period = _STRATA * every
    end = min(max(total // period * period - start, 0), size)
    periods = np.arange(start // period, -(-(start + end) // period))
    places = (periods[:, None] * period + _places(every)).reshape(-1) - start
    drawn = places[slice(*places.searchsorted((0, end)))]
    return np.concatenate([drawn, np.arange(end, size)]), drawn.size, every


def _inside(place: NDArray[np.intp], start: int, number: int) -> NDArray[np.intp]:
    """Return the drawn positions of a stretch of one period that begins at `start`, counted from there."""
    first, last = place.searchsorted((start, start + number))
    return place[first:last] - start


def joined(samples: Sequence[Sample]) -> Sample:
    """Return the sample of a tensor from those of its stretches."""
    if len(samples) == 1:
        return samples[0]
    return Sample(
        amax=float(np.max([sample.amax for sample in samples])),  # NaN where one is
        values=_concatenated([sample.values for sample in samples]),
        rest=_concatenated([sample.rest for sample in samples]),
        every=samples[0].every,
    )


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors on the CPU with one thread: torch's own threads would wait for those that compute."""
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))


@functools.cache
def _places(every: int) -> NDArray[np.intp]:
    """Return the positions that are drawn from each `every` * _STRATA values, in order."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(0, _STRATA * every, every) + torch.randint(every, (_STRATA,), generator=generator)
    return place.numpy().astype(np.intp)


def count_sample(sample: Sample, width: float, bins: int) -> Tensor:
    """Count the magnitudes of a sample, each for all values that it stands for.

    Args:
        sample: of finite values, its largest magnitude at most bins * width; that is counted in any case.
        width: width of a bin, > 0.
        bins: number of bins.

    Returns:
        (bins,) int64, of which the sum is the number of values of the tensor.
    """
    counts = count_on_host(sample.values, width, bins) * sample.every
    if sample.every == 1:
        return counts
    counts += count_on_host(sample.rest, width, bins)
    last = min(int(sample.amax / width), bins - 1)
    if counts[last] == 0:
        counts[last] += 1
        counts[counts.argmax()] -= 1
    return counts


def count_on_host(values: Tensor, width: float, bins: int) -> Tensor:
    """Count |values| in bins of `width`, the last of which is closed above.

    Args:
        values: (n,) on the CPU, finite, none of them larger than bins * width.
        width: width of a bin, > 0.
        bins: number of bins.

    Returns:
        (bins,) int64.
    """
    workers = max(1, min(torch.get_num_threads(), values.numel() // _SHARE))
    if workers == 1:
        counts = _count_serially(values, width, bins)
    else:
        with ThreadPoolExecutor(workers) as pool:
            parts = pool.map(lambda part: _count_serially(part, width, bins), values.chunk(workers))
            counts = torch.stack(list(parts)).sum(0)
    counts[bins - 1] += counts[bins]
    return counts[:bins]


def _count_serially(values: Tensor, width: float, bins: int) -> Tensor:
    """Count in blocks that fit the cache; (bins + 1,), the last one counts values equal to bins * width."""
    position = torch.empty(_BLOCK)
    index = torch.empty(_BLOCK, dtype=torch.int32)
    counts = torch.zeros(bins + 1, dtype=torch.int64)
    for block in values.split(_BLOCK):
        size = block.numel()
        torch.div(block.float(), width, out=position[:size])
        counts += torch.bincount(index[:size].copy_(position[:size]).abs_(), minlength=bins + 1)
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
