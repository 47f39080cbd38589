"""Signed 8-bit tensors of an ONNX file as unsigned ones with a zero point of 128: the same numbers, shifted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

SHIFT = 128
_SYMMETRIC = ("MatMul", "Gemm", "ConvTranspose")
"""Operations that OpenVINO computes in 8 bits without a zero point only, or wrongly with one."""
_UINT8, _INT8 = 2, 3  # of onnx.TensorProto, which is not imported before a file is read
_SUFFIX = "_unsigned"


def joins_signed(model: onnx.ModelProto) -> bool:
    """Return True if a graph has signed 8-bit activations and concatenates anything."""
    kinds = {node.op_type for node in model.graph.node}
    return "Concat" in kinds and bool(_signed(model.graph))


def to_unsigned(model: onnx.ModelProto) -> None:
    """Change QuantizeLinear and DequantizeLinear pairs that convolutions read from int8 to uint8, in place.

    Integers and zero points grow by 128, so real values stay; weights and inputs of matrix products and of
    transposed convolutions are unchanged.
    """
    # OpenVINO 2026.4.1 (x86, AVX-512) computes convolutions of concatenated signed tensors wrongly, and matrix
    # products of concatenated unsigned ones
    graph = model.graph
    points = {tensor.name: tensor for tensor in graph.initializer}
    made: set[str] = set()
    for node, readers in _signed(graph):
        for attribute in node.attribute:
            if attribute.name == "output_dtype":
                attribute.i = _UINT8
        for one in (node, *readers):
            one.input[2] = _unsigned(graph, points[one.input[2]], made)


def weights_to_unsigned(model: onnx.ModelProto) -> None:
    """Change int8 weights (constants of two or more dimensions) that DequantizeLinear reads to uint8, in place."""
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.HasField("t"):
                attribute.t.name = node.output[0]  # it may have none
                tensors[node.output[0]] = attribute.t
    made: set[str] = set()
    for node in graph.node:
        weight = tensors.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if weight is None or weight.data_type != _INT8 or len(weight.dims) < 2:
            continue
        _, scale, *point = node.input
        if {scale, *point} - tensors.keys():
            continue
        zero = tensors[point[0]] if point else _zeros_like(tensors[scale])
        node.input[:] = [_unsigned(graph, weight, made), scale, _unsigned(graph, zero, made)]


def _unsigned(graph: onnx.GraphProto, tensor: onnx.TensorProto, made: set[str]) -> str:
    """Return the name of the unsigned form of an int8 tensor, which is added to the graph where it is not in `made`."""
    name = tensor.name + _SUFFIX
    if name not in made:
        signed = np.frombuffer(tensor.raw_data, np.int8) if tensor.raw_data else np.array(tensor.int32_data)
        shifted = (signed.astype(np.int16) + SHIFT).astype(np.uint8)
        graph.initializer.add(name=name, data_type=_UINT8, dims=tensor.dims, raw_data=shifted.tobytes())
        made.add(name)
    return name


def _zeros_like(scale: onnx.TensorProto) -> onnx.TensorProto:
    """Return the zero point that a DequantizeLinear without one has: int8 zeros in the shape of its scale."""
    zeros = type(scale)(name=f"{scale.name}_zero_point", data_type=_INT8, dims=scale.dims)
    zeros.raw_data = bytes(math.prod(scale.dims))
    return zeros


def _signed(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
    signed = {tensor.name for tensor in graph.initializer if tensor.data_type == _INT8}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {output.name for output in graph.output}

    def by(node: onnx.NodeProto, kind: str) -> bool:
        return node.op_type == kind and len(node.input) == 3 and node.input[2] in signed

    found = []
    for node in graph.node:
        read = readers.get(node.output[0], []) if by(node, "QuantizeLinear") else []
        if read and node.output[0] not in outputs and all(by(one, "DequantizeLinear") for one in read):
            weighted = _weighted(read, readers)
            if "Conv" in weighted and not weighted.intersection(_SYMMETRIC):
                found.append((node, read))
    return found


def _weighted(nodes: list[onnx.NodeProto], readers: dict[str, list[onnx.NodeProto]]) -> set[str]:
    kinds, seen, waiting = set(), set[str](), list(nodes)
    while waiting:
        for name in waiting.pop().output:
            for reader in readers.get(name, []) if name not in seen else []:
                if reader.op_type in ("Conv", *_SYMMETRIC):
                    kinds.add(reader.op_type)
                elif reader.op_type != "QuantizeLinear":
                    waiting.append(reader)
            seen.add(name)
    return kinds
