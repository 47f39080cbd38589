"""Channels removed from a network: which may go, which stay and why (`shrinkable`), and `prune_channels`.

Groups of channels are those of DepGraph (Fang et al., arXiv 2301.12900), found on the traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import ModelError, SparsityError, first_few
from compress.graph.compare import alone, own_copy
from compress.graph.functional import functions_to_modules
from compress.graph.inputs import Inputs, as_inputs, flat_tensors, run_with
from compress.graph.layers import layers as layer_table
from compress.graph.layers import total_macs
from compress.graph.modules import modes_restored
from compress.graph.ops import BATCH_NORMS, attribute_of
from compress.graph.trace import check_module, trace
from compress.sparsity import SparsitySpec, check_sparsity_spec
from compress.sparsity.eligibility import check_rules, left_dense, weight_of, weighted_layers
from compress.sparsity.groups import Channels, Use, channels_of
from compress.sparsity.parametrization import masked_layers
from compress.support.progress import NoProgress, Progress

MULTIPLE = 8  # remaining channels are a multiple of it with kernels `tensorrt`, because tensor-core kernels need that
TRIALS = 8  # bisection steps; each halves the uncertainty of the ratio
LARGEST = 0.95  # largest share of a group's channels that is removed
FEWEST = 2  # channels that stay of a group: an axis of one looks like one without channels

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    *BATCH_NORMS,
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a tensor along channels: `role` as of `Use`, `classes` the channel at each position."""

    path: str
    axis: int
    role: str
    classes: Tensor


@dataclass(frozen=True, kw_only=True)
class WidthGroup:
    """Channels that nothing distinguishes; any number of them may be removed.

    Attributes:
        name: the first layer that produces them.
        classes: of `Shrinkable.axes`.
    """

    name: str
    classes: tuple[int, ...]
    producers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Shrinkable:
    """The channels of a network that may be removed; `left` is why others stay, by producing layer."""

    axes: tuple[Axis, ...]
    groups: Mapping[str, WidthGroup]
    left: Mapping[str, str]


def shrinkable(
    model: nn.Module, inputs: tuple[Tensor, ...], *, stays: Callable[[str], bool] = lambda _: False
) -> Shrinkable:
    """Find the channels that may be removed, tried on a copy; `stays` says which layers' are not wanted."""
    channels = _follow(model, inputs)
    check = _Check.of(model, inputs, channels)
    groups, left = _groups(channels, check, stays)
    while failing := _failing(check, list(groups.values())):
        left = {**left, **{layer: why for name, why in failing.items() for layer in groups[name].producers}}
        groups = {name: group for name, group in groups.items() if name not in failing}
    return Shrinkable(axes=check.axes, groups=groups, left=left)


def _follow(model: nn.Module, inputs: tuple[Tensor, ...]) -> Channels:
    graph = trace(model, inputs)
    functions_to_modules(graph)
    return channels_of(graph, inputs, owner=model)


