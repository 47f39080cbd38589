"""Histograms of magnitudes, on the tensor's own device, and the choice of the range `amax` from them.

A histogram has a row for a whole tensor, or one for each channel. The first batch that is not all zero fixes the width
of its bins, largest magnitude / 2048, as pytorch-quantization's does. Larger magnitudes add bins at the upper end; past
`max_bins` neighbouring bins are merged in pairs and the width doubles, so that the resolution stays between range /
8192 and range / 4096. Per-channel rows merge pairs at once. Counts are int64: float32 counts stop growing at
16,777,216.

On a GPU width and range stay tensors, because reading a value would stop the queue; a whole tensor is counted by a CUDA
kernel (`compress.kernels.histogram`). A CPU counts a sample of a large tensor: of each stretch of neighbours one value,
by the same random numbers for every tensor. The largest magnitude is always that of all values.

Clipping trades the error of values beyond `amax` for a smaller step below it, with the semantics of
pytorch-quantization 2.1.3 (Wu et al., arXiv 2004.09602, section 3). Entropy takes the threshold of least
Kullback-Leibler divergence (S. Migacz, 8-bit Inference with TensorRT, GTC 2017). After bin i the reference P is the
first i bins, with all counts beyond added to bin i - 1; Q is the same bins without that addition, averaged over levels
of i / levels bins each (over the bins in use). levels = 128 for signed 8 bits (127 magnitudes and zero), 256 for
unsigned; the first candidate is bin 128; bin 0, which holds the zeros of a ReLU, is set to the count of bin 1; among
equals the widest threshold is chosen.

With h the counts, H_i and T_i their sums below and beyond threshold i, N the sum of all, S_j and n_j the count and the
number of bins in use of level j,

    N * KL_i = sum_{k < i - 1} h_k ln h_k + (h_{i-1} + T_i) ln(h_{i-1} + T_i) - N ln N
               - sum_j S_j ln(S_j / n_j) - T_i ln(S_last / n_last) + N ln H_i

and every sum is a difference of cumulative sums, so a threshold costs O(levels). Level edges lie at j * i / levels:
exact integers after rounding up. KL is infinite where bin i - 1 is empty and counts beyond are added to it, and
undefined where no value lies below the threshold: both are ruled out (pytorch-quantization's argmin takes NaN).
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
from torch.nn.functional import pad

from compress.errors import CalibrationError
from compress.kernels.histogram import Watch, collect_amax, takes

# First bin that `mse` and `entropy` may clip at.
START_BIN = 128

# Tolerance of `mse` in calibration (0.0004 dB): nearly equal ranges differ by engine in the last digits.
NEAR_TIE = 1e-4

_GATHERED = 1 << 18  # cumulative sums looked up at a time: 2 MiB of float64
_COARSE = 16  # candidates from one to the next that `mse` looks at first


def as_rows(x: Tensor, axis: int | None) -> Tensor:
    """View `x` as (1, n), or along `axis` as (C, n), in the order in which it lies in memory, which saves copies."""
    if axis is None:
        return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(1, -1)
    return x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def row_amax(rows: Tensor) -> Tensor:
    """The largest magnitude of each row of (C, n), as float32 (C,); NaN where a row holds one."""
    low, high = (v[None] for v in rows.aminmax()) if len(rows) == 1 else rows.aminmax(dim=1)
    return torch.maximum(-low, high).float()


def live_bins(counts: Tensor) -> Tensor:
    """The bins up to the last that holds something, at least 1: int64 (...) for counts (..., bins)."""
    position = torch.arange(1, counts.shape[-1] + 1, device=counts.device)
    return ((counts > 0) * position).amax(-1).clamp(min=1)


def percentile_amax(counts: Tensor, bin_width: Tensor, percentile: float) -> Tensor:
    """The magnitude that `percentile` percent of the values lie below, to within a bin.

    It is the lower edge of the bin in which the cumulative count reaches that share, as in pytorch-quantization, but
    never less than one bin (a tensor that is 99.99 % zeros would get amax 0), and 100 clips nothing. Counts are
    (..., bins) with bin 0 at zero, `bin_width` and the result (...), float32.
    """
    check_percentile(percentile)
    cumulative = counts.cumsum(-1).double()
    short = (cumulative < cumulative[..., -1:] * (percentile / 100)).sum(-1)
    bins = live_bins(counts) if percentile == 100 else short.clamp(min=1)
    return (bins * bin_width.double()).float()


def check_percentile(percentile: float) -> None:
    if not 0 < percentile <= 100:
        raise CalibrationError(
            f"percentile is {percentile}: it is the share of magnitudes within amax, in percent, above 0 and up to "
            "100; 99.99 is usual"
        )


def mse_amax(
    counts: Tensor,
    bin_width: Tensor,
    *,
    num_bits: int = 8,
    unsigned: bool = False,
    start_bin: int = START_BIN,
    tolerance: float = 0.0,
) -> Tensor:
    """The `amax` at which quantizing changes the values least, in mean square.

    Every value counts as the centre of its bin, and the candidates are the centres of bins from `start_bin`
    to the last in use. Of candidates whose error is within `tolerance`, a share of the
    least, the smallest is chosen, so that values that differ in their last digits get the same range. Counts are
    (..., bins) with bin 0 at zero, `bin_width` and the result (...), float32.
    """
    bound = 2 ** (num_bits - (not unsigned)) - 1
    live = live_bins(counts)
    weights = counts.reshape(-1, counts.shape[-1])[:, : int(live.max())].double()
    last = live.reshape(-1, 1) - 0.5
    grid = torch.arange(weights.shape[1], dtype=torch.float64, device=counts.device)[start_bin:] + 0.5
    grid = grid[_first_candidate(weights, grid, last, bound, tolerance) :]
    errors = _squared_errors(weights, grid[None], bound).masked_fill(grid > last, torch.inf)
    candidates = torch.cat([grid.expand(len(weights), -1), last], 1)
    errors = torch.cat([errors, _squared_errors(weights, last, bound)], 1)
    good = errors <= errors.amin(1, keepdim=True) * (1 + tolerance)
    chosen = candidates.gather(1, good.int().argmax(1, keepdim=True)).reshape(live.shape)
    return (chosen * bin_width.double()).float()


def _first_candidate(weights: Tensor, grid: Tensor, last: Tensor, bound: int, tolerance: float) -> int:
    """The first candidate that may be the best of a row: those before it clip more than another loses in all.

    Weights are (rows, bins) float64, `grid` the candidates (t,), `last` (rows, 1) the centre of the last bin in use.
    """
    if len(grid) < 2 * _COARSE:
        return 0
    coarse = grid[::_COARSE]
    least = _squared_errors(weights, coarse[None], bound).masked_fill(coarse > last, torch.inf).amin(1, keepdim=True)
    centers = torch.arange(weights.shape[1], dtype=torch.float64, device=weights.device) + 0.5
    moments = (weights, weights * centers, weights * centers.square())
    number, mass, square = (m.sum(1, keepdim=True) - m.cumsum(1)[:, grid.long()] for m in moments)  # beyond each
    clipped = square - 2 * grid * mass + grid.square() * number
    possible = clipped <= least * (1 + tolerance) + 1e-12 * moments[2].sum(1, keepdim=True)  # sums are rounded
    return int(possible.any(0).int().argmax())


def _squared_errors(counts: Tensor, candidates: Tensor, bound: int) -> Tensor:
    """The squared change of all values when quantized with each amax, (rows, t), in units of the bins' width squared.

    With x_k the centre of bin k and s the scale, the values of the bins up to edge e_j are rounded to level j at most.
    The sum over bins of c_k (q_k s - x_k)^2 therefore consists of cumulative sums of c and c x at the edges, and an
    amax costs as many operations as there are levels. Counts are (rows, bins) float64; candidates, amax in bins,
    (rows, t) or (1, t).
    """
    rows, bins = counts.shape
    centers = torch.arange(bins, dtype=torch.float64, device=counts.device) + 0.5
    number, mass = (pad(values.cumsum(1), (1, 0)) for values in (counts, counts * centers))
    level = torch.arange(bound, dtype=torch.float64, device=counts.device)
    total = (counts * centers.square()).sum(1, keepdim=True)
    parts = [counts.new_empty(rows, 0)]
    for scale in (candidates / bound).split(max(1, _GATHERED // (rows * bound)), dim=1):
        edges = ((level + 0.5) * scale[..., None] - 0.5).ceil_().clamp_(0, bins).long().flatten(1).expand(rows, -1)
        below, mass_below = (values.gather(1, edges).view(rows, -1, bound) for values in (number, mass))
        square = bound**2 * number[:, -1:] - below @ (2 * level + 1)
        product = bound * mass[:, -1:] - mass_below.sum(2)
        parts.append((square * scale - 2 * product) * scale + total)
    return torch.cat(parts, 1).clamp_(min=0)


_TIE = 1e-12  # divergences closer than this differ by rounding alone
_PAIRS = 1 << 10  # (row, threshold) pairs weighed at a time: 1 MiB for each of their (pairs, levels) tables
_GPU_PAIRS = 1 << 16


def entropy_amax(
    counts: Tensor,
    bin_width: Tensor,
    *,
    num_bits: int = 8,
    unsigned: bool = False,
    start_bin: int = START_BIN,
) -> Tensor:
    """The `amax` that changes the distribution of magnitudes least.

    Counts are (..., bins) with bin 0 at zero, `bin_width` and the result (...), float32; `start_bin` is the first
    threshold, in bins. If fewer are in use, nothing is clipped.
    """
    live = live_bins(counts).reshape(-1)
    thresholds = torch.arange(int(live.max()) + 1, device=counts.device)[start_bin:]
    chosen = live
    if len(thresholds):
        histogram = counts.reshape(-1, counts.shape[-1])[:, : max(2, int(live.max()))].double()
        divergence = kl_divergences(histogram, thresholds, levels=2 ** (num_bits - (not unsigned)))
        divergence.masked_fill_(thresholds > live[:, None], torch.inf)
        least = divergence.amin(1, keepdim=True)
        widest = ((divergence <= least + _TIE) * thresholds).amax(1)
        chosen = torch.where(least[:, 0].isfinite(), widest, live)
    return (chosen.reshape(bin_width.shape) * bin_width.double()).float()


def kl_divergences(histogram: Tensor, thresholds: Tensor, *, levels: int) -> Tensor:
    """KL(P, Q), in nats, of clipping each row of a histogram at each threshold, (rows, t) float64.

    The histogram is (rows, bins) float64, at least 2 bins; `thresholds` (t,) int64 are the numbers of bins that are not
    clipped; `levels` is a power of two. Inf where the divergence is infinite or undefined.
    """
    h = histogram.clone()
    h[:, 0] = h[:, 1]
    sums = _Sums(h)
    at_edge = h[:, thresholds - 1]
    below = sums.mass[:, thresholds]
    beyond = sums.mass[:, -1:] - below
    divergence = torch.full_like(below, torch.inf)
    rows, columns = ((below > 0) & ((at_edge > 0) | (beyond == 0))).nonzero(as_tuple=True)
    pairs = _PAIRS if h.device.type == "cpu" else _GPU_PAIRS
    for r, c in zip(rows.split(pairs), columns.split(pairs), strict=True):
        divergence[r, c] = _divergence(sums, r, thresholds[c], at_edge[r, c], beyond[r, c], levels)
    return divergence


class _Sums:
    """Cumulative sums over the bins of (rows, bins), each (rows, bins + 1) with a leading zero."""

    def __init__(self, h: Tensor) -> None:
        self.mass = pad(h.cumsum(1), (1, 0))
        self.used = pad((h > 0).double().cumsum(1), (1, 0))
        self.self_information = pad(torch.xlogy(h, h).cumsum(1), (1, 0))


def _divergence(sums: _Sums, row: Tensor, threshold: Tensor, at_edge: Tensor, beyond: Tensor, levels: int) -> Tensor:
    """The closed form above for (row, threshold) pairs; all arguments and the result are (pairs,)."""
    offset = row * sums.mass.shape[1]
    level = torch.arange(levels + 1, device=row.device)
    edges = (level * threshold[:, None] + levels - 1) // levels + offset[:, None]  # (pairs, levels + 1)
    mass = sums.mass.take(edges).diff(dim=1)
    mean = mass / sums.used.take(edges).diff(dim=1).clamp_(min=1)
    last = mean.gather(1, ((threshold - 1) * levels // threshold)[:, None])[:, 0]
    total = sums.mass[row, -1]
    reference = sums.self_information.take(offset + threshold - 1) + torch.xlogy(at_edge + beyond, at_edge + beyond)
    quantized = torch.xlogy(mass, mean).sum(1) + torch.xlogy(beyond, last)
    return (reference - quantized) / total - total.log() + sums.mass.take(offset + threshold).log()


# Elements that are searched for the largest, and then sampled while the cache holds them.
LOOK = 1 << 18

# Values of a whole tensor that are counted at least, and one value in so many that is counted at least, on a CPU.
_SAMPLED, _THINNEST = 1 << 17, 13
# Stretches after which the random numbers of the sample repeat: a prime, which no image width divides.
_STRATA = 2503


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


def drawn_from(values: Tensor, *, start: int = 0, total: int | None = None, signed: bool = True) -> Sample:
    """Sample (n,) values from place `start` of a tensor of `total` (None = n), and find the largest magnitude.

    No column or channel is preferred. The samples of all stretches of a tensor together are the tensor's.
    `signed` is False if none is negative, or the largest is to be found.
    """
    numbers = values.float().numpy()  # whose operations begin sooner than those of torch, and use one thread
    total = numbers.size if total is None else total
    every = _every(total)
    if every < 2:
        largest_of_all = float(largest_magnitude(numbers, signed=signed))
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
    largest = [largest_magnitude(part, signed=signed) for part in (numbers[:head], numbers[tail:]) if part.size]
    rows, result = numbers[head:tail].reshape(-1, period), drawn[before.size : drawn.size - after.size]
    for i in range(0, len(rows), step := max(1, LOOK // period)):
        part = rows[i : i + step]
        largest.append(largest_magnitude(part, signed=signed))
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


# Bins that the first batch is spread over.
BINS = 2048

# Bins of one tensor before neighbours are merged.
MAX_BINS = 8192

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
            found, times = whole.counts, round(float(width / whole.width))  # a power of two: its division is exact
            _add_counts(counts, found if times == 1 else np.add.reduceat(found, np.arange(0, found.size, times)))
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
    counts = count_on_host(sample.values, float(width), bins).numpy()
    if sample.every > 1:
        counts *= sample.every
        counts += count_on_host(sample.rest, float(width), bins).numpy()
    return Counted(counts=counts, width=width, amax=sample.amax, every=sample.every)


def _add_counts(counts: NDArray[np.int64], found: NDArray[np.int64]) -> None:
    """Add counts in place; the last bin takes what lies beyond it."""
    inside = found[: counts.size]
    counts[: inside.size] += inside
    if found.size > counts.size:
        counts[-1] += found[counts.size :].sum()


def count_on_host(values: Tensor, width: float, bins: int) -> Tensor:
    """Count (n,) finite |values| <= bins * width on the CPU, (bins + 1,) int64; the last ones equal bins * width."""
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
