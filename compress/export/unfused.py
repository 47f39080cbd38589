"""An operation that changes no value, after a node that OpenVINO would fuse with a quantizer and compute wrong."""

from __future__ import annotations

import onnx
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph


def unfused(node: onnx.NodeProto, part: str, view: OnnxGraph) -> onnx.NodeProto:
    """Return the Max of a node's result with itself, under the name of the result, which changes.

    It took no measurable time on OpenVINO (2026.4).

    Args:
        node: its first output is renamed.
        part: of the new name of the node's result.
        view: of the graph, which knows the names that are taken.
    """
    output = node.output[0]
    node.output[0] = view.free(added_tensor(output, part))
    maximum = helper.make_node("Max", [node.output[0]] * 2, [output])
    maximum.metadata_props.extend(node.metadata_props)
    return maximum
