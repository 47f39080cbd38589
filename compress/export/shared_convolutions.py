"""Convolutions without a bias whose result several operations read, given one that changes nothing, for OpenVINO.

OpenVINO computes an INT8 convolution in integers and dequantizes behind it. Of two readers, a quantizer takes the
dequantization into its own ranges, and the other keeps it as a product; then the CPU plugin moves that product into the
convolution (2026.4), and the quantizer reads values that are dequantized already: 0 dB. A bias keeps the readers
behind one sum, where they read the same; a bias of zeros would be removed, so it is the smallest that is none.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper

_SMALLEST = {np.dtype(np.float32): np.finfo(np.float32).tiny, np.dtype(np.float16): np.float16(2**-24)}


def bias_shared_convolutions(proto: onnx.ModelProto) -> int:
    """Give every convolution of an INT8 weight that has no bias, and several readers, one; in place.

    Returns:
        How many were given one.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}
    readers = Counter(name for node in graph.node for name in node.input) + Counter(
        value.name for value in graph.output
    )
    changed = 0
    for node in graph.node:
        weight = made.get(node.input[1]) if node.op_type == "Conv" and len(node.input) == 2 else None
        if weight is None or weight.op_type != "DequantizeLinear" or readers[node.output[0]] < 2:
            continue
        scale = numpy_helper.to_array(constants[weight.input[1]])
        bias = np.full(constants[weight.input[0]].dims[0], _SMALLEST[scale.dtype], scale.dtype)
        name = f"{node.output[0]}_bias"
        graph.initializer.append(numpy_helper.from_array(bias, name))
        node.input.append(name)
        changed += 1
    return changed
