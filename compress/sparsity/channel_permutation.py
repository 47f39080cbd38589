"""Channel permutation of a network that computes the same: groups from its graph, and an order for each."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import ModelError, SparsityError
from compress.graph.inputs import Inputs, as_inputs, flat_tensors, run_with
from compress.graph.trace import trace
from compress.sparsity.channel_classes import Channels, Use, permute_index
from compress.sparsity.eligibility import chosen_layers, eligibility, weight_of
from compress.sparsity.groups import channels_of
from compress.sparsity.permutation_search import Permutation, kept_by_order, search_permutation
from compress.sparsity.spec import Pattern, SparsitySpec, check_sparsity_spec
from compress.support.progress import NoProgress, Progress

ROUND_COST = 200_000  # fixed cost of a group, in elements, so that small groups get time too
TOLERANCE = 1e-4  # share of the largest output: float32 sums in another order differ by far less, a wrong order by more


@dataclass(frozen=True, kw_only=True)
class PermutedLayer:
    """Effect of the permutation on a layer.

    Attributes:
        channels: number of its input channels.
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
        groups: number of groups that were searched.
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

    Raises:
        SparsityError: the model is masked or quantized, cannot be traced, or would compute something else (it is
            restored).
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
    channels = channels_of(graph_module, inputs)
    weights = {path: weight_of(module).detach() for path, module in layers.items()}
    uses = {use.path.removesuffix(".weight"): use for use in channels.uses.values() if use.role == "in"}
    _pin_constants(channels, model)
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
    costs = {i: _cost(group, weights) for i, group in enumerate(groups)}
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


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit torch's threads, also in Python threads that start inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_plain(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise SparsityError(f"{path or 'the model'} is parametrized already: permute channels before masking")
        if getattr(module, "is_quantizer", False):
            raise SparsityError(f"{path} is a quantizer: permute channels before quantizing")


def _pin_constants(channels: Channels, model: nn.Module) -> None:
    """Pin channels that meet constants of the trace, which cannot be permuted."""
    own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    for key, use in list(channels.uses.items()):
        if use.path not in own:
            channels.pin(use.numbers, f"meet the constant {use.path}")
            del channels.uses[key]


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
    """(rows, count) magnitudes of input channels over their mean."""
    rows = weight[:, first : first + count].abs().movedim(1, -1).flatten(0, -2).float()
    return rows / rows.mean().clamp_min(torch.finfo(torch.float32).tiny)


def _cost(group: _Group, weights: dict[str, Tensor]) -> int:
    return sum(weights[path][:, 0].numel() for path in group.consumers) * len(group.classes) + ROUND_COST


def _shares(weights: dict[str, Tensor], pattern: Pattern) -> dict[str, float]:
    """Share of each weight's magnitude that the pattern keeps, on one thread."""
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
    """True if both compute the same in evaluation mode, up to rounding."""
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        left = flat_tensors(reference(*inputs))
        right = flat_tensors(run_with(copy.deepcopy(model).eval(), inputs))
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
    """Reasons why channels were not searched, each once."""
    apart = f"are in no whole groups of {m} that may trade places"
    return "; ".join(dict.fromkeys(pinned.get(c, apart) for c in rest))
