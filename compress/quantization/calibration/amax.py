"""Choices of the range `amax`: the largest magnitude, a percentile, or the one of least error.

Clipping trades the error of values beyond `amax` for a smaller step below it. All but the largest magnitude choose a
bin of a histogram of magnitudes, with the semantics of pytorch-quantization 2.1.3 (Wu et al., arXiv 2004.09602, section
3).

Entropy takes the threshold of least Kullback-Leibler divergence (S. Migacz, 8-bit Inference with TensorRT, GTC 2017).
After bin i the reference P is the first i bins, with all counts beyond added to bin i - 1; Q is the same bins without
that addition, averaged over levels of i / levels bins each (over the bins in use). levels = 128 for signed 8 bits (127
magnitudes and zero), 256 for unsigned; the first candidate is bin 128; bin 0, which holds the zeros of a ReLU, is set
to the count of bin 1; among equals the widest threshold is chosen.

With h the counts, H_i and T_i their sums below and beyond threshold i, N the sum of all, S_j and n_j the count and the
number of bins in use of level j,

    N * KL_i = sum_{k < i - 1} h_k ln h_k + (h_{i-1} + T_i) ln(h_{i-1} + T_i) - N ln N
               - sum_j S_j ln(S_j / n_j) - T_i ln(S_last / n_last) + N ln H_i

and every sum is a difference of cumulative sums, so a threshold costs O(levels). Level edges lie at j * i / levels:
exact integers after rounding up. KL is infinite where bin i - 1 is empty and counts beyond are added to it, and
undefined where no value lies below the threshold: both are ruled out (pytorch-quantization's argmin takes NaN for the
least).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.errors import CalibrationError

START_BIN = 128
"""First bin that `mse` and `entropy` may clip at."""

NEAR_TIE = 1e-4
"""Tolerance of `mse` in calibration (0.0004 dB): nearly equal ranges differ by engine in the last digits."""

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
    stride: int = 1,
    tolerance: float = 0.0,
) -> Tensor:
    """The `amax` at which quantizing changes the values least, in mean square.

    Every value counts as the centre of its bin, and the candidates are the centres of bins `start_bin`,
    start_bin + stride, ... and of the last bin in use. Of candidates whose error is within `tolerance`, a share of the
    least, the smallest is chosen, so that values that differ in their last digits get the same range. Counts are
    (..., bins) with bin 0 at zero, `bin_width` and the result (...), float32.
    """
    bound = 2 ** (num_bits - (not unsigned)) - 1
    live = live_bins(counts)
    weights = counts.reshape(-1, counts.shape[-1])[:, : int(live.max())].double()
    last = live.reshape(-1, 1) - 0.5
    grid = torch.arange(weights.shape[1], dtype=torch.float64, device=counts.device)[start_bin::stride] + 0.5
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
    stride: int = 1,
) -> Tensor:
    """The `amax` that changes the distribution of magnitudes least.

    Counts are (..., bins) with bin 0 at zero, `bin_width` and the result (...), float32; `start_bin` is the first
    threshold, in bins. If fewer are in use, nothing is clipped.
    """
    live = live_bins(counts).reshape(-1)
    thresholds = torch.arange(int(live.max()) + 1, device=counts.device)[start_bin::stride]
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
