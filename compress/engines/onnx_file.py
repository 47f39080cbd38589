"""ONNX files before an engine's library reads them: their interface, and signed tensors made unsigned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from compress.engines.base import TensorInfo, library_errors
from compress.errors import EngineError

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True)
class OnnxFile:
    """The interface of an ONNX model.

    Attributes:
        inputs: those that are not initializers; a dimension without a number is -1.
        batch_names: symbols of the first dimension of the inputs, such as {"batch"}.
        output_batch_names: symbol of the first dimension of each output; "" if it has none.
        float_types: types of floating-point weights and activations: `f32`, `f16`, `bf16`, `f64`.
        quantized_types: types that its QuantizeLinear nodes write: `i8`, `u8`, `fp8`.
        weight_files: files beside it that hold its weights, sorted; () if it holds them itself.
    """

    path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    batch_names: frozenset[str]
    output_batch_names: tuple[str, ...]
    float_types: frozenset[str]
    opset: int
    quantized_types: frozenset[str]
    metadata: Mapping[str, str]
    weight_files: tuple[Path, ...] = ()


# Endings of files that TensorRT and TensorRT-RTX have built.
ENGINE_SUFFIXES = (".engine", ".plan")


def existing_file(path: Path | str) -> Path:
    path = Path(path)
    if not path.is_file():
        there = "is a folder, not a model file" if path.is_dir() else "is no regular file"
        raise EngineError(f"{path}: {there if path.exists() else 'no such file'}")
    return path


def load_onnx(path: Path | str, *, weights: bool = False) -> onnx.ModelProto:
    path = existing_file(path)
    if path.suffix in ENGINE_SUFFIXES:
        raise EngineError(f"{path} is a built TensorRT engine; give the ONNX file that it was built from")
    with library_errors(EngineError, f"{path}: not an ONNX model, or a truncated one (", "); export it again"):
        return _onnx().load(str(path), load_external_data=weights)


def read_onnx(path: Path | str) -> OnnxFile:
    """Read the interface of an ONNX file; weights in other files are not read."""
    return read_interface(Path(path), load_onnx(path))


def read_interface(path: Path, model: onnx.ModelProto) -> OnnxFile:
    graph = model.graph
    if not (model.ir_version and model.opset_import and graph.output):
        raise EngineError(
            f"{path}: not an ONNX model, or a truncated one (IR version {model.ir_version}, "
            f"{len(model.opset_import)} opsets, {len(graph.output)} outputs); export it again"
        )
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    return OnnxFile(
        path=path,
        inputs=tuple(map(_tensor, inputs)),
        outputs=tuple(map(_tensor, graph.output)),
        batch_names=frozenset(name for name in map(_batch_name, inputs) if name),
        output_batch_names=tuple(map(_batch_name, graph.output)),
        float_types=frozenset(_float_types(graph)),
        opset=max((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), default=0),
        quantized_types=frozenset(_quantized_types(graph)),
        metadata={entry.key: entry.value for entry in model.metadata_props},
        weight_files=tuple(sorted({path.parent / name for name in _locations(graph)})),
    )


def _locations(graph: onnx.GraphProto) -> Iterator[str]:
    constants = [a.t for node in graph.node for a in node.attribute if a.HasField("t")]
    for tensor in (*graph.initializer, *constants):
        yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def _tensor(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        raise EngineError(f"{value.name!r} is not a tensor of a known type: only models of tensors are run")
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    dtype = _onnx().helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorInfo(name=value.name, dtype=dtype.name, shape=shape)


def _onnx() -> ModuleType:
    import onnx  # lazy: engines are listed, and torch modules timed, without it

    return onnx


def _batch_name(value: onnx.ValueInfoProto) -> str:
    dims = value.type.tensor_type.shape.dim
    return str(dims[0].dim_param) if dims else ""


# onnx.TensorProto.DataType of the floating-point types.
_FLOATS = {1: "f32", 10: "f16", 11: "f64", 16: "bf16"}


def _float_types(graph: onnx.GraphProto) -> Iterator[str]:
    numbers = [tensor.data_type for tensor in graph.initializer]
    numbers += [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    for node in graph.node:
        numbers += [a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"]
        numbers += [a.t.data_type for a in node.attribute if node.op_type == "Constant" and a.name == "value"]
    return (_FLOATS[number] for number in numbers if number in _FLOATS)


# onnx.TensorProto.DataType of the types that QuantizeLinear writes; the four FP8 types count as one.
_QUANTIZED = {2: "u8", 3: "i8", 17: "fp8", 18: "fp8", 19: "fp8", 20: "fp8"}


def _quantized_types(graph: onnx.GraphProto) -> Iterator[str]:
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            kinds[node.output[0]] = next((a.t.data_type for a in node.attribute if a.name == "value"), 0)
    points = [node.input[2] for node in graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2]
    return (_QUANTIZED[kinds[name]] for name in points if kinds.get(name) in _QUANTIZED)


SHIFT = 128
# Operations that OpenVINO computes in 8 bits without a zero point only, or wrongly with one.
_SYMMETRIC = ("MatMul", "Gemm", "ConvTranspose")
_UINT8, _INT8 = 2, 3  # of onnx.TensorProto, which is not imported before a file is read
_SUFFIX = "_unsigned"


def joins_signed(model: onnx.ModelProto) -> bool:
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
    """The name of the unsigned form of an int8 tensor, which is added to the graph where it is not in `made`."""
    name = tensor.name + _SUFFIX
    if name not in made:
        signed = np.frombuffer(tensor.raw_data, np.int8) if tensor.raw_data else np.array(tensor.int32_data)
        shifted = (signed.astype(np.int16) + SHIFT).astype(np.uint8)
        graph.initializer.add(name=name, data_type=_UINT8, dims=tensor.dims, raw_data=shifted.tobytes())
        made.add(name)
    return name


def _zeros_like(scale: onnx.TensorProto) -> onnx.TensorProto:
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
