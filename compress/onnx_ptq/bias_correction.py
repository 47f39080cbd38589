"""`bias_correction: auto` of a file (`quantization.ptq.bias_correction` has the formulas)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch import Tensor

from compress.engines.base import Arrays
from compress.onnx_graph.graph import attribute
from compress.onnx_ptq.improve import write_parameter
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession
from compress.onnx_ptq.to_torch.builder import Place
from compress.quantization.numerics import fake_quantize, scale_from_amax
from compress.quantization.placement.decisions import ActivationSite, Placement, WeightSite
from compress.quantization.placement.view import Node
from compress.quantization.ptq.bias_correction import Window, certain_shift, mean_inputs
from compress.quantization.ptq.zero_points import spread


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
    """Write the bias of each quantized layer of a float file so that the mean of its quantized results is right.

    Args:
        source: the float graph.
        index: the same graph, which is changed.
        reading: the graph that the placement is for.
        placement: the quantizers.
        amax: ranges by quantizer.
        images: inputs by name; at most `zero_points.LOOKED_AT` of them, evenly spread, are looked at.

    Returns:
        A note, if there is such a layer.

    Raises:
        CalibrationError: the network fails on an image.
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
    """The window of a convolution; None of other layers."""
    if node.op_type != "Conv":
        return None
    rank = len(kernel)
    strides, dilations = (tuple(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
    pads = tuple(attribute(node, "pads", [0] * 2 * rank))
    return Window(kernel=kernel, strides=strides, dilations=dilations, before=pads[:rank], after=pads[rank:])