def remove_channels(model: nn.Module, axes: Iterable[Axis], removed: Sequence[int]) -> None:
    """Remove the classes `removed`, of groups that may shrink, in place."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    owners: dict[int, list[str]] = {}
    for path, tensor in named.items():
        owners.setdefault(id(tensor), []).append(path)
    changed: dict[str, nn.Module] = {}
    for axis in axes:
        keep = kept_positions(axis, removed)
        if len(keep) == len(axis.classes):
            continue
        tensor = attribute_of(model, axis.path)
        smaller = tensor.detach().index_select(axis.axis, keep.to(tensor.device))
        if isinstance(tensor, nn.Parameter):
            smaller = nn.Parameter(smaller, requires_grad=tensor.requires_grad)
        for path in owners[id(named[axis.path])]:
            owner, _, name = path.rpartition(".")
            changed[owner] = module = model.get_submodule(owner)
            setattr(module, name, smaller)
    for module in changed.values():
        _count_again(module)


def kept_positions(axis: Axis, removed: Sequence[int]) -> Tensor:
    return (~_among(axis.classes, removed)).nonzero().flatten()


def _among(classes: Tensor, removed: Iterable[int]) -> Tensor:
    return torch.isin(classes, torch.tensor(list(removed), dtype=torch.int64))


def _count_again(module: nn.Module) -> None:
    layer: Any = module
    if isinstance(module, _CONVOLUTIONS):
        if module.groups == module.in_channels > 1:
            layer.groups = layer.weight.shape[0] // (module.out_channels // module.in_channels)
        layer.out_channels = layer.weight.shape[0]
        layer.in_channels = layer.weight.shape[1] * module.groups
    elif isinstance(module, _TRANSPOSED):
        layer.in_channels, layer.out_channels = layer.weight.shape[:2]
    elif isinstance(module, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(module, _NORMS):
        sized = layer.running_mean if layer.running_mean is not None else layer.weight
        layer.num_features = len(sized)
    elif isinstance(module, nn.GroupNorm):
        layer.num_groups = len(layer.weight) if module.num_groups == module.num_channels else module.num_groups
        layer.num_channels = len(layer.weight)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        layer.normalized_shape = tuple(layer.weight.shape)
    elif isinstance(module, nn.PReLU):
        layer.num_parameters = layer.weight.numel()


def magnitudes(model: nn.Module, found: Shrinkable) -> dict[str, Tensor]:
    """Importance by group and channel: the sum of squared weights (arXiv 1608.08710)."""
    weights = [axis for axis in found.axes if axis.role != "vector"]
    return group_sums(found, weights, lambda axis: channel_power(attribute_of(model, axis.path).detach(), axis))


def channel_power(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor.square().movedim(axis.axis, 0).flatten(1).sum(1)


def group_sums(found: Shrinkable, axes: Iterable[Axis], value: Callable[[Axis], Tensor]) -> dict[str, Tensor]:
    place = {number: (name, i) for name, group in found.groups.items() for i, number in enumerate(group.classes)}
    scores = {name: torch.zeros(len(group.classes)) for name, group in found.groups.items()}
    for axis in axes:
        if not any(number in place for number in axis.classes.tolist()):
            continue
        for number, amount in zip(axis.classes.tolist(), value(axis).double().tolist(), strict=True):
            if number in place:
                name, i = place[number]
                scores[name][i] += amount
    return scores


def _groups(
    channels: Channels, check: _Check, stays: Callable[[str], bool]
) -> tuple[dict[str, WidthGroup], dict[str, str]]:
    pinned, uses = channels.pinned(), list(channels.uses.values())
    held: dict[int, list[Use]] = {}
    for use, classes in zip(uses, check.units, strict=True):
        for number in classes.unique().tolist():
            held.setdefault(number, []).append(use)
    groups: dict[str, WidthGroup] = {}
    left: dict[str, str] = {}
    for group in channels.interchangeable():
        own = held.get(group[0], [])  # of one class: the others have the same
        producers = tuple(dict.fromkeys(use.path.removesuffix(".weight") for use in own if use.role == "out"))
        if not producers:
            continue
        reason = next((pinned[number] for number in group if number in pinned), "")
        if not reason and len(group) <= FEWEST:
            reason = f"must stay: they move together, in {len(group)} parts, of which {FEWEST} stay"
        if kept := [layer for layer in producers if stays(layer)]:
            reason = f"are those of {kept[0]}, which a rule disables"
        if reason:
            left.update((layer, left.get(layer, reason)) for layer in producers)
        else:
            name = producers[0] if producers[0] not in groups else f"{producers[0]} ({len(groups)})"
            groups[name] = WidthGroup(name=name, classes=tuple(group), producers=producers)
    return groups, left


@dataclass(frozen=True, kw_only=True)
class _Check:
    # A network before channels are removed; for each use of a tensor what must go together, and its channels alone.

    model: nn.Module
    inputs: tuple[Tensor, ...]
    axes: tuple[Axis, ...]
    units: tuple[Tensor, ...]
    single: tuple[Tensor, ...]
    shapes: list[torch.Size]

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Tensor, ...], channels: Channels) -> _Check:
        single = _classes(channels)
        channels.tie_parts()
        units, uses = _classes(channels), list(channels.uses.values())
        axes = tuple(  # the channels of one block of a grouped convolution are tied to those of the others
            Axis(path=use.path, axis=use.axis, role=use.role, classes=classes)
            for use, classes in zip(uses, units, strict=True)
            if use.rows is None or use.rows[0] == 0
        )
        shapes = _output_shapes(model, inputs)
        return cls(model=model, inputs=inputs, axes=axes, units=units, single=single, shapes=shapes)

    def without(self, removed: Sequence[int]) -> nn.Module:
        small = own_copy(self.model)
        remove_channels(small, self.axes, removed)
        return small

    def failure(self, small: nn.Module) -> str:
        try:
            shapes = _output_shapes(small, self.inputs)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, ArithmeticError) as error:
            return f"the network does not run without some of them: {(str(error).splitlines() or [''])[0][:100]}"
        return "" if shapes == self.shapes else "the network's outputs change their shape with them"

    def confused(self, small: nn.Module, removed: Sequence[int]) -> set[int]:
        # Classes of which a smaller copy computes with other channels than the network did.
        after = _classes(_follow(small, self.inputs))
        kept = [one[~_among(unit, removed)] for one, unit in zip(self.single, self.units, strict=True)]
        units = [unit[~_among(unit, removed)] for unit in self.units]
        if [len(x) for x in kept] != [len(x) for x in after]:
            same = len(kept) == len(after)
            wrong = [u for i, u in enumerate(units) if not same or len(after[i]) != len(u)]
            return set(torch.cat(wrong).tolist())
        pairs = torch.stack([torch.cat(kept), torch.cat(after)])
        unique = pairs.unique(dim=1)
        found = torch.zeros(pairs.shape[1], dtype=torch.bool)
        for row in (0, 1):
            values, counts = unique[row].unique(return_counts=True)
            found |= torch.isin(pairs[row], values[counts > 1])
        return set(torch.cat(units)[found].tolist())


def _classes(channels: Channels) -> tuple[Tensor, ...]:
    return tuple(channels.classes(use.numbers) for use in channels.uses.values())


def _failing(check: _Check, groups: Sequence[WidthGroup], *, alike: bool = True) -> dict[str, str]:
    # Groups that cannot shrink, with the reason; found by halves.
    if not groups:
        return {}
    removed = [
        n for group in groups for n in group.classes[: min(len(group.classes) // 2, len(group.classes) - FEWEST)]
    ]
    small = check.without(removed)
    if reason := check.failure(small):
        half = len(groups) // 2
        found = (
            _failing(check, groups[:half], alike=False) | _failing(check, groups[half:], alike=False) if half else {}
        )
        return found or {group.name: f"must stay: {reason}" for group in groups}
    wrong = check.confused(small, removed) if alike else set()
    named = {group.name for group in groups if wrong & {*group.classes}}
    named = named or {group.name for group in groups if wrong}
    return dict.fromkeys(named, "must stay: the network's code takes them by number")


def _output_shapes(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[torch.Size]:
    with torch.no_grad():  # calling a graph module would print the line that fails
        forward = model.forward if isinstance(model, fx.GraphModule) else model
        return [tensor.shape for tensor in flat_tensors(run_with(forward, inputs))]


@dataclass(frozen=True, kw_only=True)
class ChannelRow:
    """A layer's path, the shape of its weight before and after pruning, and why its channels stayed, if they did."""

    layer: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ChannelReport:
    """Result of channel pruning: every convolution and linear layer, macs of the example batch, and elements."""

    pattern: str
    rows: tuple[ChannelRow, ...]
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int

    @property
    def removed(self) -> float:
        return 1 - self.macs_after / self.macs_before


