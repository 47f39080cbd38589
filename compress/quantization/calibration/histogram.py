"""Histograms of magnitudes that widen as larger values come, on the tensor's own device, without losing a count.

A histogram has a row for a whole tensor, or one for each channel. The first batch that is not all zero fixes the width
of its bins, largest magnitude / 2048, as pytorch-quantization's does. Larger magnitudes add bins at the upper end; past
`max_bins` neighbouring bins are merged in pairs and the width doubles, so that the resolution stays between range /
8192 and range / 4096. Per-channel rows merge pairs at once. Counts are int64: float32 counts stop growing at
16,777,216.

Reading a value from a GPU would stop the queue at every layer, so there width and range stay tensors and every step is
computed even if it is not needed; a whole tensor by a CUDA kernel (`compress.kernels.histogram`). A CPU counts in
blocks that fit the cache, on all threads, and of a large tensor a sample: of each stretch of neighbours one value, by
the same random numbers for every tensor, so that the samples of parts make the sample of the whole. The largest
magnitude is always that of all values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.kernels.histogram import Watch, collect_amax, takes
from compress.quantization.calibration.amax import live_bins, row_amax

LOOK = 1 << 18
"""Elements that are searched for the largest, and then sampled while the cache holds them."""

_SAMPLED, _THINNEST = 1 << 17, 13
"""Values of a whole tensor that are counted at least, and one value in so many that is counted at least, on a CPU."""
_STRATA = 2503
"""Stretches after which the random numbers of the sample repeat: a prime, which no image width divides."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An evenly spread sample of a tensor on the CPU.

    Attributes:
        amax: largest magnitude of all values of the tensor or stretch; NaN where there is one.
        values: (n,), each of which counts for `every` values of the tensor; `rest`: (m,), which count once.
    """

    amax: float
    values: Tensor
    rest: Tensor
    every: int

    def copied(self) -> Sample:
        values, rest = (torch.from_numpy(part.numpy().copy()) for part in (self.values, self.rest))
        return replace(self, values=values, rest=rest)


def drawn_from(values: Tensor, *, start: int = 0, total: int | None = None) -> Sample:
    """Sample (n,) values from place `start` of a tensor of `total` (None = n), and find the largest magnitude.

    No column or channel is preferred. The samples of all stretches of a tensor together are the tensor's.
    """
    numbers = values.float().numpy()  # whose operations begin sooner than those of torch, and use one thread
    total = numbers.size if total is None else total
    every = _every(total)
    if every < 2:
        largest_of_all = float(largest_magnitude(numbers))
        return Sample(
            amax=largest_of_all, values=torch.from_numpy(numbers), rest=torch.from_numpy(numbers[:0]), every=1
        )
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


def largest_magnitude(numbers: NDArray[np.float32], *, signed: bool = True) -> np.float32:
    """The largest magnitude, NaN where there is one; `signed` is False if none is negative."""
    found: np.float32 = np.maximum(numbers.max(), -numbers.min()) if signed else numbers.max()
    return found


def is_sampled(total: int) -> bool:
    """True if not all values of a tensor of `total` values are in its sample."""
    return _every(total) > 1


def drawn_places(start: int, size: int, total: int) -> tuple[NDArray[np.intp], int, int]:
    """The places in a stretch that `drawn_from` takes, for a tensor that is held in another order.

    Returns:
        Those of `Sample.values` and then those of `Sample.rest`; the number of the former; `Sample.every`.
    """
    every = _every(total)
    if every < 2:
        return np.arange(size), size, 1
    period = _STRATA * every
    end = min(max(total // period * period - start, 0), size)
    periods = np.arange(start // period, -(-(start + end) // period))
    places = (periods[:, None] * period + _places(every)).reshape(-1) - start
    drawn = places[slice(*places.searchsorted((0, end)))]
    return np.concatenate([drawn, np.arange(end, size)]), drawn.size, every


def _every(total: int) -> int:
    return min(_THINNEST, total // _SAMPLED)


def _inside(place: NDArray[np.intp], start: int, number: int) -> NDArray[np.intp]:
    """The drawn places of a stretch of one period that begins at `start`, counted from there."""
    first, last = place.searchsorted((start, start + number))
    return place[first:last] - start


@functools.cache
def _places(every: int) -> NDArray[np.intp]:
    """The places that are drawn from each `every` * _STRATA values."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(0, _STRATA * every, every) + torch.randint(every, (_STRATA,), generator=generator)
    return place.numpy().astype(np.intp)


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

        It is copied instead as long as there is no width, or where its largest magnitude does not fit. Other threads
        may call this, and one `add_parts`.
        """
        width = self.width.numpy()[0]
        if width == 0 or not np.float32(sample.amax) <= width * np.float32(self.counts.shape[1]):
            return sample.copied()
        return _counted(sample, width, self.counts.shape[1])

    def add_parts(self, parts: Sequence[Sample | Counted]) -> None:
        """Count one row on a CPU, from the samples of all its stretches; with numbers, faster than small tensors."""
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
            last = min(int(float(batch_amax) / float(width)), bins - 1)
            if counts[last] == 0:  # no sample held the largest magnitude; the number of values stays
                counts[last] += 1
                counts[counts.argmax()] -= 1
        held = self.counts.numpy()[0, :bins]
        held += counts

    def rescaled(self, width: Tensor, amax: Tensor) -> Histogram:
        """This histogram on bins of `width` (rows,), none narrower than now, up to `amax` (rows,)."""
        wider = Histogram(counts=resample(self.counts, self.width, width), width=width, amax=amax)
        wider._fit()
        return wider

    def live(self) -> tuple[Tensor, Tensor]:
        """(counts, width) on the CPU, up to the last bin in use: (rows, bins), (rows,)."""
        counts = self.counts.cpu()
        return counts[:, : int(live_bins(counts).max())], self.width.cpu()

    def _fit(self) -> None:
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
    """Merge each 2**doublings (rows,) neighbouring bins of counts (rows, bins) into one; upper ones become empty."""
    target = torch.arange(counts.shape[1], device=counts.device) >> doublings[:, None].clamp(max=62)
    return torch.zeros_like(counts).scatter_add_(1, target, counts)


def resample(counts: Tensor, width: Tensor, new_width: Tensor) -> Tensor:
    """Move counts onto wider bins, as if each bin's values were spread evenly over it.

    The cumulative counts are interpolated at the new edges and rounded: the total stays exact, and nothing moves when
    the new width is the old one or an exact multiple. Counts are (rows, bins) int64, widths (rows,): the present ones
    (0 where only bin 0 is filled), and new ones, none less.
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
    """Counts (n,) of a stretch of a tensor, each value of the sample for all that it stands for.

    The last bin may hold values that are the upper edge of the one before; `amax` and `every` are the sample's.
    """

    counts: NDArray[np.int64]
    width: np.float32
    amax: float
    every: int


