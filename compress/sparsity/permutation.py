"""Channel permutations that let an N:M mask keep more: a search over the order of a matrix's columns.

An N:M mask cuts the columns into stripes of m and keeps n values of every row of a stripe. Which columns share a
stripe is free as long as the network is permuted to match, and a good order spreads each row's large values over the
stripes (Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021).

The search is simulated annealing over swaps of two columns. Each round pairs the stripes at random and looks at the
m * m swaps of every pair at once; pairs share no stripe, so their gains add up exactly and all pairs may move. What
a stripe would keep with its column i replaced by a column x is, summed over the rows,

    base_i + sum_r max(theta_i(r), x(r)),

where theta_i is the n-th largest of the stripe's other columns and base_i the sum of the n - 1 larger ones. As
max(a, b) = (a + b + |a - b|) / 2, all swaps of a pair are one m-by-m L1 distance matrix (`torch.cdist`), nothing of
the size m * m * rows is ever stored, and only stripes that moved have their theta computed again. A pair takes a swap
(or stays) with a probability proportional to exp(gain / temperature); the temperature sinks to zero over the given
time, and sweeps without chance end in an order that no single swap improves. More time means slower cooling, and on
average a better order; `results/permutation.md` compares it with searching whole groups of stripes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import SparsityError

START_TEMPERATURE = 0.2  # of the gains' standard deviation; hotter starts spend the time on undoing
SWEEP_SHARE = 0.1  # of the time is left for the sweeps without chance


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """What a search found.

    Attributes:
        order: (columns,) int64; column j of the permuted matrix is column order[j] of the given one.
        before, after: sum of the magnitudes that n:m keeps in the given and in the found order.
        bound: what keeping the same share of every row would keep, wherever it stands: no order can do better.
        rounds: rounds of the search.
        seconds: time that it took.
    """

    order: Tensor
    before: float
    after: float
    bound: float
    rounds: int
    seconds: float

    @property
    def gap_closed(self) -> float:
        """Share of the gap between n:m in the given order and the bound that the found order closes."""
        gap = self.bound - self.before
        return (self.after - self.before) / gap if gap > 0 else 0.0


def search_permutation(
    matrix: Tensor, n: int, m: int, *, seconds: float, rounds: int | None = None, seed: int = 0
) -> Permutation:
    """Search an order of the columns in which n:m keeps more magnitude.

    Args:
        matrix: (rows, columns), on any device; the sign does not matter.
        n: values kept of every m, 1 to m - 1.
        m: divides the columns.
        seconds: time limit, over which the search cools down; at least one sweep is made.
        rounds: cool down over this many rounds where they end sooner, which makes the result a function of the seed;
            None = 16 times the cube of the number of stripes.
        seed: of the random pairs and moves.

    Returns:
        An order that keeps at least as much as the given one.

    Raises:
        SparsityError: a shape or pattern that does not fit, or values that are NaN or infinite.
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
    """Sum of the magnitudes that n:m keeps with the columns in `order` (None = as they stand)."""
    magnitudes = matrix.detach().abs() if order is None else matrix.detach().abs()[:, order]
    return _largest(magnitudes.unflatten(1, (-1, m)).movedim(2, 1), n).sum(dtype=torch.float64).item()


def _kept_of_rows(magnitudes: Tensor, count: int) -> float:
    """Sum of every row's `count` largest values: what exceeds the smallest of them, and that one `count` times."""
    least = magnitudes.kthvalue(magnitudes.shape[1] - count + 1, dim=1, keepdim=True).values
    excess = (magnitudes - least).relu().sum(dtype=torch.float64)
    return (excess + count * least.sum(dtype=torch.float64)).item()


