"""The clipping threshold of least Kullback-Leibler divergence from a tensor's distribution, in closed form.

For a threshold after bin i the reference P is the histogram's first i bins, with all counts beyond added to bin i - 1.
Q is the same i bins without that addition, averaged over quantization levels of i / levels bins each (over the bins in
use: empty ones stay empty). The threshold with the least KL(P, Q) is chosen. This is the method of S. Migacz,
8-bit Inference with TensorRT (GTC 2017), in pytorch-quantization 2.1.3's definition: levels = 128 for signed 8 bits
(127 magnitudes and zero), 256 for unsigned; the first candidate is bin 128; bin 0, which holds the zeros of a ReLU,
is set to the count of bin 1; among equals the widest threshold is chosen.

Computed literally, this takes O(bins) work for each of O(bins) thresholds: minutes for a network. With h the counts,
H_i and T_i their sums below and beyond threshold i, N the sum of all, S_j and n_j the count and the number of bins in
use of level j,

    N * KL_i = sum_{k < i - 1} h_k ln h_k + (h_{i-1} + T_i) ln(h_{i-1} + T_i) - N ln N
               - sum_j S_j ln(S_j / n_j) - T_i ln(S_last / n_last) + N ln H_i

and every sum is a difference of cumulative sums, so a threshold costs O(levels). Level edges lie at j * i / levels:
exact integers after rounding up.

KL is infinite where bin i - 1 is empty and counts beyond are added to it, and undefined where no value lies below the
threshold. pytorch-quantization's argmin takes an undefined one (NaN) for the least; here both are ruled out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.quantization.calibration.amax import START_BIN, live_bins

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
