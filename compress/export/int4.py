"""Writes weights of 4 bits and fewer as ONNX INT4, two integers in a byte, from opset 21 on.

torch has no 4-bit tensor, so the exporter writes such weights as INT8 constants and marks their DequantizeLinear; here
the constants become INT4. Opset 21 brings the type to Q/DQ; below it they stay INT8, the same integers in twice the
bytes. Activations of fewer than 8 bits always stay in 8-bit integers after a Clip.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from compress.export.names import INT4_KEY, added_tensor
from compress.export.onnx_graph import OnnxGraph, opset_of

OPSET = 21
"""First opset whose QuantizeLinear and DequantizeLinear take INT4."""


def pack_int4(proto: onnx.ModelProto) -> int:
    """Turn marked weights into INT4; in place.

    Returns:
        Number of weights; 0 below opset 21.
    """
    if opset_of(proto) < OPSET:
        return 0
    view, dtype = OnnxGraph(proto.graph), helper.tensor_dtype_to_np_dtype(TensorProto.INT4)
    marked = [node for node in proto.graph.node if any(prop.key == INT4_KEY for prop in node.metadata_props)]
    packed: dict[str, str] = {}
    for node in marked:
        for i in (0, 2):
            name = node.input[i]
            values = view.array(name)
            if name not in packed and values is not None:
                packed[name] = view.add_constant(added_tensor(name, "int4"), values.astype(dtype))
            node.input[i] = packed[name]
    return len(marked)
