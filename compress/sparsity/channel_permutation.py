"""Channel permutation of a network that computes the same: groups from its graph, and an order for each.

Searches an order of a matrix's columns in which an n:m mask keeps more magnitude, by simulated annealing.

The task is that of Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import ModelError, SparsityError
from compress.graph.compare import own_copy
from compress.graph.inputs import Inputs, as_inputs, flat_tensors, run_with
from compress.graph.trace import trace
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec
from compress.sparsity.eligibility import chosen_layers, eligibility, weight_of
from compress.sparsity.groups import Channels, Use, channels_of, permute_index
from compress.support.process import restored
from compress.support.progress import NoProgress, Progress

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
        gap = self.bound - self.before
        return (self.after - self.before) / gap if gap > 0 else 0.0


def search_permutation(
    matrix: Tensor, n: int, m: int, *, seconds: float, rounds: int | None = None, seed: int = 0
) -> Permutation:
    """Search an order of the columns in which n:m keeps at least as much magnitude.

    The sign of the matrix does not matter; `m` divides its columns. The search cools down over `seconds`, with at least
    one sweep, or over `rounds` if they end sooner, which makes the result a function of the seed; None = 16 times the
    cube of the number of stripes.
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


ROUND_COST = 200_000  # fixed cost of a group, in elements, so that small groups get time too
TOLERANCE = 1e-4  # share of the largest output: float32 sums in another order differ by far less, a wrong order by more


