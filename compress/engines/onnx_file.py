"""Reads the interface of an ONNX file before an engine's library does: inputs, outputs, float types, metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

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
        opset: of the standard operators; 0 if the file names none.
        quantized_types: types that its QuantizeLinear nodes write: `i8`, `u8`, `fp8`.
        metadata: entries of `metadata_props`.
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


ENGINE_SUFFIXES = (".engine", ".plan")
"""Endings of files that TensorRT and TensorRT-RTX have built."""


def existing_file(path: Path | str) -> Path:
    """Return `path` if it is a file.

    Raises:
        EngineError: it does not exist, or is a folder.
    """
    path = Path(path)
    if not path.is_file():
        there = "is a folder, not a model file" if path.is_dir() else "is no regular file"
        raise EngineError(f"{path}: {there if path.exists() else 'no such file'}")
    return path


def load_onnx(path: Path | str, *, weights: bool = False) -> onnx.ModelProto:
    """Load an `onnx.ModelProto`.

    Raises:
        EngineError: the file is missing, truncated, or not an ONNX model.
    """
    path = existing_file(path)
    if path.suffix in ENGINE_SUFFIXES:
        raise EngineError(f"{path} is a built TensorRT engine; give the ONNX file that it was built from")
    with library_errors(EngineError, f"{path}: not an ONNX model, or a truncated one (", "); export it again"):
        return _onnx().load(str(path), load_external_data=weights)


def read_onnx(path: Path | str) -> OnnxFile:
    """Read the interface of an ONNX file; weights in other files are not read.

    Raises:
        EngineError: the file is missing, truncated, or not an ONNX model.
    """
    return read_interface(Path(path), load_onnx(path))


def read_interface(path: Path, model: onnx.ModelProto) -> OnnxFile:
    """Read the interface of a loaded model; EngineError if it is not an ONNX model, or a truncated one."""
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
    """Return the library; the one place of this package that imports it."""
    import onnx  # lazy: engines are listed, and torch modules timed, without it

    return onnx


def _batch_name(value: onnx.ValueInfoProto) -> str:
    dims = value.type.tensor_type.shape.dim
    return str(dims[0].dim_param) if dims else ""


_FLOATS = {1: "f32", 10: "f16", 11: "f64", 16: "bf16"}
"""onnx.TensorProto.DataType of the floating-point types."""


def _float_types(graph: onnx.GraphProto) -> Iterator[str]:
    numbers = [tensor.data_type for tensor in graph.initializer]
    numbers += [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    for node in graph.node:
        numbers += [a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"]
        numbers += [a.t.data_type for a in node.attribute if node.op_type == "Constant" and a.name == "value"]
    return (_FLOATS[number] for number in numbers if number in _FLOATS)


_QUANTIZED = {2: "u8", 3: "i8", 17: "fp8", 18: "fp8", 19: "fp8", 20: "fp8"}
"""onnx.TensorProto.DataType of the types that QuantizeLinear writes; the four FP8 types count as one."""


def _quantized_types(graph: onnx.GraphProto) -> Iterator[str]:
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            kinds[node.output[0]] = next((a.t.data_type for a in node.attribute if a.name == "value"), 0)
    points = [node.input[2] for node in graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2]
    return (_QUANTIZED[kinds[name]] for name in points if kinds.get(name) in _QUANTIZED)
