"""What a search may change: channels, blocks, formats."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from compress.graph.canonical import drop_assertions
from compress.graph.compare import Reference
from compress.graph.float_model import check_float_model
from compress.graph.functional import functions_to_modules
from compress.graph.inputs import Inputs, as_inputs, flat_tensors
from compress.graph.layers import Layer
from compress.graph.layers import layers as layer_table
from compress.graph.trace import propagate_shapes, trace
from compress.search.blocks import Block, residual_blocks, units
from compress.search.surgery import Axis, axes_of, removable, remove_channels
from compress.sparsity.channel_classes import Channels
from compress.sparsity.groups import channels_of


@dataclass(frozen=True, kw_only=True)
class WidthGroup:
    """Channels that nothing distinguishes; any number of them may be removed.

    Attributes:
        name: the first layer that produces them.
        classes: of `Structure.axes`.
    """

    name: str
    classes: tuple[int, ...]
    producers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A traced float network and all that may be taken from it.

    Attributes:
        graph: in evaluation mode, not to be changed.
        axes: along channels.
        blocks: that may be left out, by name.
        units: layers that share a format, by module.
        layers: weighted, with costs, in order.
        left: why channels stay, by producing layer.
    """

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    axes: tuple[Axis, ...]
    groups: Mapping[str, WidthGroup]
    blocks: Mapping[str, Block]
    units: Mapping[str, tuple[str, ...]]
    layers: tuple[Layer, ...]
    left: Mapping[str, str]


def analyse(model: nn.Module, example_inputs: Inputs) -> Structure:
    """Trace a copy of a float32 network and find what may be taken from it.

    Raises:
        ModelError: the model cannot be traced.
        QuantizationError: it is not in float32, or quantized already.
    """
    check_float_model(model)
    inputs = as_inputs(example_inputs)
    graph = _modules_of(copy.deepcopy(model).eval(), inputs)
    channels = channels_of(graph, inputs)
    rows = tuple(row for row in layer_table(graph) if row.path and row.weight_macs)
    axes = axes_of(channels)
    groups, left = _groups(graph, channels, axes)
    found = Structure(
        graph=graph,
        inputs=inputs,
        axes=axes,
        groups=groups,
        blocks={block.name: block for block in residual_blocks(graph.graph)},
        units=units([row.path for row in rows]),
        layers=rows,
        left=left,
    )
    return _without_failing(found)


def _modules_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """Trace a network; layers computed by functions become modules."""
    reference = Reference.of(model, inputs)
    graph = trace(model, inputs).eval()
    drop_assertions(graph)
    if functions_to_modules(graph):
        propagate_shapes(graph, inputs)
    reference.check(graph, "making modules of the layers of its graph")
    return graph


def shares_of_axes(structure: Structure) -> dict[tuple[str, str], Counter[str]]:
    """Positions of each axis in each group ("" = none), by tensor and role."""
    owner = {number: name for name, group in structure.groups.items() for number in group.classes}
    return {
        (axis.path, axis.role): Counter(owner.get(number, "") for number in axis.classes.tolist())
        for axis in structure.axes
    }


def _groups(
    graph: fx.GraphModule, channels: Channels, axes: Sequence[Axis]
) -> tuple[dict[str, WidthGroup], dict[str, str]]:
    pinned = channels.pinned()
    uses = list(channels.uses.values())
    held: dict[int, set[int]] = {}
    for place, axis in enumerate(axes):
        for number in axis.classes.unique().tolist():
            held.setdefault(number, set()).add(place)
    groups: dict[str, WidthGroup] = {}
    left: dict[str, str] = {}
    for classes in channels.interchangeable():
        own = [uses[place] for place in sorted(held.get(classes[0], ()))]  # of one class: the others have the same
        producers = tuple(use.path.removesuffix(".weight") for use in own if use.role == "out")
        if not producers:
            continue
        reason = next((pinned[number] for number in classes if number in pinned), "") or removable(graph, own)
        if not reason and len(classes) < 2:
            reason = "are a single channel"
        if reason:
            left.setdefault(producers[0], reason)
        else:
            name = producers[0] if producers[0] not in groups else f"{producers[0]} ({len(groups)})"
            groups[name] = WidthGroup(name=name, classes=tuple(classes), producers=producers)
    return groups, left


def _without_failing(structure: Structure) -> Structure:
    """Drop groups whose sizes the network's forward uses as constants."""
    if not structure.groups or not _failure(structure, list(structure.groups.values())):
        return structure
    reasons = {name: _failure(structure, [group]) for name, group in structure.groups.items()}
    groups = {name: group for name, group in structure.groups.items() if not reasons[name]}
    return replace(structure, groups=groups, left={**structure.left, **{k: v for k, v in reasons.items() if v}})


def _failure(structure: Structure, groups: Sequence[WidthGroup]) -> str:
    removed = [number for group in groups for number in group.classes[: len(group.classes) // 2]]
    small = remove_channels(structure.graph, structure.axes, removed)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # fx prints the failing line of its generated code
            after = _output_shapes(small, structure.inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"must stay, because the network does not run without half of them: {str(error).splitlines()[0][:100]}"
    same = after == _output_shapes(structure.graph, structure.inputs)
    return "" if same else "must stay, because the network's outputs change their shape with them"


def _output_shapes(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[torch.Size]:
    with torch.no_grad():
        return [tensor.shape for tensor in flat_tensors(model(*inputs))]
