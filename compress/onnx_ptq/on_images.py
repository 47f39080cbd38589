"""Channel scales, zero points and biases of a float file that becomes 8 bits, measured on some images.

`quantization.ptq` switches them on (`channel_scales`, `zero_points`, `bias_correction`). A channel scale is folded into
the operation before it if that is linear (a layer, a normalization, a product with a constant); else it is a Mul.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_graph import attribute
from compress.onnx_ptq.improve import write_parameter
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.passes import one_image
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession
from compress.onnx_ptq.to_torch import Place
from compress.quantization import QuantSpec, Rule
from compress.quantization.numerics import fake_quantize, scale_from_amax
from compress.quantization.placement.decisions import ActivationSite, Placement, WeightSite
from compress.quantization.placement.place import place
from compress.quantization.placement.view import Node
from compress.quantization.ptq.bias_correction import Window, certain_shift, mean_inputs
from compress.quantization.ptq.on_images import (
    ChannelScale,
    Consumer,
    Group,
    choose_scales,
    convolve,
    groups_of,
    lowest_expected,
    poor_products,
    products_of,
    scaling_note,
    signed_tensors,
    spread,
    with_scale,
)
from compress.quantization.ptq.walk import IMAGES

T = TypeVar("T")

_THROUGH = frozenset({"Identity", "Relu", "LeakyRelu", "PRelu", "AveragePool", "GlobalAveragePool", "MaxPool"})
"""Operators that a positive factor for each channel passes."""
_BATCHES = 8
"""Batches that are looked at where they cannot be split into images."""


def images_of(source: SourceFile, batches: Sequence[Arrays]) -> list[Arrays]:
    """Return images of a file's batches, each alone where the file takes that, evenly spread over all."""
    if one_image(source.proto, batches[0]) is None:
        return [batches[i * len(batches) // IMAGES] for i in range(IMAGES)] if len(batches) > IMAGES else list(batches)
    lengths = [max((len(value) for value in feed.values() if value.ndim), default=1) for feed in batches]
    places = [(feed, start) for feed, length in zip(batches, lengths, strict=True) for start in range(length)]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    return [{name: v[start : start + 1] if v.ndim else v for name, v in feed.items()} for feed, start in chosen]


def on_images(work: Callable[[Sequence[Arrays]], T], source: SourceFile, batches: Sequence[Arrays]) -> T:
    """Return what `work` finds on images of a file's batches, or on batches where they cannot be split."""
    try:
        return work(images_of(source, batches))
    except (CalibrationError, RuntimeError):  # the open first dimension of its inputs is no batch
        return work(batches[:_BATCHES])


def smooth_file(
    source: SourceFile, reading: Reading, placement: Placement, batches: Sequence[Arrays], spec: QuantSpec
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Scale channels of a float file in canonical form, in place; return rules for products that stay float, and notes.

    `placement` is what would be quantized, `batches` are some of the calibration data.
    """
    choose = partial(_chosen, source, reading, _groups(source, reading, placement), _products(reading, placement), spec)
    scales, rules = on_images(choose, source, batches)
    index, used = Index(source), list[ChannelScale]()
    for group, scale in scales:
        if _write(index, reading, group, scale, spec.only_target):
            used.append(scale)
            index = Index(source)
    return rules, scaling_note(used)


def _chosen(
    source: SourceFile,
    reading: Reading,
    groups: Sequence[Group],
    products: Sequence[Node],
    spec: QuantSpec,
    images: Sequence[Arrays],
) -> tuple[list[tuple[Group, ChannelScale]], tuple[Rule, ...]]:
    def watch(names: Sequence[str]) -> Callable[[Arrays], Mapping[str, Tensor]]:
        session = FloatSession(source, names)
        return lambda feed: {
            name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in session.run(feed).items()
        }

    consumer = partial(_consumer, reading)
    scales, clipped = choose_scales(groups, images, spec, watch=watch, consumer=consumer, least=lambda _: 0.0)
    return scales, (*clipped, *poor_products(products, images, spec, watch=watch))


def _groups(source: SourceFile, reading: Reading, placement: Placement) -> list[Group]:
    index = Index(source)

    def plain(node: Node) -> bool:
        """True for a layer of float32 that reads the tensor and its weight as they are in the file."""
        if node.path not in reading.weights:
            return False
        own = reading.weights[node.path].node
        weight = index.value(own.input[1])
        return own.input[0] == node.inputs[0].name and weight is not None and weight.dtype == np.float32

    return groups_of(reading.view, placement, plain)


def _products(reading: Reading, placement: Placement) -> list[Node]:
    found = [node for node in products_of(reading.view, placement) if node.path]
    made = {node.name: reading.nodes[node.name][0] for node in found}
    plain = {name for name, node in made.items() if node.op_type == "MatMul"}
    return [n for n in found if n.name in plain and [each.name for each in n.inputs] == list(made[n.name].input)]


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


def _write(index: Index, reading: Reading, group: Group, scale: ChannelScale, target: str) -> bool:
    """Write a scale into the graph of an index; False if the target would compute a Mul before a convolution."""
    factor = (1 / scale.scale).numpy().astype(np.float32)
    nodes = [reading.weights[layer.path].node for layer in group.layers]
    alone = group.tensor not in index.outputs and len(index.consumers[group.tensor]) == len(nodes)
    plan = _absorbed(index, reading, group, factor) if alone else None
    if plan is None and target == "onnxruntime" and group.convolution:
        return False  # its kernels for convolutions want a pair before the Mul, whose range would have the outliers
    graph = index.graph

    def constant(node: onnx.NodeProto, place: int, value: NDArray[np.float32]) -> None:
        old, name = node.input[place], index.free(f"{node.input[place]}_smooth")
        if old in index.unchanging:
            node.input[place] = index.add_constant(name, value.astype(np.float32))
            return
        factors = index.add_constant(f"{name}_scale", value.astype(np.float32))
        node.input[place] = name
        at = next(i for i, each in enumerate(graph.node) if each is node or each.name == node.name)
        graph.node.insert(at, helper.make_node("Mul", [old, factors], [name], name=name))

    if plan is None:
        name = index.free(f"{group.tensor}_smooth")
        shape = (1, -1, *(1,) * (len(group.layers[0].inputs[0].shape or ()) - 2)) if group.convolution else (-1,)
        first = next(place for place, node in enumerate(graph.node) if group.tensor in node.output)
        constants = index.add_constant(f"{name}_scale", factor.reshape(shape))
        added = helper.make_node("Mul", [group.tensor, constants], [name], name=name)
        graph.node.insert(first + 1, added)
        for node in nodes:
            node.input[0] = name
    for node, position, value in plan or []:
        constant(node, position, value)
    for layer in group.layers:
        weight = reading.weights[layer.path]
        value = with_scale(layer.parameters.weight(), scale.scale, layer.parameters.groups).numpy()  # type: ignore
        constant(weight.node, weight.place, value.T if weight.transposed else value)
    return True


_Change = tuple[onnx.NodeProto, int, NDArray[np.float32]]
"""A node, the place of an input, and the new value of that constant, or the factor of an input that is computed."""


def _absorbed(index: Index, reading: Reading, group: Group, factor: NDArray[np.float32]) -> list[_Change] | None:
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
        done = _scaled(index, reading, node, value, factor, group)
        return None if done is None else changes + done
    return None


def _scaled(
    index: Index,
    reading: Reading,
    node: onnx.NodeProto,
    values: Mapping[int, NDArray[np.float32]],
    factor: NDArray[np.float32],
    group: Group,
) -> list[_Change] | None:
    """Return the new constants of an operation whose result is to be times a factor; None if it has none."""
    if (node.op_type == "Mul" and len(values) == 1) or (node.op_type == "Div" and list(values) == [1]):
        ((place, old),) = values.items()
        return [(node, place, _times(old, factor if node.op_type == "Mul" else 1 / factor, group))]
    gate = _gate(reading, node, factor) if node.op_type == "Mul" and group.convolution else None
    if gate is not None:
        return [(node, gate, factor.reshape(1, -1, *(1,) * (len(group.layers[0].inputs[0].shape or ()) - 2)))]
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


def _gate(reading: Reading, node: onnx.NodeProto, factor: NDArray[np.float32]) -> int | None:
    """The operand of a product that has one number a channel, as in squeeze and excite: a factor is free there."""
    shapes = {made.name: made.shape or () for made in reading.view.nodes if made.name in node.input}
    found = [shapes.get(name, ()) for name in node.input]
    gates = [shape[1:2] == (len(factor),) and math.prod(shape[2:]) == 1 for shape in found]
    return gates.index(True) if any(gates) and all(found) else None


def _constants(index: Index, node: onnx.NodeProto) -> dict[int, NDArray[np.float32]]:
    found = {}
    for position, name in enumerate(node.input):
        value = index.value(name) if name in index.unchanging and name else None
        if value is not None and value.dtype == np.float32:
            found[position] = value
    return found


def _times(old: NDArray[np.float32], factor: NDArray[Any], group: Group) -> NDArray[np.float32]:
    rank = len(group.layers[0].inputs[0].shape or ())
    return (old * (factor.reshape(1, -1, *(1,) * (rank - 2)) if group.convolution else factor)).astype(np.float32)


def place_on_images(source: SourceFile, reading: Reading, spec: QuantSpec, batches: Sequence[Arrays]) -> Placement:
    """Place quantizers, with zero points from images where the specification looks at them."""
    placement = place(reading.view, spec)
    tensors = signed_tensors(placement, spec)
    if not tensors:
        return placement
    seen = on_images(lambda images: _ranges(FloatSession(source, tensors), images), source, batches)
    index = Index(source)

    def constant(user: Node, node: Node) -> Tensor | None:
        made = reading.nodes.get(user.name, ())
        others = [name for each in made for name in each.input if name != node.name]
        value = index.value(others[0]) if len(made) == len(others) == 1 and others[0] in index.unchanging else None
        return None if value is None else torch.tensor(value, dtype=torch.float32)

    return place(reading.view, spec, lowest_expected(reading.view, seen, constant))


def _ranges(session: FloatSession, images: Sequence[Arrays]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for image in spread(images):
        for name, value in session.run(image).items():
            array = np.asarray(value)
            if array.size:
                low, high = found.get(name, (math.inf, -math.inf))
                found[name] = min(low, float(array.min())), max(high, float(array.max()))
    return found


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A quantized layer: its operation, the quantizers of input and weight, its window, where its bias is."""

    operation: Node
    site: ActivationSite
    weight: WeightSite
    window: Window | None
    place: Place

    @property
    def input(self) -> str:
        return self.operation.inputs[0].name


@torch.no_grad()
def correct_biases(
    source: SourceFile,
    index: Index,
    reading: Reading,
    placement: Placement,
    amax: Mapping[str, Tensor],
    images: Sequence[Arrays],
) -> tuple[str, ...]:
    """Write the bias of each quantized layer so that the mean of its quantized results is right; return a note if any.

    `index` is of the float graph `source`, and is changed; at most `zero_points.LOOKED_AT` images, evenly spread, are
    looked at.
    """
    layers = _layers(reading, placement)
    if not layers:
        return ()
    session = FloatSession(source, dict.fromkeys(layer.input for layer in layers))
    means: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for image in spread(images):
        found = session.run(image)
        rounded: dict[tuple[str, str], Tensor] = {}
        for layer, own in zip(layers, means, strict=True):
            x = torch.from_numpy(np.asarray(found[layer.input], np.float32))
            key, scale = (layer.input, layer.site.name), scale_from_amax(amax[layer.site.name], layer.site.format)
            if key not in rounded:
                rounded[key] = fake_quantize(x, scale, layer.site.format)
            own.append((mean_inputs(x, layer.window), mean_inputs(rounded[key], layer.window)))
    for layer, own in zip(layers, means, strict=True):
        _correct(index, layer, own, amax[f"{layer.weight.path}.weight_quantizer"])
    return (f"the biases of {len(layers)} layers make up for the mean error of rounding (bias_correction: auto)",)


def _correct(index: Index, layer: _Layer, means: Sequence[tuple[Tensor, Tensor]], amax: Tensor) -> None:
    """Write a bias; `means` are the inputs of each image, in float and rounded."""
    parameters = layer.operation.parameters
    weight = None if parameters is None else parameters.weight()
    if parameters is None or weight is None:
        return
    rounded = fake_quantize(weight, scale_from_amax(amax, layer.weight.format), layer.weight.format)
    bias = parameters.bias()
    bias = torch.zeros(len(weight)) if bias is None else bias.reshape(-1)
    write_parameter(index, layer.place, bias - certain_shift(weight, rounded, means, parameters.groups))


def _layers(reading: Reading, placement: Placement) -> list[_Layer]:
    weights = {site.path: site for site in placement.weights}
    sites, found = {edge: site for site in placement.activations for edge in site.edges}, list[_Layer]()
    for node in reading.view.nodes:
        if node.kind not in ("conv", "linear") or node.path not in weights:
            continue
        site, place = _site(node, sites), _place(reading, node)
        weight = None if node.parameters is None else node.parameters.weight()
        if site is None or place is None or weight is None:
            continue
        window = _window(reading.weights[node.path].node, tuple(weight.shape[2:]))
        found.append(_Layer(operation=node, site=site, weight=weights[node.path], window=window, place=place))
    return found


def _site(layer: Node, sites: Mapping[tuple[str, str], ActivationSite]) -> ActivationSite | None:
    """The quantizer of a layer's input, which may be before operations that Q/DQ pass."""
    consumer, tensor = layer, layer.inputs[0]
    while (tensor.name, consumer.name) not in sites:
        if not tensor.inputs:
            return None
        consumer, tensor = tensor, tensor.inputs[0]
    return sites[tensor.name, consumer.name]


def _place(reading: Reading, layer: Node) -> Place | None:
    """Where the bias of a layer is, or can be without another operation; None where that is not known."""
    made, own = reading.nodes[layer.name], reading.weights[layer.path].node
    given = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if own.op_type == "Gemm" and any(attribute(own, name, usual) != usual for name, usual in given.items()):
        return None
    bias = None if layer.parameters is None else layer.parameters.bias()
    if own.op_type != "Conv" and bias is not None and bias.numel() != (bias.shape[-1] if bias.ndim else 1):
        return None  # one of each row
    if own.op_type == "Conv" and attribute(own, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if len(made) == 1:
        return None if own.op_type == "MatMul" else Place(node=own.name, input=2)
    add = made[-1]
    return Place(node=add.name, input=int(add.input[0] in own.output)) if add.op_type == "Add" else None


def _window(node: onnx.NodeProto, kernel: tuple[int, ...]) -> Window | None:
    if node.op_type != "Conv":
        return None
    rank = len(kernel)
    strides, dilations = (tuple(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
    pads = tuple(attribute(node, "pads", [0] * 2 * rank))
    return Window(kernel=kernel, strides=strides, dilations=dilations, before=pads[:rank], after=pads[rank:])
