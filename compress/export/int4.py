"""Weights of 4 bits and fewer as ONNX INT4: two integers a byte, from opset 21 on.

torch has no 4-bit tensor, so the exporter writes such weights as INT8 constants and marks their DequantizeLinear;
here the constants become INT4. Below opset 21, which brings the type to Q/DQ, they stay INT8: the same integers in
twice the bytes. Activations of fewer than 8 bits always stay in 8-bit integers behind a Clip.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INT4_MARK = "compress.num_bits"
"""Metadata key on the DequantizeLinear of a weight that fits in 4 bits."""

OPSET = 21
"""First opset whose QuantizeLinear and DequantizeLinear know INT4."""


def pack_int4(proto: onnx.ModelProto) -> int:
    """Turn marked weights into INT4; in place.

    Returns:
        How many; 0 below opset 21.
    """
    opset = next((o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"}), 0)
    if opset < OPSET:
        return 0
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    packed: dict[str, str] = {}
    for node in proto.graph.node:
        if not any(prop.key == INT4_MARK for prop in node.metadata_props):
            continue
        for i in (0, 2):
            name = node.input[i]
            if name not in packed:
                packed[name] = f"{name}_int4"
                proto.graph.initializer.append(_int4(constants[name], packed[name]))
            node.input[i] = packed[name]
    return sum(INT4_MARK in {prop.key for prop in node.metadata_props} for node in proto.graph.node)


def _int4(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """An INT8 tensor as INT4: the first of two values in the low half of each byte."""
    values = numpy_helper.to_array(tensor).astype(np.int8).ravel()
    if len(values) % 2:
        values = np.append(values, np.int8(0))
    low, high = values[0::2] & 0x0F, values[1::2] & 0x0F
    raw = (low | (high << 4)).astype(np.uint8).tobytes()
    return helper.make_tensor(name, TensorProto.INT4, list(tensor.dims), raw, raw=True)
