"""Channels: their importance and their removal; blocks left out; a network of a search as a recipe's model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from compress.errors import SearchError, near_misses
from compress.graph.inputs import flat_tensors, hooked
from compress.graph.ops import BATCH_NORMS, attribute_of
from compress.models import ModelSpec
from compress.models.by_name import build_model
from compress.search.space import (
    Configuration,
    Structure,
    analyse,
    leave_out,
    left_out,
    widths_of,
)
from compress.sparsity.channels import Axis, channel_power, group_sums, kept_positions, magnitudes, remove_channels
from compress.training.optim import recalibrate_batchnorm

# For each group of channels the importance of each of its channels, in the order of `WidthGroup.classes`.
Scores = Mapping[str, Tensor]

_LEARNING_RATE = 1e-3


def apply(structure: Structure, configuration: Configuration, scores: Scores | None = None) -> fx.GraphModule:
    """Return a configuration's float network, in evaluation mode, without formats and sparsity.

    Channels of the highest scores stay; without scores the first ones. What the configuration does not name stays.
    """
    small = copy.deepcopy(structure.graph)
    remove_channels(small, structure.axes, removed_classes(structure, configuration, scores))
    for name in left_out(configuration):
        leave_out(small, structure.blocks[name])
    small.graph.eliminate_dead_code()
    small.delete_all_unused_submodules()
    small.recompile()
    return small.eval()


def removed_classes(structure: Structure, configuration: Configuration, scores: Scores | None = None) -> list[int]:
    removed: list[int] = []
    for name, count in widths_of(configuration).items():
        classes = structure.groups[name].classes
        if not 1 <= count <= len(classes):
            raise SearchError(f"width {name} is {count}: it must be from 1 to {len(classes)}")
        if scores is None:
            removed += classes[count:]
        else:
            order = scores[name].argsort(descending=True, stable=True).tolist()
            removed += [classes[i] for i in sorted(order[count:])]
    return removed


def reconstruct(
    small: fx.GraphModule,
    structure: Structure,
    configuration: Configuration,
    scores: Scores,
    batches: Sequence[Tensor],
    *,
    steps: int,
) -> fx.GraphModule:
    """Measure BatchNorm's statistics again and train on the float network's outputs, in place.

    The loss is the squared error of the outputs, and of every BatchNorm's left channels, each over the power of its
    target (layer-wise reconstruction, as in AdaRound and BRECQ, of all layers at once). Configuration and scores are
    those that `small` was made with; batches are preprocessed images; `steps` are Adam's.
    """
    recalibrate_batchnorm(small, batches)
    if not steps:
        return small
    kept = _kept_outputs(small, structure, removed_classes(structure, configuration, scores))
    parameters = [p for p in small.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    for step in range(steps):
        images = batches[step % len(batches)]
        with torch.no_grad():
            wanted, inner = _observed(structure.graph, images, kept)
        with torch.enable_grad():
            got, own = _observed(small, images, kept)
            loss = sum((_error(a, b) for a, b in zip(got, wanted, strict=True)), torch.zeros((), device=images.device))
            for path, index in kept.items():
                target = inner[path].index_select(1, index.to(images.device))
                loss = loss + _error(own[path], target) / len(kept)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    recalibrate_batchnorm(small, batches)
    return small.eval()


def _kept_outputs(small: nn.Module, structure: Structure, removed: Sequence[int]) -> dict[str, Tensor]:
    paths = {path for path, module in small.named_modules() if isinstance(module, BATCH_NORMS)}
    return {
        path: kept_positions(axis, removed)
        for axis in structure.axes
        if (path := axis.path.rpartition(".")[0]) in paths and axis.path.endswith((".weight", ".running_mean"))
    }


def _observed(model: nn.Module, images: Tensor, paths: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def keep(path: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen[path] = output.clone()  # what follows may be in place

    with hooked({path: model.get_submodule(path) for path in paths}, keep):
        return flat_tensors(model(images)), seen


def _error(value: Tensor, target: Tensor) -> Tensor:
    return (value - target).square().mean() / target.square().mean().clamp_min(1e-12)


def distance(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Squared error over variance, averaged over outputs."""
    shares = []
    for value, target in zip(outputs, reference, strict=True):
        target = target.double()
        power: float = (target - target.mean(0, keepdim=True)).square().mean().item()
        shares.append((value.double() - target).square().mean().item() / max(power, 1e-12))
    return sum(shares) / max(len(shares), 1)


CRITERIA = ("magnitude", "batchnorm", "taylor", "fisher", "reconstruction")


