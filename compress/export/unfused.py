"""An operation that changes no value, after a node that OpenVINO would fuse with a quantizer and compute wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph

_LOWEST: dict[int, Any] = {
    TensorProto.FLOAT: np.finfo(np.float32).min,
    TensorProto.FLOAT16: np.finfo(np.float16).min,
    TensorProto.BFLOAT16: -0xFF * 2.0**120,
}
"""Of each type that a file's floats have."""

FLOATS = frozenset(_LOWEST)


def unfused(view: OnnxGraph, node: onnx.NodeProto, dtype: int, part: str) -> onnx.NodeProto:
    """Return the Max of a node's result and the lowest number, under the name of the result, which changes.

    It took no measurable time on OpenVINO.

    Args:
        view: gets the constant.
        node: its first output is renamed.
        dtype: a float type of ONNX.
        part: of the new name of the node's result.
    """
    output, floats = node.output[0], helper.tensor_dtype_to_np_dtype(dtype)
    node.output[0] = added_tensor(output, part)
    lowest = view.add_constant(added_tensor(output, "lowest"), np.asarray(_LOWEST[dtype], floats))
    maximum = helper.make_node("Max", [node.output[0], lowest], [output])
    maximum.metadata_props.extend(node.metadata_props)
    return maximum
