"""Channels removed, blocks left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import SearchError
from compress.graph.inputs import flat_tensors
from compress.search.space import Configuration, left_out, widths_of
from compress.search.structure import Structure, kept_positions, leave_out, remove_channels
from compress.training.freezing import recalibrate_batchnorm

Scores = Mapping[str, Tensor]
"""For each group of channels the importance of each of its channels, in the order of `WidthGroup.classes`."""

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LEARNING_RATE = 1e-3


def apply(structure: Structure, configuration: Configuration, scores: Scores | None = None) -> fx.GraphModule:
    """Return a configuration's float network, in evaluation mode, without formats and sparsity.

    Channels of the highest scores stay; without scores the first ones. What the configuration does not name stays.

    Raises:
        SearchError: more channels are to be kept than there are, or none.
    """
    small = remove_channels(structure.graph, structure.axes, removed_classes(structure, configuration, scores))
    for name in left_out(configuration):
        leave_out(small, structure.blocks[name])
    small.graph.eliminate_dead_code()
    small.delete_all_unused_submodules()
    small.recompile()
    return small.eval()


def removed_classes(structure: Structure, configuration: Configuration, scores: Scores | None = None) -> list[int]:
    """Classes of channels that a configuration removes."""
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
    paths = {path for path, module in small.named_modules() if isinstance(module, _NORMS)}
    return {
        path: kept_positions(axis, removed)
        for axis in structure.axes
        if (path := axis.path.rpartition(".")[0]) in paths and axis.path.endswith((".weight", ".running_mean"))
    }


def _observed(model: nn.Module, images: Tensor, paths: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(path, output.clone())  # what follows may be in place

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    try:
        return flat_tensors(model(images)), seen
    finally:
        for handle in handles:
            handle.remove()


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