def channel_scores(structure: Structure, criterion: str, batches: Sequence[Tensor]) -> Scores:
    """Importance by group and channel.

    Args:
        structure: of float.
        criterion: `magnitude` sums squared weights (arXiv 1608.08710, groups of DepGraph, 2301.12900); `batchnorm`
            averages |gamma| (1708.06519); `taylor` is (sum of activation times gradient)^2 over a batch (1906.10771);
            `fisher` sums squares by image (1801.05787); `reconstruction` is the power added to consumers (after ThiNet,
            1707.06342, channels independent).
        batches: for the last three.
    """
    if criterion not in CRITERIA:
        raise SearchError(
            f"criterion {criterion!r} is unknown{near_misses(criterion, CRITERIA)} (one of: {', '.join(CRITERIA)})"
        )
    if criterion == "magnitude":
        return magnitudes(structure.graph, structure)
    if criterion == "batchnorm":
        norms = [use for use in _uses(structure, {"vector"}) if _is_scale(structure, use)]
        scales = group_sums(structure, norms, lambda use: attribute_of(structure.graph, use.path).detach().abs())
        fallback = channel_scores(structure, "magnitude", batches)
        return {name: own if own.any() else fallback[name] for name, own in scales.items()}
    if criterion == "reconstruction":
        powers = _input_power(structure.graph, [u.path.removesuffix(".weight") for u in _consumers(structure)], batches)
        return group_sums(
            structure,
            _consumers(structure),
            lambda use: (
                channel_power(attribute_of(structure.graph, use.path).detach().cpu(), use)
                * powers[use.path.removesuffix(".weight")].view(-1, len(use.classes)).sum(0)  # of a block's groups
            ),
        )
    return _by_gradient(structure, criterion, batches)


def _by_gradient(structure: Structure, criterion: str, batches: Sequence[Tensor]) -> Scores:
    taps = _taps(structure)
    sums = {use.path: torch.zeros(len(use.classes)) for use in taps}
    generator = torch.Generator().manual_seed(0)
    for images in batches:
        for path, by_image in _factor_gradients(structure.graph, [use.path for use in taps], images, generator).items():
            sums[path] += (by_image.sum(0).square() if criterion == "taylor" else by_image.square().sum(0)).cpu()
    return group_sums(structure, taps, lambda use: sums[use.path])


def _taps(structure: Structure) -> list[Axis]:
    """A tensor for each module whose output carries a group: norms, else producers."""
    norms = [use for use in _uses(structure, {"vector"}) if _is_scale(structure, use)]
    covered = torch.cat([use.classes for use in norms]) if norms else torch.zeros(0)
    rest = [use for use in _uses(structure, {"out"}) if not bool(torch.isin(use.classes, covered).all())]
    return norms + rest


def _factor_gradients(
    graph: fx.GraphModule, tensors: Sequence[str], images: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Gradient of the loss to a factor on each channel, by image: (N, C) by tensor's path."""
    seen: dict[str, list[Tensor]] = {}

    def keep(path: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        seen.setdefault(path, []).append(output)
        return output.clone()  # later operations may work in place

    modules = {path: graph.get_submodule(path.rpartition(".")[0]) for path in tensors}
    with hooked(modules, keep), torch.enable_grad():
        loss = _loss(flat_tensors(graph(images.clone().requires_grad_())), generator)
        flat = [(path, value) for path, values in seen.items() for value in values]
        gradients = torch.autograd.grad(loss, [value for _, value in flat], allow_unused=True)
    found: dict[str, Tensor] = {}
    for (path, value), gradient in zip(flat, gradients, strict=True):
        if gradient is not None:
            product = (value * gradient).detach()
            product = product.movedim(-1, 1) if isinstance(modules[path], nn.Linear) else product
            found[path] = found.get(path, 0) + product.reshape(*product.shape[:2], -1).sum(2)
    return found


def _loss(outputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    if len(outputs) == 1 and outputs[0].ndim == 2:
        return functional.cross_entropy(outputs[0], outputs[0].detach().argmax(1), reduction="sum")
    return torch.stack([(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs]).sum()


def _input_power(graph: fx.GraphModule, paths: Sequence[str], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> None:
        x = inputs[0].detach()
        x = x.flatten(0, -2) if isinstance(module, nn.Linear) else x.transpose(0, 1).flatten(1).T
        sums[path] = sums.get(path, torch.zeros(x.shape[1])) + x.square().mean(0).cpu()

    with hooked({path: graph.get_submodule(path) for path in paths}, keep), torch.no_grad():
        for images in batches:
            graph(images)
    return {path: value / max(len(batches), 1) for path, value in sums.items()}


def _consumers(structure: Structure) -> list[Axis]:
    return [use for use in _uses(structure, {"in"}) if use.path.endswith(".weight")]


def _uses(structure: Structure, roles: set[str]) -> list[Axis]:
    own = torch.tensor([number for group in structure.groups.values() for number in group.classes])
    return [use for use in structure.axes if use.role in roles and bool(torch.isin(use.classes, own).any())]


def _is_scale(structure: Structure, use: Axis) -> bool:
    path, _, name = use.path.rpartition(".")
    return name == "weight" and isinstance(structure.graph.get_submodule(path), BATCH_NORMS)


def rebuilt(
    *,
    num_classes: int,
    model: Mapping[str, Any],
    image: Sequence[int],
    configuration: Mapping[str, str],
    task: str = "classification",
) -> nn.Module:
    """Return the network that a configuration leaves of `model`, a `ModelSpec` without weights.

    `image` is channels, height and width of an input.
    """
    whole = build_model(ModelSpec(**{**model, "weights": None}), num_classes=num_classes, task=task)
    example = torch.randn(2, *image, generator=torch.Generator().manual_seed(0))
    return apply(analyse(whole, example), configuration).train()
