"""Writes the biases of convolutions as sums of their own where sizes are open and computed with, for OpenVINO.

OpenVINO's reader asks for the shape of a convolution's result to bring its bias to that rank, and shares this question
with every other one for the same open size: with the class token that is repeated for each image, or with the states
of zeros that a recurrent network begins with. The convolution then has two consumers, and a quantizer that follows its
bias is computed with the bias of one channel for all of them (2026.4): a file of an open batch has a signal to noise
near 0 dB, and is right with a fixed one. A sum asks for no shape. Compiled with fixed sizes, both forms are the same
operations and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph

_COMPUTES_WITH_SIZES = frozenset({"Shape", "Size", "LSTM", "GRU", "RNN"})
"""Operators for which OpenVINO asks for a shape; recurrent ones do so for their states of zeros."""


def biases_apart(proto: onnx.ModelProto) -> int:
    """Replace the constant bias of every convolution by an Add after it, in place; the results stay the same.

    A model of fixed sizes, or without an operator that computes with sizes, is left alone.

    Returns:
        Number of convolutions that were changed.
    """
    if not _has_open_input(proto.graph) or not _computes_with_sizes(proto.graph.node):
        return 0
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        nodes.append(node)
        bias = view.array(node.input[2]) if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] else None
        rank = _rank(node, view) if bias is not None else 0
        if bias is None or rank == 0:
            continue
        output = node.output[0]
        del node.input[2:]
        node.output[0] = view.free(added_tensor(output, "product"))
        shaped = view.add_constant(added_tensor(output, "bias"), bias.reshape(1, -1, *[1] * (rank - 2)))
        apart = helper.make_node("Add", [node.output[0], shaped], [output], name=added_tensor(node.name, "bias"))
        apart.metadata_props.extend(node.metadata_props)
        nodes.append(apart)
        changed += 1
    view.replace_nodes(nodes)
    return changed


def _rank(node: onnx.NodeProto, view: OnnxGraph) -> int:
    """Return the number of axes of a convolution's weight, which are those of its result; 0 if it is computed."""
    dequantizer = view.dequantizer(node.input[1])
    weight = view.constants.get(node.input[1] if dequantizer is None else dequantizer.input[0])
    return 0 if weight is None else len(weight.dims)


def _has_open_input(graph: onnx.GraphProto) -> bool:
    """Return True if an input that is no constant has a size that is not fixed."""
    constants = {tensor.name for tensor in graph.initializer}
    types = [value.type.tensor_type for value in graph.input if value.name not in constants]
    return any(not t.HasField("shape") or any(not d.HasField("dim_value") for d in t.shape.dim) for t in types)


def _computes_with_sizes(nodes: Sequence[onnx.NodeProto]) -> bool:
    inner = (graph for node in nodes for a in node.attribute for graph in (*a.graphs, *([a.g] * a.HasField("g"))))
    return any(node.op_type in _COMPUTES_WITH_SIZES for node in nodes) or any(
        _computes_with_sizes(graph.node) for graph in inner
    )
