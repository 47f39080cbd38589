r"""What happens to a file for TensorRT-RTX: the scales of a weight's channels become a factor after the layer.

A convolution with integer weight q, activation scale s_x and one weight scale s_c for each output channel c is

    y_c = s_x s_c \sum q_w q_x + b_c  =  m_c (s_x s \sum q_w q_x) + b_c,   s = max_c s_c,  m_c = s_c / s

TensorRT-RTX 1.7 does not fuse channel scales: its convolution then writes FP32, whatever the precision of the rest, and
another kernel scales, adds and quantizes. With one scale the convolution writes FP16, and the kernel that quantizes
anyway multiplies by the factors: two thirds of the traffic. In fp16 the unscaled sum must stay below 65504; a channel
exceeds it only if its pre-activation does, measured in steps of the largest channel's weight scale.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.export.names import added_tensor
from compress.onnx_graph import OnnxGraph, attribute, drop_unread, replace_attributes

_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0, "MatMul": 1}


def scales_on_outputs(proto: onnx.ModelProto) -> int:
    """Move the channel scales of quantized weights after their layers, in place; return the number of layers.

    A layer is left alone if its bias is computed, if its weight has other consumers, or if it has one scale already.
    """
    view = OnnxGraph(proto.graph)

    def moved(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        weight = view.dequantizer(node.input[1]) if node.op_type in _CHANNEL_AXIS else None
        if weight is None or len(view.consumers[weight.output[0]]) > 1 or not _movable(node, weight, view):
            return None
        scales = view.array(weight.input[1])
        if scales is None or scales.ndim != 1 or scales.size < 2:
            return None
        _one_scale(view, weight, scales)
        return [node, *_factors(view, node, weight, scales)]

    changed = view.rewrite(moved)
    drop_unread(proto.graph)
    return changed


def _movable(node: onnx.NodeProto, weight: onnx.NodeProto, view: OnnxGraph) -> bool:
    """Return True if a layer's output is linear in its channel scales in the one form that `_factors` writes."""
    if attribute(weight, "axis", 1) != _CHANNEL_AXIS[node.op_type]:
        return False
    if _has_bias(node) and node.input[2] not in view.constants:
        return False
    if node.op_type == "Gemm":
        plain = all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        return plain and attribute(node, "transB", 0) == 1 and attribute(node, "transA", 0) == 0
    return node.op_type != "ConvTranspose" or attribute(node, "group", 1) == 1


def _has_bias(node: onnx.NodeProto) -> bool:
    return len(node.input) > 2 and bool(node.input[2])


def _one_scale(view: OnnxGraph, weight: onnx.NodeProto, scales: NDArray[np.generic]) -> None:
    base = weight.input[1]
    weight.input[1] = view.add_constant(added_tensor(base, "largest"), np.asarray(scales.max(), scales.dtype))
    zero = view.array(weight.input[2]) if _has_bias(weight) else None
    if zero is not None:
        weight.input[2] = view.add_constant(added_tensor(base, "zero"), np.asarray(zero.flat[0], zero.dtype))
    replace_attributes(weight, axis=None)


def _factors(
    view: OnnxGraph, node: onnx.NodeProto, weight: onnx.NodeProto, scales: NDArray[np.generic]
) -> list[onnx.NodeProto]:
    """Return the product, and the sum where there is a bias, that follow a layer; its output keeps its name."""
    output, bias = node.output[0], view.array(node.input[2]) if _has_bias(node) else None
    after = 0 if node.op_type in {"Gemm", "MatMul"} else len(view.constants[weight.input[0]].dims) - 2
    shape = (1, -1, *[1] * after) if after else (-1,)
    factor = (scales.astype(np.float64) / float(scales.max())).astype(scales.dtype).reshape(shape)
    node.output[0] = view.free(added_tensor(output, "unscaled"))
    product = output if bias is None else view.free(added_tensor(output, "scaled"))
    name = view.add_constant(added_tensor(node.name, "channel_scales"), factor)
    added = [helper.make_node("Mul", [node.output[0], name], [product], name=added_tensor(name, "Mul"))]
    if bias is not None:
        name = view.add_constant(added_tensor(node.name, "channel_bias"), bias.reshape(shape))
        added.append(helper.make_node("Add", [product, name], [output], name=added_tensor(name, "Bias")))
        del node.input[2]
    return added
