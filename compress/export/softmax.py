"""Bounds the result of a softmax between integers, for ONNX Runtime, whose integer kernel wraps around.

ONNX Runtime 1.31 fuses DequantizeLinear, Softmax and QuantizeLinear into QLinearSoftmax. Where a probability is larger
than 255 steps its result for uint8 is not 255 but wraps: a probability just above the calibrated range becomes 0 (5 dB
from what the file says). The least of it and that range is the same, and keeps the three apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph


def bounded_softmaxes(proto: onnx.ModelProto) -> int:
    """Put a Min between every Softmax of a dequantized tensor and the QuantizeLinear to uint8 after it, in place.

    Where 255 steps reach 1 there is nothing to bound.

    Returns:
        Number of nodes that were added.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    added = 0
    for node in proto.graph.node:
        source = view.producers.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
        if source is not None and source.op_type == "Softmax" and view.dequantizer(source.input[0]) is not None:
            scale, zero = view.array(node.input[1]), view.array(node.input[2]) if len(node.input) > 2 else None
            if scale is not None and scale.size == 1 and zero is not None and zero.dtype == np.uint8:
                top = np.asarray(254.75 * scale.reshape(()), scale.dtype)  # which rounds to 255
                if 255 * float(scale.reshape(())) < 1:
                    nodes.append(_bound(view, node, top))
                    added += 1
        nodes.append(node)
    view.replace_nodes(nodes)
    return added


def _bound(view: OnnxGraph, quantizer: onnx.NodeProto, top: NDArray[Any]) -> onnx.NodeProto:
    """Make the Min before a quantizer; a Clip there is removed by ONNX Runtime."""
    name = view.free(added_tensor(quantizer.output[0], "bounded"))
    most = view.add_constant(added_tensor(quantizer.output[0], "most"), top)
    node = helper.make_node("Min", [quantizer.input[0], most], [name])
    node.metadata_props.extend(quantizer.metadata_props)
    quantizer.input[0] = name
    return node