def _counted(sample: Sample, width: np.float32, most: int) -> Counted:
    """Count the magnitudes of a sample, none larger than most * width."""
    bins = min(max(int(np.ceil(np.float32(sample.amax) / width)), 1), most)
    counts = _count(sample.values, float(width), bins).numpy()
    if sample.every > 1:
        counts *= sample.every
        counts += _count(sample.rest, float(width), bins).numpy()
    return Counted(counts=counts, width=width, amax=sample.amax, every=sample.every)


def _wider(part: Counted, width: np.float32) -> NDArray[np.int64]:
    """Counts in bins of `width`, the part's own or a power of two times as wide, by which division is exact."""
    times = round(float(width / part.width))
    return part.counts if times == 1 else np.add.reduceat(part.counts, np.arange(0, part.counts.size, times))


def _add_counts(counts: NDArray[np.int64], found: NDArray[np.int64]) -> None:
    """Add counts in place; the last bin takes what lies beyond it."""
    inside = found[: counts.size]
    counts[: inside.size] += inside
    if found.size > counts.size:
        counts[-1] += found[counts.size :].sum()


def count_on_host(values: Tensor, width: float, bins: int) -> Tensor:
    """Count (n,) finite |values| <= bins * width on the CPU, the last bin closed above: (bins,) int64."""
    counts = _count(values, width, bins)
    counts[bins - 1] += counts[bins]
    return counts[:bins]


def _count(values: Tensor, width: float, bins: int) -> Tensor:
    """As `count_on_host`, (bins + 1,); the last one counts values equal to bins * width."""
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
    """Count in blocks that fit the cache, with numpy where it can, which begins sooner than torch."""
    counts, numbers = torch.zeros(bins + 1, dtype=torch.int64), values.float().numpy()
    for start in range(0, numbers.size, _BLOCK):
        block = numbers[start : start + _BLOCK]
        position, index = _MEMORY.position[: block.size], _MEMORY.index[: block.size]
        np.divide(block, np.float32(width), out=position)
        np.copyto(index, np.absolute(position, out=position), casting="unsafe")
        counts += torch.bincount(_MEMORY.tensor[: block.size], minlength=bins + 1)
    return counts


def count_on_device(values: Tensor, width: Tensor, live: Tensor, bins: int) -> Tensor:
    """Count |values|, (rows, n), without waiting for the device: (rows, bins) int64.

    NaN and Inf land anywhere or nowhere. `width` and `live` are (rows,); values beyond bin live - 1 are counted in it.
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
