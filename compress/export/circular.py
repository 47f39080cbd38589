"""Writes circular padding as a concatenation, for OpenVINO, whose reader knows no Pad of mode `wrap` (2026.4)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph, attribute

_TO_THE_END = np.iinfo(np.int64).max


def concatenated_pads(proto: onnx.ModelProto) -> int:
    """Replace every Pad of mode `wrap` by the tensor between its own last and first rows, axis by axis; in place.

    A Pad by computed or negative amounts, or of named axes, is left alone.

    Returns:
        Number of nodes that were replaced.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        wraps = node.op_type == "Pad" and attribute(node, "mode", b"") == b"wrap" and not any(node.input[2:])
        amounts = view.array(node.input[1]) if wraps else None
        if amounts is None or amounts.min() < 0 or not amounts.any():
            nodes.append(node)
            continue
        nodes += _concatenated(view, node, amounts.reshape(2, -1).T.tolist())
        changed += 1
    view.replace_nodes(nodes)
    return changed


def _concatenated(view: OnnxGraph, pad: onnx.NodeProto, amounts: list[list[int]]) -> list[onnx.NodeProto]:
    """Return the nodes of a Pad by (before, after) rows of each axis."""
    source, output, nodes = pad.input[0], pad.output[0], []
    last = max(axis for axis, pair in enumerate(amounts) if any(pair))

    def rows(start: int, end: int, axis: int, part: str) -> str:
        name = view.free(added_tensor(output, f"{part}{axis}"))
        bounds = {"start": start, "end": end, "axis": axis}
        constants = [view.add_constant(added_tensor(name, k), np.asarray([v], np.int64)) for k, v in bounds.items()]
        nodes.append(
            helper.make_node("Slice", [source, *constants], [name], name=added_tensor(pad.name, f"{part}{axis}"))
        )
        return name

    for axis, (before, after) in enumerate(amounts):
        if before or after:
            first = [rows(-before, _TO_THE_END, axis, "last")] if before else []
            end = [rows(0, after, axis, "first")] if after else []
            whole = output if axis == last else view.free(added_tensor(output, f"whole{axis}"))
            name = added_tensor(pad.name, f"whole{axis}")
            nodes.append(helper.make_node("Concat", [*first, source, *end], [whole], name=name, axis=axis))
            source = whole
    for node in nodes:
        node.metadata_props.extend(pad.metadata_props)
    return nodes