class _Stripes:
    """The columns' present order, and for each stripe what a swap needs."""

    def __init__(self, columns: Tensor, n: int, m: int) -> None:
        self.columns = columns  # (columns, rows)
        self.n = n
        self.index = torch.arange(len(columns), device=columns.device).view(-1, m)  # (stripes, m)
        self.sums = columns.sum(1)
        count, rows = len(self.index), columns.shape[1]
        self.base = columns.new_empty(count, m)
        self.theta = columns.new_empty(count, m, rows)
        self.theta_sums = columns.new_empty(count, m)
        self.kept = columns.new_empty(count)
        self.refresh(torch.arange(count, device=columns.device))

    def order(self) -> Tensor:
        """(columns,) the present order, each stripe's columns ascending and stripes by their first column."""
        index = self.index.sort(1).values
        return index[index[:, 0].argsort()].flatten()

    def refresh(self, stripes: Tensor) -> None:
        """Compute base, theta and kept of these stripes again."""
        n, values = self.n, self.columns[self.index[stripes]]
        largest = _largest(values, n + 1)
        total = largest[:n].sum(0).unsqueeze(1)
        theta = torch.where(values >= largest[n - 1].unsqueeze(1), largest[n].unsqueeze(1), largest[n - 1].unsqueeze(1))
        # Without a value of the n largest, the n - 1 others of them stay; else the n - 1 largest.
        base = torch.where(values >= largest[n - 1].unsqueeze(1), total - values, total - largest[n - 1].unsqueeze(1))
        self.theta[stripes], self.theta_sums[stripes] = theta, theta.sum(-1)
        self.base[stripes], self.kept[stripes] = base.sum(-1), total.sum(-1).squeeze(1)

    def gains(self, a: Tensor, b: Tensor) -> Tensor:
        """(pairs, m, m) what swapping column i of stripe a with column j of stripe b brings."""
        columns_a, columns_b = self.index[a], self.index[b]
        into_a = self._replaced(a, columns_b)
        into_b = self._replaced(b, columns_a).transpose(1, 2)
        return into_a + into_b - (self.kept[a] + self.kept[b])[:, None, None]

    def _replaced(self, stripes: Tensor, columns: Tensor) -> Tensor:
        """(pairs, m, m) what the stripe keeps with its column i replaced by columns[:, j]."""
        distance = torch.cdist(self.theta[stripes], self.columns[columns], p=1)
        pair_sums = self.theta_sums[stripes].unsqueeze(2) + self.sums[columns].unsqueeze(1)
        return self.base[stripes].unsqueeze(2) + (pair_sums + distance) / 2

    def move(self, a: Tensor, b: Tensor, gains: Tensor) -> int:
        """Do each pair's best swap where its gain is above 0; returns how many moved."""
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
    """(count, ...) the largest values along axis 1 in descending order: a bubble network of elementwise maxima."""
    values = list(stripes.unbind(1))
    for done in range(count):
        for j in range(len(values) - 1, done, -1):
            values[j - 1], values[j] = torch.maximum(values[j - 1], values[j]), torch.minimum(values[j - 1], values[j])
    return torch.stack(values[:count])


def _anneal(stripes: _Stripes, generator: torch.Generator, most: int, *, start: float, seconds: float) -> int:
    """Rounds of random pairs at a temperature that sinks to zero over the time or the rounds, whichever ends first."""
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
    """Rounds of a tournament in which every stripe meets every other, until no swap gains or the time is up."""
    count, device = len(stripes.index), stripes.index.device
    if count < 2:
        return 0
    players = count + count % 2  # an odd stripe sits out against a player that is not there
    ring, rounds, idle = torch.arange(1, players), 0, 0
    while idle < players - 1 and (time.perf_counter() - start < seconds or rounds < 1):
        table = torch.cat([torch.zeros(1, dtype=ring.dtype), ring])
        a, b = table[: players // 2], table[players // 2 :].flip(0)
        real = (a < count) & (b < count)
        a, b = a[real].to(device), b[real].to(device)
        gains = stripes.gains(a, b)
        threshold = 1e-6 * (stripes.kept[a] + stripes.kept[b])  # what rounding could feign
        idle = 0 if stripes.move(a, b, gains - threshold[:, None, None]) else idle + 1
        ring, rounds = ring.roll(1), rounds + 1
    return rounds
