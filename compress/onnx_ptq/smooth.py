"""Keeps a file accurate in 8 bits: channels with outliers are scaled, poor products of activations stay float.

The choice is `quantization.ptq.channel_scales`; here the tensors are computed and the scales go into the file. A scale
goes into the operation that makes the tensor where that is linear in it (a layer, a normalization, a product with a
constant, through activations without bounds), and is a Mul of its own elsewhere.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.export.onnx_graph import attribute, tensor_names
from compress.onnx_ptq.index import Index, constant_tensor, elements, renamed
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.passes import one_image
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.view import Node
from compress.quantization.ptq.channel_scales import (
    FLOAT_DB,
    IMAGES,
    ChannelScale,
    Consumer,
    Sample,
    channel_scale,
    convolve,
    product_db,
    sample_of,
    with_scale,
)
from compress.quantization.spec import QuantSpec, Rule

T = TypeVar("T")
_PRODUCT_IMAGES = 8
_THROUGH = frozenset({"Identity", "Relu", "LeakyRelu", "PRelu", "AveragePool", "GlobalAveragePool", "MaxPool"})
"""Operators that a positive factor for each channel passes."""
_BYTES = 1 << 30
"""Bytes of the tensors of one image that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The quantized layers with weights that consume a tensor."""

    tensor: str
    layers: tuple[Node, ...]

    @property
    def convolution(self) -> bool:
        return self.layers[0].kind == "conv"


def images_of(source: SourceFile, batches: Sequence[Arrays]) -> list[Arrays]:
    """Return images of a file's batches, each alone where the file takes that, evenly spread over all."""
    if one_image(source.proto, batches[0]) is None:
        return [batches[i * len(batches) // IMAGES] for i in range(IMAGES)] if len(batches) > IMAGES else list(batches)
    lengths = [max((len(value) for value in feed.values() if value.ndim), default=1) for feed in batches]
    places = [(feed, start) for feed, length in zip(batches, lengths, strict=True) for start in range(length)]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    return [{name: v[start : start + 1] if v.ndim else v for name, v in feed.items()} for feed, start in chosen]


def smooth_file(
    source: SourceFile, reading: Reading, placement: Placement, batches: Sequence[Arrays], spec: QuantSpec
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Scale channels of a float file, in place, and choose products that stay float.

    Args:
        source: in canonical form.
        reading: its graph.
        placement: what would be quantized.
        batches: some of the calibration data.
        spec: how ranges are chosen.

    Returns:
        Rules for the products, and notes.

    Raises:
        CalibrationError: the network fails on an image.
    """
    groups, products = _groups(source, reading, placement), _products(reading, placement)
    try:
        scales, poor = _chosen(source, reading, (groups, products), images_of(source, batches), spec)
    except (CalibrationError, RuntimeError):  # the open first dimension of its inputs is no batch
        scales, poor = _chosen(source, reading, (groups, products), batches[:_PRODUCT_IMAGES], spec)
    index, taken = Index(source), set(tensor_names(source.proto.graph))
    used = []
    for group in groups:
        scale = scales.get(group.tensor)
        if scale is not None and _write(index, reading, group, scale, taken, spec.only_target):
            used.append(scale)
            index = Index(source)
    rules = tuple(
        Rule(
            match=glob.escape(name), enable=False, reason=f"in 8 bits its result has {db:.0f} dB on calibration images"
        )
        for name, db in poor.items()
    )
    notes = []
    if used:
        worst = min(used, key=lambda scale: scale.before_db)
        notes.append(
            f"channels with outliers are scaled before {len(used)} layers (smooth: auto); the poorest went from "
            f"{worst.before_db:.0f} to {worst.after_db:.0f} dB"
        )
    return rules, tuple(notes)


def _chosen(
    source: SourceFile,
    reading: Reading,
    what: tuple[Sequence[_Group], Sequence[Node]],
    images: Sequence[Arrays],
    spec: QuantSpec,
) -> tuple[dict[str, ChannelScale], dict[str, float]]:
    """Return the scales by tensor, and the poor products with their signal to noise."""
    scales = {group.tensor: scale for group, scale in _scales(source, reading, what[0], images, spec)}
    return scales, dict(_poor(source, what[1], images[1::2][:_PRODUCT_IMAGES] or images, spec))


def _groups(source: SourceFile, reading: Reading, placement: Placement) -> list[_Group]:
    index, paths = Index(source), {site.path for site in placement.weights}

    def plain(node: Node) -> bool:
        """True for a layer of float32 that reads the tensor and its weight as they are in the file."""
        own = reading.weights[node.path].node
        weight = index.value(own.input[1])
        return own.input[0] == node.inputs[0].name and weight is not None and weight.dtype == np.float32

    found: dict[str, list[Node]] = {}
    for node in reading.view.nodes:
        weighted = node.kind in ("linear", "conv") and node.path in paths and node.path in reading.weights
        if weighted and node.inputs[0].kind != "input" and len(node.inputs[0].shape or ()) > 1 and plain(node):
            found.setdefault(node.inputs[0].name, []).append(node)
    groups = [_Group(tensor=name, layers=tuple(layers)) for name, layers in found.items()]
    return [group for group in groups if len({layer.kind for layer in group.layers}) == 1]


def _products(reading: Reading, placement: Placement) -> list[Node]:
    stays = {row.layer for row in placement.decisions if row.decision == "float"}
    nodes = [node for node in reading.view.nodes if node.kind == "matmul" and node.path and node.layer not in stays]
    found = [node for node in nodes if len(node.inputs) == 2 and all(each.shape for each in node.inputs)]
    made = {node.name: reading.nodes[node.name][0] for node in found}
    plain = {name for name, node in made.items() if node.op_type == "MatMul"}
    return [n for n in found if n.name in plain and [each.name for each in n.inputs] == list(made[n.name].input)]


def _scales(
    source: SourceFile, reading: Reading, groups: Sequence[_Group], images: Sequence[Arrays], spec: QuantSpec
) -> Iterator[tuple[_Group, ChannelScale]]:
    """Yield the groups that get a scale; the tensors of a part of them are computed at a time."""
    sizes = {node.name: 4 * elements(node.shape) for node in reading.view.nodes}
    for part in _parts(groups, lambda group: sizes[group.tensor]):
        session, generator = FloatSession(source, [group.tensor for group in part]), torch.Generator().manual_seed(0)
        samples: dict[str, list[Sample]] = {group.tensor: [] for group in part}
        for feed in images:
            found = session.run(feed)
            for group in part:
                x = torch.from_numpy(np.asarray(found[group.tensor], np.float32))
                taken = sample_of(x, convolution=group.convolution, images=len(images), generator=generator)
                samples[group.tensor].append(taken)
        for group in part:
            consumers = [_consumer(reading, layer) for layer in group.layers]
            if all(consumer is not None for consumer in consumers):
                known = [consumer for consumer in consumers if consumer is not None]
                scale = channel_scale(samples[group.tensor], known, spec.activations)
                if scale is not None:
                    yield group, scale


def _poor(
    source: SourceFile, products: Sequence[Node], images: Sequence[Arrays], spec: QuantSpec
) -> Iterator[tuple[str, float]]:
    """Yield the products whose results are poor in 8 bits, with the signal to noise, dB."""
    for part in _parts(products, lambda node: sum(4 * elements(each.shape) for each in node.inputs)):
        names = dict.fromkeys(each.name for node in part for each in node.inputs)
        session = FloatSession(source, names)
        found = [session.run(feed) for feed in images]
        for node in part:
            pairs = [
                tuple(torch.from_numpy(np.asarray(values[each.name], np.float32)) for each in node.inputs)
                for values in found
            ]
            db = product_db([(left, right) for left, right in pairs], spec.activations)
            if db < FLOAT_DB:
                yield node.layer, db


def _parts(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    part: list[T] = []
    total = 0
    for item in items:
        if part and total + size(item) > _BYTES:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def _consumer(reading: Reading, layer: Node) -> Consumer | None:
    parameters, node = layer.parameters, reading.weights[layer.path].node
    weight = parameters.weight() if parameters is not None else None
    if weight is None or parameters is None:
        return None
    if layer.kind == "linear":
        return Consumer(weight=weight, groups=1, compute=lambda x, w: x @ w.T)
    rank = weight.ndim - 2
    strides, dilations = (list(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
    groups = parameters.groups
    return Consumer(weight=weight, groups=groups, compute=convolve(strides, dilations, groups))


def _write(index: Index, reading: Reading, group: _Group, scale: ChannelScale, taken: set[str], target: str) -> bool:
    """Write a scale into the graph of an index; False if the target would compute a Mul before a convolution."""
    factor = (1 / scale.scale).numpy().astype(np.float32)
    nodes = [reading.weights[layer.path].node for layer in group.layers]
    alone = group.tensor not in index.outputs and len(index.consumers[group.tensor]) == len(nodes)
    plan = _absorbed(index, reading, group, factor) if alone else None
    if plan is None and target == "onnxruntime" and group.convolution:
        return False  # its kernels for convolutions want a pair before the Mul, whose range would have the outliers
    graph = index.graph

    def constant(node: onnx.NodeProto, place: int, value: NDArray[np.float32]) -> None:
        name = renamed([f"{node.input[place]}_smooth"], taken)[f"{node.input[place]}_smooth"]
        graph.initializer.append(constant_tensor(name, value.astype(np.float32)))
        node.input[place] = name

    if plan is None:
        name = renamed([f"{group.tensor}_smooth"], taken)[f"{group.tensor}_smooth"]
        shape = (1, -1, *(1,) * (len(group.layers[0].inputs[0].shape or ()) - 2)) if group.convolution else (-1,)
        first = next(place for place, node in enumerate(graph.node) if group.tensor in node.output)
        added = helper.make_node("Mul", [group.tensor, f"{name}_scale"], [name], name=name)
        graph.initializer.append(constant_tensor(f"{name}_scale", factor.reshape(shape)))
        graph.node.insert(first + 1, added)
        for node in nodes:
            node.input[0] = name
    for node, place, value in plan or []:
        constant(node, place, value)
    for layer in group.layers:
        weight = reading.weights[layer.path]
        value = with_scale(layer.parameters.weight(), scale.scale, layer.parameters.groups).numpy()  # type: ignore
        constant(weight.node, weight.place, value.T if weight.transposed else value)
    return True


_Change = tuple[onnx.NodeProto, int, NDArray[np.float32]]


def _absorbed(index: Index, reading: Reading, group: _Group, factor: NDArray[np.float32]) -> list[_Change] | None:
    """Return the new constants of the operations before, which make the tensor times a factor; None if none do."""
    compound = {id(node): name for name, members in reading.nodes.items() if len(members) > 1 for node in members}
    kinds = {node.name: node.kind for node in reading.view.nodes}
    changes: list[_Change] = []
    name = group.tensor
    while (node := index.producers.get(name)) is not None:
        if name != group.tensor and index.alone(name) is None:
            return None
        if kinds.get(compound.get(id(node), ""), "layer_norm") not in ("layer_norm", "linear"):
            return None
        if node.op_type in _THROUGH:
            name = node.input[0]
            continue
        value = _constants(index, node)
        if node.op_type == "Add" and len(value) == 1:
            ((place, old),) = value.items()
            changes.append((node, place, _times(old, factor, group)))
            name = node.input[1 - place]
            continue
        done = _scaled(index, node, value, factor, group)
        return None if done is None else changes + done
    return None


def _scaled(
    index: Index,
    node: onnx.NodeProto,
    values: Mapping[int, NDArray[np.float32]],
    factor: NDArray[np.float32],
    group: _Group,
) -> list[_Change] | None:
    """Return the new constants of an operation whose result is to be times a factor; None if it has none."""
    if (node.op_type == "Mul" and len(values) == 1) or (node.op_type == "Div" and list(values) == [1]):
        ((place, old),) = values.items()
        return [(node, place, _times(old, factor if node.op_type == "Mul" else 1 / factor, group))]
    weighted = node.op_type == "Conv" if group.convolution else node.op_type in ("MatMul", "Gemm")
    if weighted and 1 in values and (len(node.input) < 3 or not node.input[2] or 2 in values):
        weight = values[1]
        columns = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute(node, "transB", 0))
        if weight.shape[-1 if columns else 0] != len(factor):
            return None
        by = factor if columns else factor.reshape(-1, *(1,) * (weight.ndim - 1))
        return [
            (node, 1, weight * by),
            *[
                (node, 2, np.broadcast_to(value, factor.shape) * factor)
                for place, value in values.items()
                if place == 2
            ],
        ]
    axis = attribute(node, "axis", -1)
    norm = (
        node.op_type == "BatchNormalization"
        if group.convolution
        else (node.op_type == "LayerNormalization" and axis in (-1, len(group.layers[0].inputs[0].shape or ()) - 1))
    )
    if norm and {place for place in (1, 2) if len(node.input) > place and node.input[place]} <= values.keys():
        return [(node, place, values[place] * factor) for place in (1, 2) if place in values]
    return None


def _constants(index: Index, node: onnx.NodeProto) -> dict[int, NDArray[np.float32]]:
    """Return the constant inputs of a node in float32, by place."""
    found = {}
    for place, name in enumerate(node.input):
        value = index.value(name) if name in index.constants and name else None
        if value is not None and value.dtype == np.float32:
            found[place] = value
    return found


def _times(old: NDArray[np.float32], factor: NDArray[Any], group: _Group) -> NDArray[np.float32]:
    """Return a constant of an elementwise operation times the factor of each channel."""
    rank = len(group.layers[0].inputs[0].shape or ())
    return (old * (factor.reshape(1, -1, *(1,) * (rank - 2)) if group.convolution else factor)).astype(np.float32)
