"""Who reads what in an ONNX graph."""

from __future__ import annotations

import onnx


def readers_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes by the name of a tensor that they read, one for each time; those of the graph's outputs are no nodes."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers
