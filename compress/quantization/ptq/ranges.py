"""Ranges of a layer's output and input channels, and rescaling of either.

A weight has the shape (out, in / groups, k...) in convolutions and linear layers and (in, out / groups, k...) in
transposed ones: one side is its first axis, the other is repeated for each group. No other file depends on that layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import module_kind, tensor_of


def output_ranges(layer: nn.Module) -> Tensor:
    """The largest magnitude of the weights of each output channel, (out,)."""
    return _first_axis(layer) if not _transposed(layer) else _second_axis(layer)


def input_ranges(layer: nn.Module) -> Tensor:
    """The largest magnitude of the weights of each input channel, (in,)."""
    return _second_axis(layer) if not _transposed(layer) else _first_axis(layer)


@torch.no_grad()
def scale_outputs(layer: nn.Module, factor: Tensor) -> None:
    """Multiply each output channel, bias included, by `factor` (out,); in place."""
    weight = tensor_of(layer)
    weight.mul_(_second_factor(layer, factor) if _transposed(layer) else _first_factor(weight, factor))
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.mul_(factor)


@torch.no_grad()
def scale_inputs(layer: nn.Module, factor: Tensor) -> None:
    """Multiply the weights of each input channel by `factor` (in,); in place."""
    weight = tensor_of(layer)
    weight.mul_(_first_factor(weight, factor) if _transposed(layer) else _second_factor(layer, factor))


def output_channels(layer: nn.Module) -> int:
    weight = tensor_of(layer)
    return weight.shape[1] * _groups(layer) if _transposed(layer) else weight.shape[0]


def shared_parameters(graph_module: fx.GraphModule) -> dict[str, str]:
    """Why a module cannot be rescaled alone, by path: its parameters are used elsewhere too, or read by the graph."""
    paths: dict[int, list[str]] = {}
    for name, parameter in graph_module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name)
    called = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    found: dict[str, str] = {}
    for names in paths.values():
        for name in names:
            path, others = name.rpartition(".")[0], [other for other in names if other != name]
            if others:
                found[path] = f"shares its {name.rpartition('.')[2]} with {others[0]}"
            elif path in called and name in read:
                found[path] = f"has a {name.rpartition('.')[2]} that the model also reads by itself"
    return found


def ensure_biases(graph_module: nn.Module, paths: Iterable[str]) -> None:
    for path in paths:
        layer: Any = graph_module.get_submodule(path)
        if layer.bias is None:
            zeros = layer.weight.new_zeros(output_channels(layer))
            layer.bias = nn.Parameter(zeros, requires_grad=layer.weight.requires_grad)


def _groups(layer: nn.Module) -> int:
    return int(getattr(layer, "groups", 1))


def _transposed(layer: nn.Module) -> bool:
    return module_kind(layer) == "conv_transpose"


def _first_axis(layer: nn.Module) -> Tensor:
    return tensor_of(layer).detach().abs().flatten(1).amax(1)


def _second_axis(layer: nn.Module) -> Tensor:
    """Reduce over the rows of a group: (rows, columns) -> (groups * columns,)."""
    rows = (
        tensor_of(layer).detach().abs().flatten(2)
        if tensor_of(layer).dim() > 2
        else tensor_of(layer).detach().abs()[..., None]
    )
    return rows.amax(2).unflatten(0, (_groups(layer), -1)).amax(1).flatten()


def _first_factor(weight: Tensor, factor: Tensor) -> Tensor:
    return factor.reshape(-1, *[1] * (weight.dim() - 1))


def _second_factor(layer: nn.Module, factor: Tensor) -> Tensor:
    weight, groups = tensor_of(layer), _groups(layer)
    columns = factor.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return columns.reshape(weight.shape[0], weight.shape[1], *[1] * (weight.dim() - 2))
