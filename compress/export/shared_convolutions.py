"""Gives a bias that changes no value to convolutions without one whose result has several consumers, for OpenVINO.

OpenVINO computes an INT8 convolution in integers and dequantizes its result. Of two consumers, a quantizer merges the
dequantization into its own ranges, and the other consumer keeps it as a product; the CPU plugin then moves that product
into the convolution (2026.4), and the quantizer gets values that are dequantized already: the signal to noise is 0 dB.
With a bias both consumers read the result of one sum. A bias of zeros would be removed, so it is the smallest positive
number.
"""

from __future__ import annotations

import numpy as np
import onnx

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph

_SMALLEST = {np.dtype(np.float32): np.finfo(np.float32).tiny, np.dtype(np.float16): np.float16(2**-24)}


def bias_shared_convolutions(proto: onnx.ModelProto) -> int:
    """Add a bias to every convolution of an INT8 weight that has none and has several consumers; in place.

    Returns:
        Number of convolutions that were changed.
    """
    view = OnnxGraph(proto.graph)
    results = {value.name for value in proto.graph.output}
    changed = 0
    for node in proto.graph.node:
        output = node.output[0]
        weight = view.dequantizer(node.input[1]) if node.op_type == "Conv" and len(node.input) == 2 else None
        if weight is None or len(view.consumers.get(output, ())) + (output in results) < 2:
            continue
        channels, scale = view.constants[weight.input[0]].dims[0], view.array(weight.input[1])
        dtype = scale.dtype if scale is not None else np.dtype(np.float32)
        bias = np.full(channels, _SMALLEST[dtype], dtype)
        node.input.append(view.add_constant(added_tensor(output, "bias"), bias))
        changed += 1
    return changed
