r"""Where the scales of a weight's channels stand: in its DequantizeLinear, or as a factor behind the layer.

A convolution with integer weight q, activation scale s_x and one weight scale s_c for each output channel c is

    y_c = s_x s_c \sum q_w q_x + b_c  =  m_c (s_x s \sum q_w q_x) + b_c,   s = max_c s_c,  m_c = s_c / s

so that a layer with one scale, followed by a product with m and a sum with b, computes the same. Engines that fuse
per-channel scales into their INT8 kernels want the first form. TensorRT-RTX 1.7 does not fuse them: its convolution
then writes FP32, whatever the precision of the rest, and another kernel scales, adds and quantizes. With one scale for
the weight the convolution writes FP16, and the kernel that quantizes anyway takes the factors along: the accuracy of
channel scales at two thirds of the traffic. In fp16 the unscaled sum must stay below 65504, which a channel reaches
only if its pre-activation, measured in steps of the largest channel's weight scale, does.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.export.cleanup import drop_unused

_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0, "MatMul": 1}


def scales_on_outputs(proto: onnx.ModelProto) -> int:
    """Move the channel scales of quantized weights behind their layers, in place.

    Layers whose bias is computed, whose weight has other readers or whose scale is one number already stay.

    Returns:
        How many layers were changed.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in graph.node:
        nodes.append(node)
        weight = producers.get(node.input[1]) if node.op_type in _CHANNEL_AXIS else None
        if weight is None or weight.op_type != "DequantizeLinear" or readers[weight.output[0]] > 1:
            continue
        scale = constants.get(weight.input[1])
        bias = constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if scale is None or not _movable(node, weight, bias):
            continue
        values = numpy_helper.to_array(scale)
        if values.ndim != 1 or values.size < 2:
            continue
        _one_scale(graph, weight, constants, values)
        nodes += _behind(graph, node, values, None if bias is None else numpy_helper.to_array(bias), constants)
        changed += 1
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused(graph)
    return changed


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _movable(node: onnx.NodeProto, weight: onnx.NodeProto, bias: onnx.TensorProto | None) -> bool:
    """Whether the layer's output is linear in its channel scales in the one way that `_behind` writes."""
    if _attribute(weight, "axis", 1) != _CHANNEL_AXIS[node.op_type]:
        return False
    if len(node.input) > 2 and node.input[2] and bias is None:
        return False
    if node.op_type == "Gemm":
        plain = all(_attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        return plain and _attribute(node, "transB", 0) == 1 and _attribute(node, "transA", 0) == 0
    return node.op_type != "ConvTranspose" or _attribute(node, "group", 1) == 1


def _one_scale(
    graph: onnx.GraphProto,
    weight: onnx.NodeProto,
    constants: dict[str, onnx.TensorProto],
    scales: NDArray[np.generic],
) -> None:
    """Give a DequantizeLinear the largest of its scales, and one zero point."""
    base = weight.input[1]
    weight.input[1] = _constant(graph, f"{base}_largest", np.asarray(scales.max(), scales.dtype))
    if len(weight.input) > 2 and weight.input[2]:
        zero = numpy_helper.to_array(constants[weight.input[2]])
        weight.input[2] = _constant(graph, f"{base}_zero", np.asarray(zero.flat[0], zero.dtype))
    kept = [a for a in weight.attribute if a.name != "axis"]
    del weight.attribute[:]
    weight.attribute.extend(kept)


def _behind(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    scales: NDArray[np.generic],
    bias: NDArray[np.generic] | None,
    constants: dict[str, onnx.TensorProto],
) -> list[onnx.NodeProto]:
    """The product, and the sum where there is a bias, that follow a layer; its output keeps its name."""
    output, tail = node.output[0], _tail(node, constants, graph)
    shape = (1, -1, *[1] * tail) if tail else (-1,)
    factor = (scales.astype(np.float64) / float(scales.max())).astype(scales.dtype).reshape(shape)
    node.output[0] = f"{output}_unscaled"
    product = output if bias is None else f"{output}_scaled"
    name = _constant(graph, f"{node.name}_channel_scales", factor)
    added = [helper.make_node("Mul", [node.output[0], name], [product], name=f"{node.name}_channel_scales_Mul")]
    if bias is not None:
        name = _constant(graph, f"{node.name}_channel_bias", bias.reshape(shape))
        added.append(helper.make_node("Add", [product, name], [output], name=f"{node.name}_channel_bias_Bias"))
        del node.input[2]
    return added


def _tail(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto], graph: onnx.GraphProto) -> int:
    """Axes behind the channels in the layer's output: those of the kernel."""
    if node.op_type in {"Gemm", "MatMul"}:
        return 0
    weight = next(n for n in graph.node if n.output[0] == node.input[1])
    return len(constants[weight.input[0]].dims) - 2


def _constant(graph: onnx.GraphProto, name: str, value: NDArray[np.generic]) -> str:
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
    return name