@dataclass(frozen=True, kw_only=True)
class PermutedLayer:
    """Effect of the permutation on a layer.

    Attributes:
        searched: number of them whose order was searched for this layer (and perhaps others).
        before, after: share of the weight's magnitude that the pattern keeps.
        reason: why the rest was not searched; "" if all were.
    """

    layer: str
    channels: int
    searched: int
    before: float
    after: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class PermutationReport:
    """Outcome of a permutation search.

    Attributes:
        rows: one for every layer that the pattern masks; empty if refused.
        refused: why nothing was permuted; "" if the network was permuted.
    """

    rows: tuple[PermutedLayer, ...] = ()
    groups: int = 0
    seconds: float = 0.0
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Channels that may trade places, and the first column that holds them in each layer to be masked."""

    classes: list[int]
    consumers: dict[str, int]


def permute_channels(
    model: nn.Module, spec: SparsitySpec, *, example_inputs: Inputs, progress: Progress | None = None
) -> PermutationReport:
    """Reorder channels, in place, so that the pattern keeps more; the model computes the same.

    The model is dense and float; its parameters keep their identity, so optimizers stay valid. `progress` gets the
    share of the gap that the order of each group closes.
    """
    progress = progress or NoProgress()
    start = time.perf_counter()
    pattern = check_sparsity_spec(spec)
    if pattern.kind != "nm":
        raise SparsityError(f"a permutation helps n:m patterns only, not {spec.pattern!r}")
    _check_plain(model)
    layers = chosen_layers(model, spec, eligibility(model, spec, example_inputs=example_inputs))
    try:
        graph_module = trace(model, example_inputs)
    except ModelError as error:
        raise SparsityError(f"channels cannot be permuted: {error}") from error
    inputs = as_inputs(example_inputs)
    channels = channels_of(graph_module, inputs, owner=model)
    weights = {path: weight_of(module).detach() for path, module in layers.items()}
    uses = {use.path.removesuffix(".weight"): use for use in channels.uses.values() if use.role == "in"}
    groups = _groups(channels, {path: uses[path] for path in layers if path in uses}, pattern.m)
    before = _shares(weights, pattern)

    head = time.perf_counter() - start  # the report and the check at the end take about as long
    seconds = max(spec.permute_seconds - 2 * head, spec.permute_seconds / 2)
    moves = _search(groups, weights, pattern, seconds=seconds, seed=spec.seed, progress=progress)
    _apply(model, channels, moves)
    if not _same(graph_module, model, inputs):
        _apply(model, channels, {source: target for target, source in moves.items()})
        raise SparsityError(
            "the permuted model computes something else, so the permutation was undone: its forward uses channels by "
            "number, which the graph does not show; set sparsity.permute to false"
        )
    rows = _report(weights, channels, uses, groups, before, _shares(weights, pattern), pattern.m)
    return PermutationReport(rows=rows, groups=len(groups), seconds=time.perf_counter() - start)


def _search(
    groups: list[_Group], weights: dict[str, Tensor], pattern: Pattern, *, seconds: float, seed: int, progress: Progress
) -> dict[int, int]:
    """Search all groups in threads of one core; return the class whose content each class receives."""
    if not groups:
        return {}
    cores = torch.get_num_threads()
    workers = 1 if next(iter(weights.values())).is_cuda else min(cores, len(groups))
    costs = {
        i: sum(weights[path][:, 0].numel() for path in group.consumers) * len(group.classes) + ROUND_COST
        for i, group in enumerate(groups)
    }
    order = sorted(costs, key=lambda i: -costs[i])
    deadline = time.perf_counter() + seconds

    def work(place: int) -> Permutation:
        left = max(0.01, deadline - time.perf_counter())
        i, waiting = order[place], sum(costs[j] for j in order[place:])
        columns = [
            _columns(weights[path], first, len(groups[i].classes)) for path, first in groups[i].consumers.items()
        ]
        limit = left * min(1.0, workers * costs[i] / waiting)
        return search_permutation(torch.cat(columns), pattern.n, pattern.m, seconds=limit, seed=seed + i)

    moves: dict[int, int] = {}
    progress.start("permute", len(groups))
    with _threads(max(1, cores // workers)), ThreadPoolExecutor(workers) as pool:
        for i, found in zip(order, pool.map(work, range(len(order))), strict=True):
            classes = groups[i].classes
            moves.update({classes[k]: classes[j] for k, j in enumerate(found.order.tolist())})
            progress.advance("permute", gap_closed=found.gap_closed)
    progress.finish("permute")
    return moves


def _threads(count: int) -> AbstractContextManager[None]:
    return restored(torch.get_num_threads, torch.set_num_threads, count)


def _check_plain(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise SparsityError(f"{path or 'the model'} is parametrized already: permute channels before masking")
        if getattr(module, "is_quantizer", False):
            raise SparsityError(f"{path} is a quantizer: permute channels before quantizing")


def _groups(channels: Channels, uses: dict[str, Use], m: int) -> list[_Group]:
    """Groups that a layer to be masked consumes at an offset that is a multiple of m."""
    pinned = channels.pinned()
    classes = {path: channels.classes(use.numbers).tolist() for path, use in uses.items()}
    places = {path: {number: i for i, number in reversed(list(enumerate(x)))} for path, x in classes.items()}
    groups = []
    for group in channels.interchangeable():
        if len(group) <= m or len(group) % m or any(c in pinned for c in group):
            continue
        consumers = {}
        for path, numbers in classes.items():
            first = places[path].get(group[0])
            if first is not None and first % m == 0 and numbers[first : first + len(group)] == group:
                consumers[path] = first
        if consumers:
            groups.append(_Group(classes=group, consumers=consumers))
    return groups


def _columns(weight: Tensor, first: int, count: int) -> Tensor:
    rows = weight[:, first : first + count].abs().movedim(1, -1).flatten(0, -2).float()
    return rows / rows.mean().clamp_min(torch.finfo(torch.float32).tiny)


def _shares(weights: dict[str, Tensor], pattern: Pattern) -> dict[str, float]:
    shares = {}
    with _threads(1):
        for path, weight in weights.items():
            columns = weight.movedim(1, -1).flatten(0, -2)
            total = columns.abs().sum(dtype=torch.float64).item()
            shares[path] = kept_by_order(columns, pattern.n, pattern.m) / total if total else 1.0
    return shares


def _apply(model: nn.Module, channels: Channels, moves: dict[int, int]) -> None:
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    with torch.no_grad():
        for use in channels.uses.values():
            classes = channels.classes(use.numbers)
            index = permute_index(classes, moves)
            tensor = tensors[use.path]
            part = tensor if use.rows is None else tensor[use.rows[0] : use.rows[1]]
            part.copy_(part.index_select(use.axis, index.to(tensor.device)))


def _same(reference: nn.Module, model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        left = flat_tensors(reference(*inputs))
        right = flat_tensors(run_with(own_copy(model), inputs))
    return len(left) == len(right) and all(
        a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(a.abs().max()))
        for a, b in zip(left, right, strict=True)
    )


def _report(
    weights: dict[str, Tensor],
    channels: Channels,
    uses: dict[str, Use],
    groups: list[_Group],
    before: dict[str, float],
    after: dict[str, float],
    m: int,
) -> tuple[PermutedLayer, ...]:
    pinned = channels.pinned()
    searched = {path: {c for g in groups if path in g.consumers for c in g.classes} for path in weights}
    rows = []
    for path, weight in weights.items():
        numbers = channels.classes(uses[path].numbers).tolist() if path in uses else []
        rest = [c for c in dict.fromkeys(numbers) if c not in searched[path]]
        rows.append(
            PermutedLayer(
                layer=path,
                channels=weight.shape[1],
                searched=sum(c in searched[path] for c in numbers),
                before=before[path],
                after=after[path],
                reason=_why(rest, pinned, m) if path in uses else "the graph does not call it as a layer",
            )
        )
    return tuple(rows)


def _why(rest: Iterable[int], pinned: dict[int, str], m: int) -> str:
    apart = f"are in no whole groups of {m} that may trade places"
    return "; ".join(dict.fromkeys(pinned.get(c, apart) for c in rest))