@alone
def prune_channels(
    model: nn.Module, spec: SparsitySpec | None = None, *, example_inputs: Inputs, progress: Progress | None = None
) -> ChannelReport:
    """Remove channels until the share R of `channel:R` of the macs is removed; in place.

    The parameters become new objects: make the optimizer afterwards. Channels of outputs, of layers that a rule
    disables, and those that the graph loses stay; the report says why.

    Args:
        model: dense, float and traceable.
        spec: None = channel:0.5.
        example_inputs: a small batch, on the model's device.
        progress: is advanced at each step of the bisection.

    Raises:
        ModelError: `model` is no module.
        SparsityError: another pattern, a masked or quantized model, or the macs cannot be reduced so far.

    Examples:
        >>> network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 8, 1))
        >>> spec = compress.SparsitySpec(pattern="channel:0.5", kernels="any")
        >>> round(compress.prune_channels(network, spec, example_inputs=images[:1]).removed, 1)
        0.5
    """
    check_module(model)
    spec, progress = spec or SparsitySpec(pattern="channel:0.5"), progress or NoProgress()
    ratio = _check_spec(model, spec)
    inputs = as_inputs(example_inputs)
    before = _shapes(model)
    check_rules(spec, before)
    with modes_restored(model):
        model.eval()
        macs, parameters = _macs(model, inputs), _parameters(model)
        found = shrinkable(model, inputs, stays=lambda layer: left_dense(layer, spec))
        removed, after = _chosen(model, found, inputs, macs, ratio, spec, progress)
        remove_channels(model, found.axes, removed)
    rows = tuple(
        ChannelRow(layer=path, before=before[path], after=shape, reason=found.left.get(path, ""))
        for path, shape in _shapes(model).items()
    )
    return ChannelReport(
        pattern=spec.pattern,
        rows=rows,
        macs_before=macs,
        macs_after=after,
        parameters_before=parameters,
        parameters_after=_parameters(model),
    )


