"""Removes channels along every tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.sparsity.channel_classes import Channels, Use

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAYERS = (*_CONVOLUTIONS, *_NORMS, nn.Linear, nn.PReLU)


def removable(graph: fx.GraphModule, uses: Iterable[Use]) -> str:
    """Why channels with these uses cannot be removed, or ""."""
    for use in uses:
        path, _, name = use.path.rpartition(".")
        try:
            module = graph.get_submodule(path)
        except AttributeError:
            module = None
        if module is None or (name not in module._parameters and name not in module._buffers):
            return f"meet the constant {use.path}"
        if use.rows is not None:
            return f"meet {path}, a grouped convolution"
        if not isinstance(module, _LAYERS):
            return f"meet {path}, a {type(module).__name__}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a tensor along channels: `role` as of `Use`, `classes` the channel at each position."""

    path: str
    axis: int
    role: str
    classes: Tensor


def axes_of(channels: Channels) -> tuple[Axis, ...]:
    """Return every axis along channels with its classes."""
    return tuple(
        Axis(path=use.path, axis=use.axis, role=use.role, classes=channels.classes(use.numbers))
        for use in channels.uses.values()
    )


def remove_channels(graph: fx.GraphModule, axes: Iterable[Axis], removed: Sequence[int]) -> fx.GraphModule:
    """Return a copy of a network without the classes `removed`, of groups that may shrink."""
    small = copy.deepcopy(graph)
    changed: dict[str, nn.Module] = {}
    for axis in axes:
        keep = kept_positions(axis, removed)
        if len(keep) == len(axis.classes):
            continue
        path, _, name = axis.path.rpartition(".")
        module = small.get_submodule(path)
        value = getattr(module, name).detach()
        _set(module, name, value.index_select(axis.axis, keep.to(value.device)))
        changed[path] = module
    for module in changed.values():
        _count_again(module)
    return small


def kept_positions(axis: Axis, removed: Sequence[int]) -> Tensor:
    """Positions along an axis that stay, in order."""
    gone = torch.isin(axis.classes, torch.tensor(list(removed), dtype=torch.int64))
    return (~gone).nonzero().flatten()


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    if name in module._parameters:
        trained = module.get_parameter(name).requires_grad
        module._parameters[name] = nn.Parameter(value.clone(), requires_grad=trained)
    else:
        module._buffers[name] = value.clone()


def _count_again(module: nn.Module) -> None:
    """Take a layer's numbers of channels from its tensors."""
    layer: Any = module
    if isinstance(module, _CONVOLUTIONS):
        depthwise = module.groups == module.in_channels == module.out_channels and module.groups > 1
        layer.out_channels = layer.weight.shape[0]
        if depthwise:
            layer.groups = layer.in_channels = layer.weight.shape[0]
        else:
            layer.in_channels = layer.weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(module, _NORMS):
        sized = layer.running_mean if layer.running_mean is not None else layer.weight
        layer.num_features = len(sized)
    elif isinstance(module, nn.PReLU):
        layer.num_parameters = layer.weight.numel()
