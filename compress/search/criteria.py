"""Importance of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from compress.errors import SearchError, near_misses
from compress.graph.inputs import flat_tensors
from compress.search.network import Scores
from compress.search.structure import Axis, Structure, WidthGroup

CRITERIA = ("magnitude", "batchnorm", "taylor", "fisher", "reconstruction")
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def channel_scores(structure: Structure, criterion: str, batches: Sequence[Tensor]) -> Scores:
    """Importance by group and channel.

    Args:
        structure: of float.
        criterion: `magnitude` sums squared weights (arXiv 1608.08710, groups of DepGraph, 2301.12900); `batchnorm`
            averages |gamma| (1708.06519); `taylor` is (sum of activation times gradient)^2 over a batch (1906.10771);
            `fisher` sums squares by image (1801.05787); `reconstruction` is the power added to consumers (after ThiNet,
            1707.06342, channels independent).
        batches: for the last three.

    Raises:
        SearchError: an unknown criterion.
    """
    if criterion not in CRITERIA:
        raise SearchError(
            f"criterion {criterion!r} is unknown{near_misses(criterion, CRITERIA)} (one of: {', '.join(CRITERIA)})"
        )
    if criterion == "magnitude":
        return _summed(structure, _uses(structure, {"in", "out"}), lambda use: _power(_tensor(structure, use), use))
    if criterion == "batchnorm":
        norms = [use for use in _uses(structure, {"vector"}) if _is_scale(structure, use)]
        scales = _summed(structure, norms, lambda use: _tensor(structure, use).detach().abs())
        fallback = channel_scores(structure, "magnitude", batches)
        return {name: own if own.any() else fallback[name] for name, own in scales.items()}
    if criterion == "reconstruction":
        powers = _input_power(structure.graph, [u.path.removesuffix(".weight") for u in _consumers(structure)], batches)
        return _summed(
            structure,
            _consumers(structure),
            lambda use: _power(_tensor(structure, use), use) * powers[use.path.removesuffix(".weight")],
        )
    return _by_gradient(structure, criterion, batches)


def _by_gradient(structure: Structure, criterion: str, batches: Sequence[Tensor]) -> Scores:
    taps = _taps(structure)
    sums = {use.path: torch.zeros(len(use.classes)) for use in taps}
    generator = torch.Generator().manual_seed(0)
    for images in batches:
        for path, by_image in _factor_gradients(structure.graph, [use.path for use in taps], images, generator).items():
            sums[path] += (by_image.sum(0).square() if criterion == "taylor" else by_image.square().sum(0)).cpu()
    return _summed(structure, taps, lambda use: sums[use.path])


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

    def keep(path: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            seen.setdefault(path, []).append(output)
            return output.clone()  # later operations may work in place

        return hook

    handles = [graph.get_submodule(path.rpartition(".")[0]).register_forward_hook(keep(path)) for path in tensors]
    try:
        with torch.enable_grad():
            loss = _loss(flat_tensors(graph(images.clone().requires_grad_())), generator)
            flat = [(path, value) for path, values in seen.items() for value in values]
            gradients = torch.autograd.grad(loss, [value for _, value in flat], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, Tensor] = {}
    for (path, value), gradient in zip(flat, gradients, strict=True):
        if gradient is not None:
            product = (value * gradient).detach()
            found[path] = found.get(path, 0) + product.flatten(2).sum(2) if product.ndim > 2 else product
    return found


def _loss(outputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    if len(outputs) == 1 and outputs[0].ndim == 2:
        return functional.cross_entropy(outputs[0], outputs[0].detach().argmax(1), reduction="sum")
    return torch.stack([(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs]).sum()


def _input_power(graph: fx.GraphModule, paths: Sequence[str], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Mean square of each input channel of some layers."""
    sums: dict[str, Tensor] = {}
    count = 0

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            x = x.flatten(0, -2) if isinstance(module, nn.Linear) else x.transpose(0, 1).flatten(1).T
            sums[path] = sums.get(path, torch.zeros(x.shape[1])) + x.square().mean(0).cpu()

        return hook

    handles = [graph.get_submodule(path).register_forward_pre_hook(keep(path)) for path in paths]
    try:
        with torch.no_grad():
            for images in batches:
                graph(images)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    return {path: value / max(count, 1) for path, value in sums.items()}


def _consumers(structure: Structure) -> list[Axis]:
    return [use for use in _uses(structure, {"in"}) if use.path.endswith(".weight")]


def _uses(structure: Structure, roles: set[str]) -> list[Axis]:
    own = torch.tensor([number for group in structure.groups.values() for number in group.classes])
    return [use for use in structure.axes if use.role in roles and bool(torch.isin(use.classes, own).any())]


def _is_scale(structure: Structure, use: Axis) -> bool:
    path, _, name = use.path.rpartition(".")
    return name == "weight" and isinstance(structure.graph.get_submodule(path), _NORMS)


def _tensor(structure: Structure, use: Axis) -> Tensor:
    path, _, name = use.path.rpartition(".")
    return getattr(structure.graph.get_submodule(path), name).detach().cpu()


def _power(tensor: Tensor, use: Axis) -> Tensor:
    """Sum of squares at each position of an axis."""
    return tensor.square().movedim(use.axis, 0).flatten(1).sum(1)


def _summed(structure: Structure, uses: Sequence[Axis], value: Callable[[Axis], Tensor]) -> dict[str, Tensor]:
    place = {number: (name, i) for name, group in structure.groups.items() for i, number in enumerate(group.classes)}
    scores = {name: torch.zeros(_size(group)) for name, group in structure.groups.items()}
    for use in uses:
        values = value(use).double().tolist()
        for number, amount in zip(use.classes.tolist(), values, strict=True):
            if number in place:
                name, i = place[number]
                scores[name][i] += amount
    return scores


def _size(group: WidthGroup) -> int:
    return len(group.classes)
