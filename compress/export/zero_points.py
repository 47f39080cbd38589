"""Folds the zero point of a convolution's input into its bias, for OpenVINO.

A signed tensor is stored as q = x / scale + 128, because OpenVINO computes convolutions of unsigned integers. Its
kernels of 1x1 convolutions then correct the sums for the zero point in every run. Without padding that correction is
the same at every position:

    conv(w, scale * (q - 128)) + b  =  conv(w, scale * q) + (b - scale * 128 * sum of w)

so it belongs into the bias, and the convolution reads the integers as they are. The convolutions that widen the blocks
of MobileNetV2 and EfficientNet-Lite0 are such ones: the networks take 0.96 and 0.98 of the time. A padded zero would be
another number than 128, so that padded convolutions keep the zero point. The bias is rounded to float32, which is the
only change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.export.names import added_constant, added_tensor, shifted_tensor
from compress.export.onnx_graph import OnnxGraph, attribute, consumed_as
from compress.export.openvino_forms import moves_its_stride

_ZERO = np.zeros((), np.uint8)


def zero_points_into_biases(proto: onnx.ModelProto) -> int:
    """Let convolutions without padding read unsigned integers without their zero point; in place.

    Only float32 models change: a bias in half precision would be rounded too far.

    Returns:
        Number of convolutions that were changed.
    """
    view = OnnxGraph(proto.graph)
    results = {value.name for value in proto.graph.output}
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        offset = _offset(node, view)
        read = view.consumers.get(node.output[0], []) if offset else []
        biases = [
            (conv, bias) for conv in read if (bias := _moved_bias(conv, node.output[0], offset, view)) is not None
        ]
        if len(biases) < len(read):  # OpenVINO (2026.4) moves the stride of a 1x1 up, and then computes it in float
            biases = [(conv, bias) for conv, bias in biases if not moves_its_stride(conv, view)]
        if len(biases) < len(read) or not biases or node.output[0] in results:
            nodes.append(node)
        if not biases:
            continue
        shifted = view.free(shifted_tensor(node.output[0]))
        zero = view.add_constant(added_constant(shifted, "zero_point"), _ZERO)
        name = shifted_tensor(node.name)
        nodes.append(helper.make_node("DequantizeLinear", [*node.input[:2], zero], [shifted], name=name))
        for conv, bias in biases:
            consumed_as(conv, node.output[0], shifted)
            del conv.input[2:]
            conv.input.append(view.add_constant(added_tensor(conv.output[0], "shifted_bias"), bias))
        changed += len(biases)
    view.replace_nodes(nodes)
    return changed


def _offset(node: onnx.NodeProto, view: OnnxGraph) -> float:
    """Return the real value of the zero point of a quantized activation; 0 for any other node."""
    if node.op_type != "DequantizeLinear" or len(node.input) < 3 or node.input[0] in view.constants:
        return 0.0
    scale, zero_point = (view.array(name) for name in node.input[1:])
    if scale is None or zero_point is None or scale.dtype != np.float32 or zero_point.dtype != np.uint8:
        return 0.0
    return float(scale.reshape(-1)[0]) * int(zero_point.reshape(-1)[0]) if scale.size == 1 else 0.0


def _moved_bias(conv: onnx.NodeProto, source: str, offset: float, view: OnnxGraph) -> NDArray[Any] | None:
    """Return the bias of a convolution that reads a tensor shifted by `offset`, (C,); None if it pads, for example."""
    if conv.op_type != "Conv" or conv.input[0] != source or any(attribute(conv, "pads", [])):
        return None
    if attribute(conv, "auto_pad", b"NOTSET") not in {b"NOTSET", b"VALID"}:
        return None
    weight = view.dequantizer(conv.input[1])
    arrays = [] if weight is None else [view.array(name) for name in weight.input]
    if weight is None or len(arrays) != 3 or any(array is None for array in arrays):
        return None
    q, scale, zero_point = (np.asarray(array) for array in arrays)
    bias = view.array(conv.input[2]) if len(conv.input) > 2 else np.zeros(len(q), np.float32)
    whole = scale.ndim == 0 or (scale.shape == q.shape[:1] and attribute(weight, "axis", 1) == 0)
    if not whole or q.dtype != np.int8 or zero_point.any() or bias is None or bias.dtype != np.float32:
        return None
    sums = q.reshape(len(q), -1).sum(1, dtype=np.int64) * scale.astype(np.float64)
    return np.asarray(bias.astype(np.float64) - offset * sums, np.float32)
