"""Searches an order of a matrix's columns in which an n:m mask keeps more magnitude, by simulated annealing.

The task is that of Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import SparsityError

START_TEMPERATURE = 0.2  # in standard deviations of the gains; hotter starts spend the time on undoing swaps
SWEEP_SHARE = 0.1  # share of the time that is reserved for the deterministic sweeps


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Result of a search.

    Attributes:
        order: (columns,) int64; column j of the permuted matrix is column order[j] of the given one.
        before, after: sum of the magnitudes that n:m keeps.
        bound: sum of every row's largest magnitudes; no order can keep more.
    """

    order: Tensor
    before: float
    after: float
    bound: float
    rounds: int
    seconds: float

    @property
    def gap_closed(self) -> float:
        """Share of the gap from `before` to `bound` that is closed."""
        gap = self.bound - self.before
        return (self.after - self.before) / gap if gap > 0 else 0.0


def search_permutation(
    matrix: Tensor, n: int, m: int, *, seconds: float, rounds: int | None = None, seed: int = 0
) -> Permutation:
    """Search an order of the columns in which n:m keeps at least as much magnitude.

    The sign of the matrix does not matter; `m` divides its columns. The search cools down over `seconds`, with at least
    one sweep, or over `rounds` if they end sooner, which makes the result a function of the seed; None = 16 times the
    cube of the number of stripes.

    Raises:
        SparsityError: the shape does not fit the pattern, or values are NaN or infinite.
    """
    if matrix.ndim != 2 or not 1 <= n < m or matrix.shape[1] % m or 0 in matrix.shape:
        raise SparsityError(f"{n}:{m} cannot order the columns of a {tuple(matrix.shape)} matrix: m must divide them")
    if not bool(torch.isfinite(matrix).all()):
        raise SparsityError("the matrix holds NaN or infinite values: no order of its columns is better than another")
    start = time.perf_counter()
    columns = matrix.detach().abs().float().t().contiguous()
    stripes = _Stripes(columns, n, m)
    generator = torch.Generator().manual_seed(seed)
    most = 16 * len(stripes.index) ** 3 if rounds is None else rounds
    done = _anneal(stripes, generator, most, start=start, seconds=seconds * (1 - SWEEP_SHARE))
    done += _sweep(stripes, start=start, seconds=seconds)
    before, after = kept_by_order(matrix, n, m), kept_by_order(matrix, n, m, order=stripes.order())
    identity = torch.arange(matrix.shape[1], device=matrix.device)
    return Permutation(
        order=stripes.order() if after > before else identity,
        before=before,
        after=max(before, after),
        bound=_kept_of_rows(matrix.detach().abs(), matrix.shape[1] // m * n),
        rounds=done,
        seconds=time.perf_counter() - start,
    )


def kept_by_order(matrix: Tensor, n: int, m: int, *, order: Tensor | None = None) -> float:
    """Magnitude that n:m keeps with the columns in `order` (None = as given)."""
    magnitudes = matrix.detach().abs() if order is None else matrix.detach().abs()[:, order]
    return _largest(magnitudes.unflatten(1, (-1, m)).movedim(2, 1), n).sum(dtype=torch.float64).item()


def _kept_of_rows(magnitudes: Tensor, count: int) -> float:
    """Sum of every row's `count` largest values."""
    least = magnitudes.kthvalue(magnitudes.shape[1] - count + 1, dim=1, keepdim=True).values
    excess = (magnitudes - least).relu().sum(dtype=torch.float64)
    return (excess + count * least.sum(dtype=torch.float64)).item()


class _Stripes:
    """The columns in stripes of m, with the sums that rate a swap.

    A stripe whose column i becomes x keeps base_i + sum_r max(theta_i(r), x(r)); theta_i is the n-th largest of its
    other columns, base_i the sum of the n - 1 larger ones. max(a, b) = (a + b + |a - b|) / 2, so all swaps are one L1
    distance.

    `columns` is (columns, rows); `index`, `base` and `theta_sums` are (stripes, m), `theta` (stripes, m, rows), `kept`
    (stripes,).
    """

    def __init__(self, columns: Tensor, n: int, m: int) -> None:
        self.columns = columns
        self.n = n
        self.index = torch.arange(len(columns), device=columns.device).view(-1, m)
        self.sums = columns.sum(1)
        count, rows = len(self.index), columns.shape[1]
        self.base = columns.new_empty(count, m)
        self.theta = columns.new_empty(count, m, rows)
        self.theta_sums = columns.new_empty(count, m)
        self.kept = columns.new_empty(count)
        self.refresh(torch.arange(count, device=columns.device))

    def order(self) -> Tensor:
        """(columns,), each stripe ascending, stripes by their first column."""
        index = self.index.sort(1).values
        return index[index[:, 0].argsort()].flatten()

    def refresh(self, stripes: Tensor) -> None:
        """Recompute base, theta and kept of these stripes."""
        n, values = self.n, self.columns[self.index[stripes]]
        largest = _largest(values, n + 1)
        total = largest[:n].sum(0).unsqueeze(1)
        theta = torch.where(values >= largest[n - 1].unsqueeze(1), largest[n].unsqueeze(1), largest[n - 1].unsqueeze(1))
        # Without a value of the n largest, the n - 1 others of them stay; else the n - 1 largest.
        base = torch.where(values >= largest[n - 1].unsqueeze(1), total - values, total - largest[n - 1].unsqueeze(1))
        self.theta[stripes], self.theta_sums[stripes] = theta, theta.sum(-1)
        self.base[stripes], self.kept[stripes] = base.sum(-1), total.sum(-1).squeeze(1)

    def gains(self, a: Tensor, b: Tensor) -> Tensor:
        """(pairs, m, m) gain of swapping column i of a with j of b."""
        columns_a, columns_b = self.index[a], self.index[b]
        into_a = self._replaced(a, columns_b)
        into_b = self._replaced(b, columns_a).transpose(1, 2)
        return into_a + into_b - (self.kept[a] + self.kept[b])[:, None, None]

    def _replaced(self, stripes: Tensor, columns: Tensor) -> Tensor:
        """(pairs, m, m) kept sum with column i replaced by columns[:, j]."""
        distance = torch.cdist(self.theta[stripes], self.columns[columns], p=1)
        pair_sums = self.theta_sums[stripes].unsqueeze(2) + self.sums[columns].unsqueeze(1)
        return self.base[stripes].unsqueeze(2) + (pair_sums + distance) / 2

    def move(self, a: Tensor, b: Tensor, gains: Tensor) -> int:
        """Make each pair's best swap if it gains; return how many."""
        m = self.index.shape[1]
        best = gains.flatten(1).max(1)
        moving = best.values > 0
        a, b, swap = a[moving], b[moving], best.indices[moving]
        i, j = swap // m, swap % m
        self.index[a, i], self.index[b, j] = self.index[b, j], self.index[a, i]
        if len(a):
            self.refresh(torch.cat([a, b]))
        return len(a)


def _largest(stripes: Tensor, count: int) -> Tensor:
    """(count, ...) largest along axis 1, descending, by a bubble network."""
    values = list(stripes.unbind(1))
    for done in range(count):
        for j in range(len(values) - 1, done, -1):
            values[j - 1], values[j] = torch.maximum(values[j - 1], values[j]), torch.minimum(values[j - 1], values[j])
    return torch.stack(values[:count])


def _anneal(stripes: _Stripes, generator: torch.Generator, most: int, *, start: float, seconds: float) -> int:
    """Make rounds of random pairs while the temperature falls to zero; return how many."""
    count, device = len(stripes.index), stripes.index.device
    if count < 2:
        return 0
    temperature: Tensor | None = None
    for done in range(most):
        progress = max((time.perf_counter() - start) / seconds, done / most)
        if progress >= 1:
            return done
        a, b = torch.randperm(count, generator=generator)[: count // 2 * 2].view(2, -1).to(device)
        gains = stripes.gains(a, b)
        if temperature is None:
            temperature = START_TEMPERATURE * gains.std()
        # A sample of the Boltzmann distribution over the swaps and staying: the largest after Gumbel noise.
        noise = -torch.log(-torch.log(torch.rand(len(a), gains[0].numel() + 1, generator=generator).clamp(1e-12)))
        scaled = (temperature * (1 - progress)) * noise.to(device)
        stripes.move(a, b, gains + (scaled[:, :-1] - scaled[:, -1:]).view_as(gains))
    return most


def _sweep(stripes: _Stripes, *, start: float, seconds: float) -> int:
    """Let every stripe meet every other until no swap gains or time is up; return the rounds."""
    count, device = len(stripes.index), stripes.index.device
    if count < 2:
        return 0
    players = count + count % 2  # with an odd number, the stripe that meets the player too many rests
    ring, rounds, idle = torch.arange(1, players), 0, 0
    while idle < players - 1 and (time.perf_counter() - start < seconds or rounds < 1):
        table = torch.cat([torch.zeros(1, dtype=ring.dtype), ring])
        a, b = table[: players // 2], table[players // 2 :].flip(0)
        real = (a < count) & (b < count)
        a, b = a[real].to(device), b[real].to(device)
        gains = stripes.gains(a, b)
        threshold = 1e-6 * (stripes.kept[a] + stripes.kept[b])  # rounding errors could look like smaller gains
        idle = 0 if stripes.move(a, b, gains - threshold[:, None, None]) else idle + 1
        ring, rounds = ring.roll(1), rounds + 1
    return rounds
