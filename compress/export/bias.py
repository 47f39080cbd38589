"""Biases of INT8 layers for ONNX Runtime, which adds them as INT32 in steps of input scale * weight scale.

A channel whose weights are close to zero has a tiny scale, and its bias may take more of these steps than INT32 holds:
ONNX Runtime then adds a wrong number without an error. Channels that training has left dead are such channels, and many
pretrained networks have them. `room_for_biases` raises their scales. A weight moves by at most half a new step, and all
weights of the channel together by a ten-millionth of the bias for each input.

ONNX Runtime merges MatMul and Add into Gemm before it looks for Q/DQ, and runs a Gemm in 8 bits only if its bias is
an INT32 DequantizeLinear of scale input scale * weight scale; with a float bias it dequantizes the weights in every run
and multiplies in float. (It rewrites the biases of convolutions itself.) `integer_biases` writes that form, which moves
a bias by at most half a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.export.names import added_constant
from compress.export.onnx_graph import MOVES, OnnxGraph, attribute

_LARGEST = 2**31 - 1
_ROOM = 2.0**30  # largest bias in steps: half of what INT32 holds, so that float32 scales may be inexact


def room_for_biases(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Raise scales of INT8 weights whose layer's bias would not fit into INT32; in place.

    Returns:
        Names of the nodes whose weights have a new scale.
    """
    view = OnnxGraph(proto.graph)
    return tuple(node.name for node in proto.graph.node if _make_room(node, view))


def _make_room(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    """Raise the weight scales of one layer where its bias needs it; return True if they were raised."""
    found = _bias(node, view)
    if found is None:
        return False
    source, dequantize = _scale(node.input[0], view), view.dequantizer(node.input[1], MOVES)
    if source is None or dequantize is None:
        return False
    bias = view.array(found[0].input[found[1]])
    q, scale = (view.array(name) for name in dequantize.input[:2])
    if bias is None or q is None or scale is None or q.dtype != np.int8 or scale.dtype != np.float32:
        return False
    if bias.ndim != 1 or scale.shape not in {(), bias.shape}:
        return False
    steps = np.maximum(np.abs(bias.astype(np.float64)) / _ROOM, np.finfo(np.float32).tiny) / source
    needed = (steps if scale.ndim else steps.max()).astype(np.float32)
    if (scale >= needed).all():
        return False
    wider = np.maximum(scale, needed)
    axis = attribute(dequantize, "axis", 1)
    ratio = (scale / wider).reshape([-1 if i == axis else 1 for i in range(q.ndim)] if scale.ndim else ())
    values = {"q": np.round(q * ratio).astype(np.int8), "scale": wider}
    for i, (part, value) in enumerate(values.items()):
        dequantize.input[i] = view.add_constant(added_constant(dequantize.name, part), value)
    return True


def integer_biases(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Write as INT32 the bias of every Gemm, or MatMul and Add, whose input and weight are quantized; in place.

    Returns:
        Names of the nodes whose bias is INT32 now.
    """
    view = OnnxGraph(proto.graph)
    done: dict[str, onnx.NodeProto] = {}
    for node in proto.graph.node:
        found = _bias(node, view) if node.op_type in {"Gemm", "MatMul"} else None
        if found is None:
            continue
        holder, place = found
        source, weight = (_scale(name, view) for name in node.input[:2])
        bias = view.array(holder.input[place])
        if bias is None or source is None or weight is None or {source.dtype, weight.dtype} != {np.dtype(np.float32)}:
            continue
        product = np.asarray(source * weight, np.float32)
        if bias.ndim != 1 or product.shape not in {(), (1,), bias.shape}:
            continue  # an added number or map, which is no bias for each output
        scale = np.broadcast_to(product, bias.shape).copy()
        steps = np.round(bias / scale)
        if np.abs(steps).max() < _LARGEST:
            done[holder.name] = _dequantize(view, holder, place, steps.astype(np.int32), scale)
    view.replace_nodes(
        part for node in list(proto.graph.node) for part in ((done[node.name], node) if node.name in done else (node,))
    )
    return tuple(done)


def _bias(node: onnx.NodeProto, view: OnnxGraph) -> tuple[onnx.NodeProto, int] | None:
    """Return (node that adds the constant bias of a convolution or matrix product, index of that input)."""
    if node.op_type in {"Conv", "ConvTranspose", "Gemm"}:
        constant = len(node.input) == 3 and node.input[2] in view.constants
        plain = node.op_type != "Gemm" or all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        return (node, 2) if constant and plain else None
    after = view.consumers.get(node.output[0], []) if node.op_type == "MatMul" else []
    if len(after) != 1 or after[0].op_type != "Add":
        return None
    return next(((after[0], i) for i, name in enumerate(after[0].input) if name in view.constants), None)


def _scale(name: str, view: OnnxGraph) -> NDArray[Any] | None:
    """Return the scale of a tensor that comes from a DequantizeLinear, also through operations that move values."""
    node = view.dequantizer(name, MOVES)
    return None if node is None else view.array(node.input[1])


def _dequantize(
    view: OnnxGraph, holder: onnx.NodeProto, place: int, steps: NDArray[Any], scale: NDArray[Any]
) -> onnx.NodeProto:
    """Return the DequantizeLinear of a bias; its constants are added to the graph and `holder` reads its result."""
    parts = {"bias_q": steps, "bias_scale": scale, "bias_zero_point": np.zeros_like(steps)}
    names = [view.add_constant(added_constant(holder.name, part), value) for part, value in parts.items()]
    holder.input[place] = added_constant(holder.name, "bias")
    name = added_constant(holder.input[place], "DequantizeLinear")
    return helper.make_node("DequantizeLinear", names, [holder.input[place]], name=name, axis=0)
