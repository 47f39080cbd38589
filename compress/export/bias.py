"""Biases beside INT8 weights, for ONNX Runtime, which adds them as INT32 in steps of input scale * weight scale.

A channel whose weights are next to nothing has a tiny scale, and its bias more such steps than INT32 holds: ONNX
Runtime then adds another number, without a word (channels that training has left dead are so, in many a pretrained
network). `room_for_biases` raises such scales. A weight moves by half a new step at most, all weights of the channel
together by a ten-millionth of the bias for each input.

ONNX Runtime merges MatMul and Add into Gemm before it looks for Q/DQ, and runs a Gemm in 8 bits only when its bias is
an INT32 DequantizeLinear of scale input scale * weight scale; with a float bias it dequantizes the weights in every run
and multiplies in float. (It rewrites the biases of convolutions itself.) The bias moves by half such a step at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.export.readers import readers_of

_MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "Flatten"})
_LARGEST = 2**31 - 1
_ROOM = 2.0**30  # steps of a bias: half of what INT32 holds, which scales of float32 do not round away


def room_for_biases(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Raise scales of INT8 weights whose layer's bias would not fit into INT32; in place.

    Returns:
        Names of the nodes whose weights have a new scale.
    """
    graph = proto.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}
    readers = readers_of(graph)
    changed = []
    for node in graph.node:
        found = _bias(node, constants, readers)
        source = _scale(node.input[0], constants, made) if found is not None else None
        dequantize = _dequantized(node.input[1], made) if found is not None else None
        if found is None or source is None or dequantize is None or dequantize.input[0] not in constants:
            continue
        bias, (q, scale) = constants[found[0].input[found[1]]], (constants[name] for name in dequantize.input[:2])
        if q.dtype != np.int8 or scale.dtype != np.float32 or bias.ndim != 1 or scale.shape not in {(), bias.shape}:
            continue
        steps = np.maximum(np.abs(bias.astype(np.float64)) / _ROOM, np.finfo(np.float32).tiny) / source
        needed = (steps if scale.ndim else steps.max()).astype(np.float32)
        if (scale >= needed).all():
            continue
        wider = np.maximum(scale, needed)
        axis = next((a.i for a in dequantize.attribute if a.name == "axis"), 1)
        ratio = (scale / wider).reshape([-1 if i == axis else 1 for i in range(q.ndim)] if scale.ndim else ())
        for i, value in enumerate((np.round(q * ratio).astype(np.int8), wider)):
            dequantize.input[i] = f"{dequantize.name}/{('q', 'scale')[i]}"
            constants[dequantize.input[i]] = value
            graph.initializer.append(numpy_helper.from_array(value, dequantize.input[i]))
        changed.append(node.name)
    return tuple(changed)


def integer_biases(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Write the bias of every Gemm, or MatMul followed by Add, whose input and weight are quantized as INT32; in place.

    Returns:
        Names of the nodes whose bias is INT32 now.
    """
    graph = proto.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}
    readers = readers_of(graph)
    done: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        found = _bias(node, constants, readers) if node.op_type in {"Gemm", "MatMul"} else None
        scales = [_scale(name, constants, made) for name in node.input[:2]]
        if found is None or any(scale is None or scale.dtype != np.float32 for scale in scales):
            continue
        holder, place = found
        bias = constants[holder.input[place]]
        scale = np.broadcast_to(np.asarray(scales[0] * scales[1], np.float32), bias.shape).copy()  # type: ignore[operator]
        steps = np.round(bias / scale)
        if bias.ndim == 1 and np.abs(steps).max() < _LARGEST:
            done[holder.name] = _dequantize(graph, holder, place, steps.astype(np.int32), scale)
    nodes = [part for node in graph.node for part in ((done[node.name], node) if node.name in done else (node,))]
    del graph.node[:]
    graph.node.extend(nodes)
    return tuple(done)


def _bias(
    node: onnx.NodeProto, constants: dict[str, NDArray[Any]], readers: dict[str, list[onnx.NodeProto]]
) -> tuple[onnx.NodeProto, int] | None:
    """(node that adds the bias of a convolution or matrix product, which of its inputs that is)."""
    if node.op_type in {"Conv", "ConvTranspose"}:
        return (node, 2) if len(node.input) == 3 and node.input[2] in constants else None
    if node.op_type == "Gemm" and len(node.input) == 3 and node.input[2] in constants:
        plain = all(a.f == 1.0 for a in node.attribute if a.name in {"alpha", "beta"})
        return (node, 2) if plain else None
    after = readers.get(node.output[0], []) if node.op_type == "MatMul" else []
    if len(after) != 1 or after[0].op_type != "Add":
        return None
    return next(((after[0], i) for i, name in enumerate(after[0].input) if name in constants), None)


def _scale(name: str, constants: dict[str, NDArray[Any]], made: dict[str, onnx.NodeProto]) -> NDArray[Any] | None:
    """Scale of a tensor that comes out of a DequantizeLinear through what moves values; None where it does not."""
    node = _dequantized(name, made)
    return None if node is None else constants.get(node.input[1])


def _dequantized(name: str, made: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """The DequantizeLinear that a tensor comes out of, through what moves values."""
    node = made.get(name)
    while node is not None and node.op_type in _MOVES:
        node = made.get(node.input[0])
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _dequantize(
    graph: onnx.GraphProto, holder: onnx.NodeProto, place: int, steps: NDArray[Any], scale: NDArray[Any]
) -> onnx.NodeProto:
    """The DequantizeLinear of a bias, its constants added to the graph and its result read by `holder`."""
    names = [f"{holder.name}/bias_{part}" for part in ("q", "scale", "zero_point")]
    for name, value in zip(names, (steps, scale, np.zeros_like(steps)), strict=True):
        graph.initializer.append(numpy_helper.from_array(value, name))
    holder.input[place] = f"{holder.name}/bias"
    return helper.make_node(
        "DequantizeLinear", names, [holder.input[place]], name=f"{holder.name}/bias/DequantizeLinear", axis=0
    )