def _chosen(
    model: nn.Module,
    found: Shrinkable,
    inputs: tuple[Tensor, ...],
    macs: int,
    share: float,
    spec: SparsitySpec,
    progress: Progress,
) -> tuple[list[int], int]:
    # Bisects for the part of each group's channels whose removal takes the share of the macs; with the macs left.
    weakest = _weakest_first(model, found, MULTIPLE if spec.kernels == "tensorrt" else 1)
    low, high, nearest, target = 0.0, LARGEST, macs, (1 - share) * macs
    chosen: list[int] = []
    progress.start("prune channels", TRIALS)
    for _ in range(TRIALS):
        ratio = (low + high) / 2
        removed = [number for order, step in weakest for number in order[: len(order) - _staying(order, ratio, step)]]
        trial = own_copy(model)
        remove_channels(trial, found.axes, removed)
        got = _macs(trial, inputs)
        if abs(got - target) < abs(nearest - target):
            chosen, nearest = removed, got
        low, high = (ratio, high) if got > target else (low, ratio)
        progress.advance("prune channels", macs_removed=1 - got / macs)
    progress.finish("prune channels")
    if abs(nearest - target) > 0.1 * macs:
        kept = first_few([f"{layer}: its channels {reason}" for layer, reason in found.left.items()])
        raise SparsityError(
            f"pattern {spec.pattern!r}: the nearest that whole channels reach is {1 - nearest / macs:.2f} of the macs"
            f"{f' ({kept})' if kept else ''}; ask for another share, enable more layers, or set kernels to 'any', "
            "which rounds less"
        )
    return chosen, nearest


def _staying(order: Sequence[int], ratio: float, step: int) -> int:
    return min(len(order), max(FEWEST, step, round(len(order) * (1 - ratio) / step) * step))


def _weakest_first(model: nn.Module, found: Shrinkable, multiple: int) -> list[tuple[list[int], int]]:
    # For each group its classes, the weakest first, and of how many the number that stays must be a multiple.
    scores, weakest = magnitudes(model, found), []
    made = [axis.classes for axis in found.axes if axis.role == "out"]
    for name, group in found.groups.items():
        sizes = [size for classes in made if (size := int((classes == group.classes[0]).sum()))]
        order = [group.classes[i] for i in scores[name].argsort(stable=True).tolist()]
        weakest.append((order, multiple // math.gcd(multiple, *sizes)))
    return weakest


def _check_spec(model: nn.Module, spec: SparsitySpec) -> float:
    pattern = check_sparsity_spec(spec)
    if pattern.kind != "channel":
        raise SparsityError(f"pattern {spec.pattern!r} masks weights: call sparsify, or use channel:0.5")
    if any(getattr(module, "is_quantizer", False) for module in model.modules()):
        raise SparsityError("the model is quantized: remove channels of the float model, and quantize the result")
    if masked_layers(model):
        raise SparsityError("the model is masked already: call squash_masks before removing channels")
    return pattern.ratio


def _macs(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    try:
        macs, unknown = total_macs(layer_table(trace(model, inputs)))
    except ModelError as error:
        raise SparsityError(f"the model's macs cannot be counted: {error}") from error
    if unknown:
        raise SparsityError(f"the macs of these layers are unknown, so no share of them can be reached: {unknown}")
    return macs


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {path: tuple(weight_of(layer).shape) for path, layer in weighted_layers(model).items()}


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
