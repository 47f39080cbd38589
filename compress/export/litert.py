"""Writes a LiteRT file (.tflite) of an ONNX file, with its scales, zero points and integer weights as they are.

The flatbuffer is written from our own Q/DQ graph with the schema that the runtime brings (`ai_edge_litert`). Quantized
operators follow the 8-bit quantization specification (https://ai.google.dev/edge/litert/models/quantization_spec): INT8
tensors with a zero point, weights symmetric with a scale for each channel, INT32 biases of scale input * weight, one
scale for what is only moved.

A product between DequantizeLinear and QuantizeLinear becomes one INT8 operator; what moves elements keeps integers;
everything else is float32, between DEQUANTIZE and QUANTIZE. uint8 with zero point z is written as int8 with z - 128,
the same grid. Activations of 16 bits are int16 without a zero point, beside INT8 weights and INT64 biases (16x8); where
tensors of 8 and 16 bits meet in an operator, those of 8 become 16, exactly. Images are held with channels last; inputs
and outputs keep names and layout of the ONNX file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from compress.errors import EngineUnavailableError, ExportError
from compress.export.names import TARGET_KEY
from compress.graph.spelled import spelled_activation
from compress.onnx_graph import (
    OnnxForm,
    OnnxGraph,
    Window,
    attributes_of,
    each_node,
    forget_shapes_of_outputs,
    free_name,
    opset_of,
    read_window,
    transposed_pads,
    write_model,
)
from compress.support.imports import any_failure

INSTALL = "pip install 'compress-vision[litert]' (the package ai-edge-litert)"
_IDENTIFIER = b"TFL3"
# The oldest whose operators are read here; axes, bounds and limits are attributes before.
_OPSET = 13
# First opset whose GroupNormalization has a scale for each channel; it is written since.
_GROUPS_OPSET = 21
_MOVING = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "Slice", "Gather")
_LOGICAL = {
    **{"Where": "SELECT_V2", "Greater": "GREATER", "Less": "LESS", "Equal": "EQUAL"},
    **{"GreaterOrEqual": "GREATER_EQUAL", "LessOrEqual": "LESS_EQUAL"},
    **{"And": "LOGICAL_AND", "Or": "LOGICAL_OR", "Not": "LOGICAL_NOT"},
}
_OF_ANY_TYPE = frozenset(
    (*_MOVING, "Expand", "Tile", "Cast", "Dropout", "QuantizeLinear", "DequantizeLinear", "ArgMax", *_LOGICAL)
)
# Bytes; the schema asks it of every buffer.
_ALIGNMENT = 16

Array = NDArray[Any]


def export_litert(onnx_path: Path | str, path: Path | str, *, batch_size: int = 1) -> Path:
    """Write an ONNX file as a LiteRT file with its own scales, zero points and integers.

    Args:
        onnx_path: a file that `export_onnx` wrote, best for `target: litert`; float or with Q/DQ.
        path: the .tflite file; whole or not at all.
        batch_size: of an open batch; LiteRT files have fixed shapes.

    Returns:
        `path`. Names and shapes of its inputs and outputs are those of the ONNX file, and so are the metadata.

    Raises:
        ExportError: LiteRT has no operator for a node.
        EngineUnavailableError: the extra `litert` is not installed.

    Examples:
        >>> spec = compress.QuantSpec(target="litert")
        >>> qmodel = compress.quantize(model, images[:1], batches, spec=spec)
        >>> file = compress.export_onnx(qmodel, images[:1], "litert.onnx")
        >>> print(compress.export_litert(file, "int8.tflite"))
        int8.tflite
    """
    model = onnx.load(str(onnx_path))
    inputs = [value for value in model.graph.input if value.name not in {t.name for t in model.graph.initializer}]
    sizes = {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else (batch_size if i == 0 else -1)
            for i, dim in enumerate(value.type.tensor_type.shape.dim)
        )
        for value in inputs
    }
    return write_model(path, convert(model, sizes))


def convert(model: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> bytes:
    for name, size in sizes.items():
        if min(size, default=1) < 1:
            raise ExportError(
                f"input {name!r} has the shape {tuple(size)}: LiteRT files have fixed shapes; export the ONNX file for "
                "one image size"
            )
    return _Converter(_with_shapes(model, sizes), schema()).convert()


def schema() -> ModuleType:
    try:
        from ai_edge_litert import schema_py_generated  # optional: the extra `litert`
    except ImportError as error:
        raise EngineUnavailableError(
            f"LiteRT files are written with ai-edge-litert, which is not here ({error}); {INSTALL}"
        ) from error
    found: ModuleType = schema_py_generated
    return found


def _with_shapes(model: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Return a copy with fixed shapes, in which everything that follows from shapes is a constant."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    opset = opset_of(model)
    if opset < _OPSET:
        with any_failure(lambda error: ExportError(f"the file has opset {opset}, which cannot be raised: {error}")):
            fixed = onnx.version_converter.convert_version(fixed, _OPSET)
    for value in (*fixed.graph.input, *fixed.graph.output):
        if value.name in sizes:
            for dim, size in zip(value.type.tensor_type.shape.dim, sizes[value.name], strict=True):
                dim.dim_value = size
    forget_shapes_of_outputs(fixed.graph)
    if opset >= _GROUPS_OPSET:
        _groups_as_instances(fixed)
    del fixed.graph.value_info[:]
    import onnx_ir  # lazy: half a second, and engines are listed without it
    from onnxscript import optimizer  # lazy: as onnx_ir, on which it is built

    with any_failure(lambda error: ExportError(f"the shapes of the file cannot be inferred: {error}")):
        tree = onnx_ir.serde.deserialize_model(fixed)
        optimizer.fold_constants(
            tree,
            onnx_shape_inference=True,
            should_fold=lambda node: node.op_type not in {"QuantizeLinear", "DequantizeLinear"},
        )
        return onnx.shape_inference.infer_shapes(onnx_ir.serde.serialize_model(tree), data_prop=True)


@each_node
def _groups_as_instances(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Write a GroupNormalization, which onnx infers no shapes over, as one of instances: each group is a row."""
    affine = [view.array(name) for name in node.input[1:3]] if node.op_type == "GroupNormalization" else [None]
    if any(value is None for value in affine):
        return None
    attributes, source, result = attributes_of(node), node.input[0], node.output[0]
    groups, columns = int(attributes["num_groups"]), [np.asarray(value).reshape(-1, 1) for value in affine]
    shapes = ([0, groups, -1], [0, columns[0].size, -1])
    values: list[Array] = [np.asarray(shape, np.int64) for shape in shapes]
    values += [*(np.full(groups, n, np.float32) for n in (1, 0)), *columns]
    rows, channels, ones, none, gamma, beta = (
        view.add_constant(f"{result}/{i}_constant", value) for i, value in enumerate(values)
    )
    steps = [
        ("Reshape", [source, rows]),
        ("InstanceNormalization", [f"{result}/0", ones, none]),
        ("Reshape", [f"{result}/1", channels]),
        ("Mul", [f"{result}/2", gamma]),
        ("Add", [f"{result}/3", beta]),
        ("Shape", [source]),
        ("Reshape", [f"{result}/4", f"{result}/5"]),
    ]
    made = []
    for i, (op, inputs) in enumerate(steps):
        output = result if i == len(steps) - 1 else f"{result}/{i}"
        options = {"epsilon": attributes.get("epsilon", 1e-5)} if op == "InstanceNormalization" else {}
        made.append(onnx.helper.make_node(op, inputs, [output], name=f"{node.name}/{i}", **options))
    return made


@dataclass(frozen=True, eq=False)
class _Scales:
    """Scales and zero points of integers; one, or one for each index of an axis."""

    scale: NDArray[np.float32]
    zero: NDArray[np.int64]
    bits: int = 8
    axis: int = 0

    def widened(self) -> _Scales:
        """Scales of 16 bits that hold these integers of 8, and 127 between two of them."""
        return replace(self, scale=self.scale / np.float32(128), zero=np.zeros_like(self.zero), bits=16)

    def same(self, other: _Scales) -> bool:
        return self.bits == other.bits and all(
            np.array_equal(a, b) for a, b in ((self.scale, other.scale), (self.zero, other.zero))
        )


def _covers(limits: tuple[float, float], scales: _Scales) -> bool:
    """True if integers cannot hold what lies beyond limits, so that the quantizer clips by itself."""
    ends = np.asarray([-(2 ** (scales.bits - 1)), 2 ** (scales.bits - 1) - 1])
    low, high = (ends - scales.zero) * scales.scale.astype(np.float64)
    return bool(low >= limits[0] - scales.scale / 2 and high <= limits[1] + scales.scale / 2)


# Axes of an image with channels last, by those with channels second.
_LAST = (0, 2, 3, 1)
_PLACE = {axis: place for place, axis in enumerate(_LAST)}

# First version of an operator that takes what is written here, in float32 and in INT8, where these are not 1 and 2.
_VERSIONS = {
    "CONV_2D": (1, 3),
    "DEPTHWISE_CONV_2D": (2, 3),
    "FULLY_CONNECTED": (1, 4),
    "TRANSPOSE_CONV": (3, 3),
    "RESIZE_NEAREST_NEIGHBOR": (1, 2),
    "RESIZE_BILINEAR": (3, 3),
    "RESHAPE": (1, 1),
    "DEPTH_TO_SPACE": (1, 1),
    "BATCH_MATMUL": (1, 2),
    "BROADCAST_TO": (2, 3),
}
# The same for INT16, where it is not that for INT8.
_WIDE_VERSIONS = {
    **{"CONV_2D": 4, "DEPTHWISE_CONV_2D": 5, "FULLY_CONNECTED": 7, "BATCH_MATMUL": 3, "ADD": 3, "SUB": 5, "MUL": 4},
    **{"MAX_POOL_2D": 3, "MEAN": 3, "PAD": 3, "PADV2": 3, "MIRROR_PAD": 3, "CONCATENATION": 3, "GATHER": 4, "SLICE": 4},
    **{"TRANSPOSE": 5, "RESIZE_NEAREST_NEIGHBOR": 4, "MAXIMUM": 4, "MINIMUM": 4, "DEQUANTIZE": 3},
}


class _Writer:
    """The parts of a LiteRT file: tensors, constants and operators."""

    def __init__(self, fb: ModuleType) -> None:
        self.fb = fb
        self.model, self.graph = fb.ModelT(), fb.SubGraphT()
        self.model.version, self.model.description = 3, "compress"
        self.model.operatorCodes, self.model.buffers = [], [fb.BufferT()]
        self.model.subgraphs = [self.graph]
        self.graph.tensors, self.graph.operators = [], []
        self.codes: dict[tuple[int, int], int] = {}
        self.names: set[str] = set()
        names = ("float32", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")
        self.types = {np.dtype(name): getattr(fb.TensorType, name.upper()) for name in names}

    def tensor(
        self, name: str, shape: Sequence[int], dtype: Any, scales: _Scales | None = None, buffer: int = 0
    ) -> int:
        made = self.fb.TensorT()
        made.name, made.shape, made.buffer = free_name(name or "constant", self.names), list(shape), buffer
        made.type = self.types[np.dtype(dtype)]
        if scales is not None:
            made.quantization = self.fb.QuantizationParametersT()
            made.quantization.scale = np.atleast_1d(scales.scale).astype(np.float32)
            made.quantization.zeroPoint = np.atleast_1d(scales.zero).astype(np.int64)
            made.quantization.quantizedDimension = scales.axis
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def constant(self, value: Array, name: str = "", scales: _Scales | None = None) -> int:
        buffer = self.fb.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        return self.tensor(name, value.shape, value.dtype, scales, len(self.model.buffers) - 1)

    def operator(self, op: str, inputs: Sequence[int], outputs: Sequence[int], **options: Any) -> None:
        """Add an operator; options go into the table that the schema has for it, `kind` names one of another name."""
        code, integers = getattr(self.fb.BuiltinOperator, op), self.graph.tensors[inputs[0]].type
        wide = integers == self.fb.TensorType.INT16
        version = _VERSIONS.get(op, (1, 2))[wide or integers == self.fb.TensorType.INT8]
        if wide:
            version = _WIDE_VERSIONS.get(op, version)
            options |= {"potScaleInt16": False} if op in {"ADD", "SUB"} else {}
        made = self.fb.OperatorT()
        made.inputs, made.outputs = list(inputs), list(outputs)
        made.opcodeIndex = self.codes.setdefault((code, version), len(self.codes))
        kind = options.pop("kind", "".join(word.capitalize() for word in op.split("_")).replace("2d", "2D"))
        table = getattr(self.fb, f"{kind}OptionsT", None)
        if table is not None:
            made.builtinOptionsType = getattr(self.fb.BuiltinOptions, f"{kind}Options")
            made.builtinOptions = table()
            for key, value in options.items():
                setattr(made.builtinOptions, key, value)
        self.graph.operators.append(made)

    def finish(self, metadata: Mapping[str, str]) -> bytes:
        used = set(self.graph.outputs)
        for made in reversed(self.graph.operators):
            used.update(made.inputs if used.intersection(made.outputs) else ())
        self.graph.operators = [made for made in self.graph.operators if used.intersection(made.outputs)]
        for code, version in self.codes:
            made = self.fb.OperatorCodeT()
            made.builtinCode, made.deprecatedBuiltinCode, made.version = code, min(code, 127), version
            self.model.operatorCodes.append(made)
        self.model.metadata = []
        for key, text in metadata.items():
            entry, buffer = self.fb.MetadataT(), self.fb.BufferT()
            buffer.data = np.frombuffer(text.encode(), np.uint8)
            self.model.buffers.append(buffer)
            entry.name, entry.buffer = key, len(self.model.buffers) - 1
            self.model.metadata.append(entry)
        self.model.signatureDefs = [self._signature()]
        builder = _aligned_builder(self.fb)
        builder.Finish(self.model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    def _signature(self) -> object:
        made = self.fb.SignatureDefT()
        made.signatureKey, made.subgraphIndex = "serving_default", 0
        for key, places in (("inputs", self.graph.inputs), ("outputs", self.graph.outputs)):
            maps = []
            for place in places:
                entry = self.fb.TensorMapT()
                entry.name, entry.tensorIndex = self.graph.tensors[place].name, place
                maps.append(entry)
            setattr(made, key, maps)
        return made


def _aligned_builder(fb: ModuleType) -> Any:
    """A builder that aligns the data of buffers as the schema asks; the generated code does not for arrays."""

    class Aligned(fb.flatbuffers.Builder):  # type: ignore[name-defined]
        def CreateNumpyVector(self, x: Array) -> int:  # noqa: N802  (flatbuffers' own name)
            self.Prep(_ALIGNMENT, x.nbytes)
            return super().CreateNumpyVector(x)

    return Aligned(1 << 20)


# A tensor's name, True with channels last, True as integers.
Form = tuple[str, bool, bool]


class _Converter:
    """Turns the nodes of a graph into operators, one after the other.

    Attributes:
        forms: tensors of the file, by name and form; forms that are asked for and missing are made from others.
        scales: of tensors that exist as integers, by name.
        done: nodes that an operator before has taken in, by their first output.
    """

    def __init__(self, model: onnx.ModelProto, fb: ModuleType) -> None:
        self.proto, self.graph = model, OnnxGraph(model.graph)
        self.fb, self.out = fb, _Writer(fb)
        values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        self.shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
        self.types = {v.name: v.type.tensor_type.elem_type for v in values}
        self.forms: dict[Form, int] = {}
        self.scales: dict[str, _Scales] = {}
        self.done: set[str] = set()

    def convert(self) -> bytes:
        initial = {tensor.name for tensor in self.proto.graph.initializer}
        inputs = [value.name for value in self.proto.graph.input if value.name not in initial]
        for name in inputs:
            given = self.new(name, self.shapes[name], dtype=self.declared(name))
            self.out.graph.inputs = [*(self.out.graph.inputs or ()), given]
            self.forms[name, False, False] = self.cast(given, self.dtype(name))
        for node in self.proto.graph.node:
            if node.op_type != "Constant" and node.output[0] not in self.done and self.value(node.output[0]) is None:
                self._node(node)
        for value in self.proto.graph.output:
            self.out.graph.outputs = [*(self.out.graph.outputs or ()), self._result(value.name)]
        return self.out.finish({entry.key: entry.value for entry in self.proto.metadata_props})

    def _node(self, node: onnx.NodeProto) -> None:
        handler = HANDLERS.get(node.op_type) if node.domain in {"", "ai.onnx"} else None
        if handler is None:
            raise self.refusal(node, "has no counterpart in LiteRT that is written here")
        if node.op_type not in _OF_ANY_TYPE and self.dtype(node.output[0]) != np.float32:
            raise self.refusal(node, f"of the type {self.dtype(node.output[0])} is not written; that of floats is")
        handler(self, node, attributes_of(node))

    def refusal(self, node: onnx.NodeProto, why: str) -> ExportError:
        return ExportError(
            f"{node.name or node.output[0]}: {node.op_type} {why}. Replace the operation in the model, end the "
            "exported network before it, or run the ONNX file on onnxruntime or openvino"
        )

    # -- tensors -------------------------------------------------------------------------------------------------

    def new(self, name: str, shape: Sequence[int], scales: _Scales | None = None, dtype: Any = np.float32) -> int:
        dtype = dtype if scales is None else np.int16 if scales.bits == 16 else np.int8
        return self.out.tensor(name, shape, dtype, scales)

    def add(
        self,
        op: str,
        inputs: Sequence[int],
        name: str,
        shape: Sequence[int],
        scales: _Scales | None = None,
        dtype: Any = np.float32,
        **options: Any,
    ) -> int:
        """Add an operator, and return its result, a new tensor."""
        made = self.new(name, shape, scales, dtype)
        self.out.operator(op, inputs, [made], **options)
        return made

    def declared(self, name: str) -> np.dtype[Any]:
        """The type of an input or output of the ONNX file, which the LiteRT file keeps."""
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.types[name]))
        if found not in self.out.types:
            raise ExportError(
                f"{name!r} has the type {found}; a LiteRT file is written with {', '.join(map(str, self.out.types))}"
            )
        return found

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type in which a tensor that is not quantized is held: float32 for all floats."""
        kind = self.types.get(name, onnx.TensorProto.FLOAT)
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        return found if found.kind in "iub" else np.dtype(np.float32)

    def cast(self, source: int, dtype: np.dtype[Any]) -> int:
        tensor, kind = self.out.graph.tensors[source], self.out.types[dtype]
        if tensor.type == kind:
            return source
        kinds = {"inDataType": tensor.type, "outDataType": kind}
        return self.add("CAST", [source], f"{tensor.name}/{dtype}", tensor.shape, dtype=dtype, **kinds)

    def shape(self, name: str) -> tuple[int, ...]:
        value = self.value(name)
        return self.shapes[name] if value is None else value.shape

    def value(self, name: str) -> Array | None:
        """The value of a constant, also of a dequantized one; None if it is computed."""
        found = self.graph.array(name)
        node = self.graph.producers.get(name)
        if found is not None or node is None:
            return found
        if node.op_type == "Transpose":
            inner = self.value(node.input[0])
            return None if inner is None else inner.transpose(attributes_of(node).get("perm"))
        if node.op_type != "DequantizeLinear" or (stored := self.graph.array(node.input[0])) is None:
            return None
        scales = self.scales_of(node)
        zero = self.graph.array(node.input[2]) if len(node.input) > 2 else None
        axis, rank = scales.axis % max(stored.ndim, 1), stored.ndim
        spread = [-1 if i == axis else 1 for i in range(rank)] if scales.scale.ndim else []
        moved = stored.astype(np.float32) - (0 if zero is None else zero.astype(np.float32).reshape(spread))
        return moved * scales.scale.reshape(spread)

    def scales_of(self, node: onnx.NodeProto) -> _Scales:
        """The scales of a QuantizeLinear or DequantizeLinear, zero points as int8 or int16 has them."""
        scale, zero = self.graph.array(node.input[1]), None
        if len(node.input) > 2 and node.input[2]:
            zero = self.graph.array(node.input[2])
        if scale is None or (zero is None and len(node.input) > 2):
            raise self.refusal(node, "has a computed scale")
        attributes = attributes_of(node)
        kind = np.dtype(np.uint8) if zero is None else zero.dtype
        if kind not in (np.uint8, np.int8, np.uint16, np.int16, np.int32) and kind.name != "int4":
            raise self.refusal(node, f"has integers of the type {kind}, which LiteRT does not take")
        shift = 2 ** (8 * kind.itemsize - 1) if kind.kind == "u" else 0
        moved = (np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)) - shift
        bits = 16 if kind.itemsize == 2 else 8
        if bits == 16 and moved.any():
            raise self.refusal(
                node,
                "has 16 bits and a zero point, and LiteRT has none there; quantize the network with target: litert",
            )
        axis = int(attributes.get("axis", 1)) if scale.ndim else 0  # XNNPACK takes no other axis of one scale
        return _Scales(np.asarray(scale, np.float32), moved, bits, axis)

    def has(self, name: str, *, last: bool, integers: bool = False) -> bool:
        return (name, last, integers) in self.forms

    def is_last(self, name: str) -> bool:
        """True if a tensor is held with channels last alone."""
        return any(self.has(name, last=True, integers=i) for i in (False, True)) and not any(
            self.has(name, last=False, integers=i) for i in (False, True)
        )

    def get(self, name: str, *, last: bool, integers: bool = False) -> int:
        """The tensor of the file that holds `name` in a form, made from another form if need be."""
        key = (name, last, integers)
        if key not in self.forms:
            self.forms[key] = self._made(name, last, integers)
        return self.forms[key]

    def _made(self, name: str, last: bool, integers: bool) -> int:
        value = None if integers else self.value(name)
        if value is not None:
            wide = np.dtype(np.int32) if value.dtype == np.int64 else value.dtype
            kept = value.astype(wide if wide.kind in "iub" else np.float32)
            return self.out.constant(kept.transpose(_LAST) if last else kept, name)
        scales = self.scales.get(name)
        shape = self.placed(self.shapes[name], last)
        if self.has(name, last=not last, integers=integers):
            held = scales if integers else None
            made = self.new(f"{name}/{'last' if last else 'second'}", shape, held, self.dtype(name))
            order = _LAST if last else tuple(_PLACE[i] for i in range(4))
            self.move(self.forms[name, not last, integers], made, order)
            return made
        if integers or scales is None:
            raise ExportError(f"tensor {name!r} is read before it is written; the file is not in order")
        made = self.new(name, shape)
        self.out.operator("DEQUANTIZE", [self.get(name, last=last, integers=True)], [made])
        return made

    @staticmethod
    def placed(shape: Sequence[int], last: bool) -> tuple[int, ...]:
        return tuple(shape[i] for i in _LAST) if last else tuple(shape)

    def move(self, source: int, made: int, order: Sequence[int]) -> None:
        """Transpose; a transposition that moves no two sizes above 1 past each other is a reshape."""
        shape = self.out.graph.tensors[source].shape
        moved = [i for i in order if shape[i] > 1]
        if moved == sorted(moved):
            self.reshape(source, made)
        else:
            self.out.operator("TRANSPOSE", [source, self.numbers(order)], [made])

    def reshape(self, source: int, made: int) -> None:
        shape = list(self.out.graph.tensors[made].shape)
        self.out.operator("RESHAPE", [source, self.numbers(shape)], [made], newShape=shape)

    def numbers(self, values: Sequence[int]) -> int:
        return self.out.constant(np.asarray(values, np.int32))

    def _result(self, name: str) -> int:
        place = self.cast(self.get(name, last=False), self.declared(name))
        tensor = self.out.graph.tensors[place]
        if place in {*self.out.graph.inputs, *(self.out.graph.outputs or ())} or tensor.buffer:  # one name a tensor
            copy = self.new(name, tensor.shape, dtype=self.declared(name))
            self.reshape(place, copy)
            place, tensor = copy, self.out.graph.tensors[copy]
        tensor.name = name
        return place

    def given(self, node: onnx.NodeProto, place: int) -> Array | None:
        """An input that has to be a constant; None if the node has none at that place."""
        name = node.input[place] if len(node.input) > place else ""
        found = self.value(name) if name else None
        if name and found is None:
            raise self.refusal(node, f"reads {name!r}, which is computed and must be a constant here")
        return found

    # -- integers ------------------------------------------------------------------------------------------------

    def quantize(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        """QuantizeLinear: its result, and that of the DequantizeLinear after it, are integers."""
        source, scales = node.input[0], self.scales_of(node)
        last = self.is_last(source)
        self.scales[node.output[0]] = scales
        own = self.scales.get(source)
        if own is not None and own.same(scales):
            self._alias(node.output[0], source)
            return
        made = self.new(node.name or node.output[0], self.placed(self.shape(source), last), scales)
        self.forms[node.output[0], last, True] = made
        self.out.operator("QUANTIZE", [self.get(source, last=last, integers=own is not None)], [made])

    def dequantize(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        """DequantizeLinear of a computed tensor: the same integers; a float tensor is made where one is read."""
        source = node.input[0]
        if source not in self.scales or not self.scales[source].same(self.scales_of(node)):
            made = next(
                (entry.value for entry in self.proto.metadata_props if entry.key == TARGET_KEY), "another target"
            )
            raise ExportError(
                f"{node.name or source}: the integers are read with another zero point or scale than they were written "
                f"with, as files for {made} have it and LiteRT does not; quantize the network with target: litert"
            )
        self._alias(node.output[0], source)

    def alike(self, chain: _Chain, *names: str) -> tuple[str, ...]:
        """Integers that an operator reads and writes, in one width: LiteRT's kernels mix no 8 and 16 bits."""
        if chain.scales is None or len({chain.scales.bits, *(self.scales[name].bits for name in names)}) == 1:
            return names
        if chain.scales.bits == 8:
            chain.narrow, chain.scales = chain.scales, chain.scales.widened()
        return tuple(map(self._widened, names))

    def _widened(self, name: str) -> str:
        """The tensor with 16 bits, with the layout that it has."""
        held, wide, last = self.scales[name], f"{name}/wide", self.is_last(name)
        if held.bits == 16:
            return name
        if wide not in self.scales:
            self.scales[wide], self.shapes[wide] = held.widened(), self.shape(name)
            read, shape = self.get(name, last=last, integers=True), self.placed(self.shape(name), last)
            self.forms[wide, last, True] = self.add("QUANTIZE", [read], wide, shape, self.scales[wide])
        return wide

    def _alias(self, name: str, source: str) -> None:
        """Let a tensor be another in all forms that are there; as integers, it has the scales of the other."""
        if source in self.scales:
            self.scales[name] = self.scales[source]
        held = [(form, place) for form, place in self.forms.items() if form[0] == source]
        self.forms |= {(name, last, integers): place for (_, last, integers), place in held}

    def chain(self, name: str, *, bias: bool = False) -> _Chain:
        """What one operator computes after a product: a bias, an activation, the quantizer of the result."""
        found = _Chain(name)
        after = self.graph.alone(name)
        if bias and after is not None and after.op_type == "Add":
            value = self.value(after.input[1] if after.input[0] == name else after.input[0])
            if value is not None and value.ndim == 1 and value.size == self.shape(name)[-1]:
                found.bias, found.end = value, after.output[0]
                found.nodes.append(after)
                after = self.graph.alone(found.end)
        limits = None if after is None else self.bounds(after)
        if after is not None and limits is not None:
            self._quantized(found, after.output[0])
            covered = found.scales is not None and _covers(limits, found.scales)
            kind = 0 if covered else self._fused(limits)
            if kind is not None or found.scales is not None:
                found.fused, found.limits = kind or 0, limits if kind is None else None
                found.nodes.append(after)
                found.end = after.output[0]
                return found
        self._quantized(found, found.end)
        return found

    def _quantized(self, chain: _Chain, end: str) -> None:
        """Give a chain the scales of the quantizers that alone read a tensor, if they are of one kind."""
        readers = self.graph.consumers.get(end, [])
        each = [self.scales_of(r) for r in readers if r.op_type == "QuantizeLinear" and end not in self.graph.outputs]
        same = len(each) == len(readers) > 0 and all(one.same(each[0]) for one in each)
        chain.scales, chain.readers = (each[0], readers) if same else (None, [])

    def _fused(self, limits: tuple[float, float]) -> int | None:
        """The number of LiteRT's fused activation with these limits; None if there is none."""
        kinds = self.fb.ActivationFunctionType
        return {(0.0, 6.0): kinds.RELU6, (0.0, math.inf): kinds.RELU, (-1.0, 1.0): kinds.RELU_N1_TO_1}.get(limits)

    def bounds(self, node: onnx.NodeProto) -> tuple[float, float] | None:
        """The limits of a Relu or Clip; None for another node."""
        if node.op_type == "Relu":
            return 0.0, math.inf
        if node.op_type != "Clip":
            return None
        low, high = (self.given(node, place) for place in (1, 2))
        least = -math.inf if low is None else float(low.reshape(-1)[0])
        most = math.inf if high is None else float(high.reshape(-1)[0])
        return (-math.inf if least < -3e38 else least), (math.inf if most > 3e38 else most)

    def emit(
        self, op: str, inputs: Sequence[int], node: onnx.NodeProto, chain: _Chain, *, last: bool, **options: Any
    ) -> None:
        """Add an operator that computes a whole chain, with integers as its result if the chain has scales."""
        shape = self.shape(node.output[0])
        if chain.fused:
            options["fusedActivationFunction"] = chain.fused
        placed = self.placed(_image(shape) if last else shape, last)
        made = self.add(op, inputs, node.name or node.output[0], placed, chain.scales, **options)
        self.finish(chain, made, shape, last)

    def finish(self, chain: _Chain, made: int, shape: Sequence[int], last: bool) -> None:
        """Make a tensor of the file the result of a chain of this shape."""
        for op, limit in zip(("MAXIMUM", "MINIMUM"), chain.limits or (), strict=False):
            if math.isfinite(limit):
                made = self._bounded(op, made, limit, chain.scales)
        if last:
            made, last = self.of_image(made, shape, chain.scales)
        self.done.update(inner.output[0] for inner in chain.nodes)
        self.store(chain, made, last)

    def _bounded(self, op: str, source: int, limit: float, scales: _Scales | None) -> int:
        """A tensor bounded on one side; integers by the limit's own, which rounds as the limited number would."""
        value = np.asarray(limit, np.float32)
        if scales is not None:
            ends = np.iinfo(np.int16 if scales.bits == 16 else np.int8)
            value = np.clip(np.rint(value / scales.scale) + scales.zero, ends.min, ends.max).astype(ends.dtype)
        tensor = self.out.graph.tensors[source]
        made = self.new(f"{tensor.name}/{op.lower()}", tensor.shape, scales)
        self.out.operator(op, [source, self.out.constant(value.reshape(()), "", scales)], [made])
        return made

    def image(self, name: str, *, integers: bool) -> int:
        """An image with channels last; a signal (N, C, L) as one of a single row, (N, 1, L, C)."""
        shape, key = self.shape(name), (f"{name}/image", True, integers)
        if len(shape) != 3:
            return self.get(name, last=True, integers=integers)
        if key not in self.forms:
            scales = self.scales[name] if integers else None
            turned = self.new(f"{name}/turned", (shape[0], shape[2], shape[1]), scales)
            self.move(self.get(name, last=False, integers=integers), turned, (0, 2, 1))
            self.forms[key] = self.new(key[0], self.placed(_image(shape), True), scales)
            self.reshape(turned, self.forms[key])
        return self.forms[key]

    def of_image(self, made: int, shape: Sequence[int], scales: _Scales | None) -> tuple[int, bool]:
        """(The tensor of that shape, True with channels last) of an image; a signal loses the axis it was given."""
        if len(shape) != 3:
            return made, True
        name = self.out.graph.tensors[made].name
        turned = self.new(f"{name}/turned", (shape[0], shape[2], shape[1]), scales)
        self.reshape(made, turned)
        second = self.new(f"{name}/second", shape, scales)
        self.move(turned, second, (0, 2, 1))
        return second, False

    def store(self, chain: _Chain, made: int, last: bool) -> None:
        """Make a tensor of the file the result of a chain."""
        if chain.scales is None:
            self.forms[chain.end, last, False] = made
            return
        if chain.narrow is not None:
            wide, chain.scales = made, chain.narrow
            tensor = self.out.graph.tensors[wide]
            made = self.add("QUANTIZE", [wide], f"{tensor.name}/narrow", tensor.shape, chain.scales)
        for reader in chain.readers:
            self.done.add(reader.output[0])
            self.scales[reader.output[0]] = chain.scales
            self.forms[reader.output[0], last, True] = made

    def integers(self, *names: str) -> bool:
        """True if all tensors exist as integers."""
        return all(name in self.scales for name in names)


@dataclass
class _Chain:
    """A product's result and what is computed after it in the same operator; `scales` if its result is integers.

    `limits` are those of a Clip that LiteRT cannot fuse: operators of their own, on the same integers. `narrow` are the
    scales of 8 bits that a result of 16 gets.
    """

    end: str
    fused: int = 0
    bias: Array | None = None
    scales: _Scales | None = None
    limits: tuple[float, float] | None = None
    narrow: _Scales | None = None

    def __post_init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.readers: list[onnx.NodeProto] = []


Handler = Callable[[_Converter, onnx.NodeProto, Mapping[str, Any]], None]


def _image(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a signal as an image of one row; any other as it is."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else tuple(shape)


def _window(
    c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any], kernel: Sequence[int] | None = None
) -> Window:
    """The window of a convolution or pool over an image, or over a signal as an image of one row."""
    size = c.shape(node.input[0])[2:]
    window = read_window(attributes, size, kernel)
    if len(size) == 1:
        return Window(
            kernel=(1, *window.kernel),
            strides=(1, *window.strides),
            dilations=(1, *window.dilations),
            pads=((0, 0), *window.pads),
            ceil=window.ceil,
        )
    if len(size) != 2:
        raise c.refusal(node, f"over {len(size)} spatial axes is not in LiteRT, whose windows have 2")
    return window


# -- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """A constant weight: integers with their scales, or float32."""

    value: Array
    scales: _Scales | None

    def arranged(self, order: Sequence[int]) -> _Weight:
        """The weight with its axes in another order."""
        scales = self.scales
        if scales is not None:
            scales = _Scales(scales.scale, scales.zero, scales.bits, list(order).index(scales.axis))
        return _Weight(self.value.transpose(order), scales)


def _weight(c: _Converter, name: str, *, integers: bool) -> _Weight | None:
    """The weight of a product; None if it is computed."""
    value = c.value(name)
    if value is None:
        return None
    node, orders = c.graph.producers.get(name), []
    while node is not None and node.op_type == "Transpose":
        orders.append(list(attributes_of(node).get("perm", range(value.ndim)[::-1])))
        node = c.graph.producers.get(node.input[0])
    stored = c.graph.array(node.input[0]) if node is not None and node.op_type == "DequantizeLinear" else None
    if not integers or node is None or stored is None:
        return _Weight(value.astype(np.float32), None)
    scales = c.scales_of(node)
    if scales.zero.any() or stored.dtype == np.uint8:
        raise c.refusal(node, "has a weight with a zero point, and LiteRT takes symmetric ones")
    axis = scales.axis % value.ndim if scales.scale.ndim else 0
    found = _Weight(stored.astype(np.int8), _Scales(scales.scale, scales.zero, 8, axis))
    for order in reversed(orders):
        found = found.arranged(order)
    return found


def _bias(c: _Converter, value: Array | None, weight: _Weight, channels: int, source: str) -> int:
    """The bias of a product: float32, or INT32 (INT64 for 16-bit activations) in steps of input * weight."""
    value = np.zeros(channels, np.float32) if value is None else value.astype(np.float32).reshape(-1)
    if weight.scales is None:
        return c.out.constant(value)
    step = np.asarray(c.scales[source].scale * weight.scales.scale)  # one, or one for each channel, as the weight has
    wide = c.scales[source].bits == 16
    limits = np.iinfo(np.int64 if wide else np.int32)
    whole = np.clip(np.rint(value / step.astype(np.float64)), limits.min, limits.max).astype(limits.dtype)
    return c.out.constant(whole, "", _Scales(step, np.zeros(step.shape, np.int64)))


def _product(c: _Converter, node: onnx.NodeProto, *, bias: bool = False) -> tuple[_Chain, _Weight, str]:
    """The chain after a product by a constant, its weight and input, as integers if the whole chain is."""
    chain = c.chain(node.output[0], bias=bias)
    quantized = c.integers(node.input[0]) and chain.scales is not None
    weight = _weight(c, node.input[1], integers=quantized)
    if weight is None:
        raise c.refusal(node, "has a computed weight")
    if weight.scales is None and chain.scales is not None:
        chain.scales, chain.readers = None, []
    return chain, weight, c.alike(chain, node.input[0])[0]


def _conv(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    chain, weight, source = _product(c, node)
    integers = weight.scales is not None
    size, groups = c.shape(source), int(attributes.get("group", 1))
    window = _window(c, node, attributes, weight.value.shape[2:])
    weight = replace(weight, value=weight.value.reshape(_image(weight.value.shape)))
    depthwise = groups == size[1] and weight.value.shape[1] == 1
    arranged = weight.arranged((1, 2, 3, 0) if depthwise else (0, 2, 3, 1))
    read, padding = _padded(c, source, window, integers=integers, least=False, node=node)
    bias, channels = c.given(node, 2), weight.value.shape[0]
    inputs = [read, c.out.constant(arranged.value, f"{node.name}/weight", arranged.scales)]
    inputs.append(_bias(c, bias, arranged, channels, source))
    options = {
        "padding": padding,
        "strideH": window.strides[0],
        "strideW": window.strides[1],
        "dilationHFactor": window.dilations[0],
        "dilationWFactor": window.dilations[1],
    }
    if depthwise:
        options["depthMultiplier"] = channels // size[1]
    c.emit("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", inputs, node, chain, last=True, **options)


def _padded(
    c: _Converter,
    source: str,
    window: Window,
    *,
    integers: bool,
    least: bool,
    node: onnx.NodeProto,
    apart: bool = False,
) -> tuple[int, int]:
    """(The input of a window, LiteRT's padding): SAME and VALID are what it knows, others are padded before.

    With `least`, by the lowest number, as a maximum needs; with `apart`, always before.
    """
    read, size = c.image(source, integers=integers), _image(c.shape(source))[2:]
    ends = []
    for n, k, s, d, (before, after) in zip(
        size, window.kernel, window.strides, window.dilations, window.pads, strict=True
    ):
        reach = d * (k - 1) + 1
        short = -(n + before + after - reach) % s if window.ceil else 0
        ends.append((before, after + short))
    if not any(map(any, ends)):
        return read, int(c.fb.Padding.VALID)
    same = [
        max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
        for n, k, s, d in zip(size, window.kernel, window.strides, window.dilations, strict=True)
    ]
    if not apart and [(total // 2, total - total // 2) for total in same] == ends:
        return read, int(c.fb.Padding.SAME)
    tensor = c.out.graph.tensors[read]
    pads = np.asarray([(0, 0), *ends, (0, 0)], np.int32)
    shape = [n + int(a) + int(b) for n, (a, b) in zip(tensor.shape, pads, strict=True)]
    scales = c.scales[source] if integers else None
    made, inputs = c.new(f"{node.name}/padded", shape, scales), [read, c.out.constant(pads)]
    if least and not (scales is not None and scales.zero == -128):  # there 0.0 is the lowest integer
        info = np.finfo(np.float32) if scales is None else np.iinfo(np.int16 if scales.bits == 16 else np.int8)
        inputs.append(c.out.constant(np.asarray([info.min], info.dtype), "", scales))
        c.out.operator("PADV2", inputs, [made], kind="PadV2")
    else:
        c.out.operator("PAD", inputs, [made])
    return made, int(c.fb.Padding.VALID)


def _conv_transpose(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    chain, weight, source = _product(c, node)
    out = _image(c.shape(node.output[0]))
    pads = transposed_pads(attributes, c.shape(source)[2:], weight.value.shape[2:])
    if pads is None:
        raise c.refusal(node, "with an output_shape beyond what its kernel reaches is not written")
    window = _window(c, node, {**attributes, "auto_pad": "NOTSET", "pads": pads}, weight.value.shape[2:])
    weight = replace(weight, value=weight.value.reshape(_image(weight.value.shape)))
    starts = [pair[0] for pair in window.pads]
    ends = [start + n for start, n in zip(starts, out[2:], strict=True)]
    size = _image(c.shape(source))[2:]
    weight = _plain_kernel(weight, int(attributes.get("group", 1)), window, ends, size)
    arranged = weight.arranged((1, 2, 3, 0))
    whole = [(n - 1) * s + k for n, s, k in zip(size, window.strides, weight.value.shape[2:], strict=True)]
    fused, chain.fused = chain.fused, 0
    channels = out[1]
    inputs = [
        c.numbers([out[0], *whole, channels]),
        c.out.constant(arranged.value, f"{node.name}/weight", arranged.scales),
        c.image(source, integers=weight.scales is not None),
        _bias(c, c.given(node, 2), arranged, channels, source),
    ]
    options = {"strideH": window.strides[0], "strideW": window.strides[1], "fusedActivationFunction": fused}
    options["padding"] = int(c.fb.Padding.VALID)
    made = c.add("TRANSPOSE_CONV", inputs, node.name, [out[0], *whole, channels], chain.scales, **options)
    if list(out[2:]) != whole:
        cut = c.new(f"{node.name}/cut", c.placed(out, True), chain.scales)
        c.out.operator("SLICE", [made, c.numbers([0, *starts, 0]), c.numbers(c.placed(out, True))], [cut])
        made = cut
    c.finish(chain, made, c.shape(node.output[0]), True)


def _plain_kernel(weight: _Weight, groups: int, window: Window, ends: Sequence[int], size: Sequence[int]) -> _Weight:
    """The kernel (in, out, height, width) of a transposed convolution without groups and dilations, by zeros."""
    # It reaches as far as the result, of which rows and columns before `ends` are read: `output_padding` may extend it
    # beyond the kernel. The weight is (in, out / groups, height, width); its scales are of outputs, shared by the
    # groups, or one.
    value, scales = weight.value, weight.scales
    inputs, outputs = value.shape[:2]
    reach = [d * (k - 1) + 1 for k, d in zip(value.shape[2:], window.dilations, strict=True)]
    reach = [max(r, e - (n - 1) * s) for r, e, n, s in zip(reach, ends, size, window.strides, strict=True)]
    plain = np.zeros((inputs, outputs * groups, *reach), value.dtype)
    (high, wide), (down, right) = value.shape[2:], window.dilations
    for group in range(groups):
        rows = slice(group * inputs // groups, (group + 1) * inputs // groups)
        columns = slice(group * outputs, (group + 1) * outputs)
        plain[rows, columns, : down * (high - 1) + 1 : down, : right * (wide - 1) + 1 : right] = value[rows]
    if scales is not None and scales.scale.ndim and scales.axis == 1:
        scales = replace(scales, scale=np.tile(scales.scale, groups), zero=np.tile(scales.zero, groups))
    return _Weight(plain, scales)


def _gemm(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    if attributes.get("transA") or {attributes.get(key, 1.0) for key in ("alpha", "beta")} != {1.0}:
        raise c.refusal(node, "with transA, alpha or beta is not written")
    chain, weight, source = _product(c, node)
    bias, weight = c.given(node, 2), weight if attributes.get("transB") else weight.arranged((1, 0))
    if bias is not None:
        if bias.size > 1 and bias.shape[-1] != bias.size:
            raise c.refusal(node, f"with a bias of the shape {bias.shape} is not written")
        bias = np.broadcast_to(bias.reshape(-1), weight.value.shape[:1])
    _linear(c, node, chain, weight, bias, source)


def _linear(
    c: _Converter, node: onnx.NodeProto, chain: _Chain, weight: _Weight, bias: Array | None, source: str
) -> None:
    inputs = [
        c.get(source, last=False, integers=weight.scales is not None),
        c.out.constant(weight.value, f"{node.name}/weight", weight.scales),
        _bias(c, bias, weight, weight.value.shape[0], source),
    ]
    c.emit("FULLY_CONNECTED", inputs, node, chain, last=False, keepNumDims=len(c.shape(source)) > 2)


def _matmul(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    value = c.value(node.input[1])
    if value is not None and value.ndim == 2:
        chain, weight, source = _product(c, node, bias=True)
        _linear(c, node, chain, weight.arranged((1, 0)), chain.bias, source)
        return
    chain, integers = c.chain(node.output[0]), c.integers(*node.input)
    if not integers or chain.fused or chain.limits:
        chain = _Chain(node.output[0])
    inputs = [c.get(name, last=False, integers=chain.scales is not None) for name in c.alike(chain, *node.input)]
    c.emit("BATCH_MATMUL", inputs, node, chain, last=False, kind="BatchMatMul")


_BINARY = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "DIV", "Pow": "POW", "Max": "MAXIMUM", "Min": "MINIMUM"}
_INTEGER_BINARY = frozenset({"Add", "Sub", "Mul"})


def _binary(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    if len(node.input) != 2:
        raise c.refusal(node, f"of {len(node.input)} tensors is not written")
    op, chain = _BINARY[node.op_type], c.chain(node.output[0])
    quantized = node.op_type in _INTEGER_BINARY and chain.scales is not None and c.integers(*node.input)
    if not quantized:
        chain.scales, chain.readers = None, []
    if op not in {"ADD", "SUB", "MUL", "DIV"}:
        chain = _Chain(node.output[0])
    rank = len(c.shape(node.output[0]))
    last = rank == 4 and any(c.is_last(name) for name in node.input)
    inputs = [_operand(c, name, rank, last, integers=quantized) for name in c.alike(chain, *node.input)]
    c.emit(op, inputs, node, chain, last=last)


def _operand(c: _Converter, name: str, rank: int, last: bool, *, integers: bool = False) -> int:
    """A tensor that is broadcast to a rank, with channels last or not."""
    shape = c.shape(name)
    if not last or len(shape) == 4:
        return c.get(name, last=last, integers=integers)
    value = c.value(name)
    if value is not None:
        wide = value.reshape((1,) * (rank - value.ndim) + value.shape)
        return c.out.constant(wide if wide.size == 1 else wide.transpose(_LAST), name)
    full = (1,) * (rank - len(shape)) + shape
    scales = c.scales[name] if integers else None
    widened = c.new(f"{name}/wide", full, scales, c.dtype(name))
    made = c.new(f"{name}/last", c.placed(full, True), scales, c.dtype(name))
    c.reshape(c.get(name, last=False, integers=integers), widened)
    c.move(widened, made, _LAST)
    return made


_UNARY = {
    "Relu": "RELU",
    "HardSwish": "HARD_SWISH",
    "Sigmoid": "LOGISTIC",
    "Tanh": "TANH",
    "Exp": "EXP",
    "Log": "LOG",
    "Sqrt": "SQRT",
    "Neg": "NEG",
    "Abs": "ABS",
    "Floor": "FLOOR",
    "Ceil": "CEIL",
    "Round": "ROUND",
    "Sin": "SIN",
    "Cos": "COS",
    "Sign": "SIGN",
    "LeakyRelu": "LEAKY_RELU",
    "Gelu": "GELU",
}


def _unary(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    options: dict[str, Any] = {}
    if node.op_type == "LeakyRelu":
        options["alpha"] = attributes.get("alpha", 0.01)
    if node.op_type == "Gelu":
        options["approximate"] = attributes.get("approximate", "none") == "tanh"
    _apply(c, _UNARY[node.op_type], node.input[0], node.output[0], **options)


def _apply(c: _Converter, op: str, source: str, result: str, *others: Array | str, **options: Any) -> None:
    """Add a float operator of one tensor and constants or tensors of its shape, in the layout of the tensor."""
    last = c.is_last(source)
    made = c.new(result, c.placed(c.shape(source), last))
    read = [c.get(one, last=last) if isinstance(one, str) else c.out.constant(one) for one in (source, *others)]
    c.out.operator(op, read, [made], **options)
    c.forms[result, last, False] = made
    c.shapes.setdefault(result, c.shape(source))


def _steps(c: _Converter, source: str, result: str, steps: Sequence[tuple[str, tuple[Array, ...]]]) -> None:
    for i, (op, others) in enumerate(steps):
        name = result if i == len(steps) - 1 else f"{result}/{i}"
        _apply(c, op, source, name, *others)
        source = name


def _number(value: float) -> tuple[Array, ...]:
    return (np.asarray(value, np.float32),)


def _clip(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    low, high = c.bounds(node) or (-math.inf, math.inf)
    if math.isinf(low) and math.isinf(high):
        c._alias(node.output[0], node.input[0])
        return
    known = {(0.0, 6.0): "RELU6", (0.0, math.inf): "RELU", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, 1.0): "RELU_0_TO_1"}
    if (low, high) in known:
        _steps(c, node.input[0], node.output[0], [(known[low, high], ())])
        return
    steps = [("MAXIMUM", _number(low))] if low > -math.inf else []
    _steps(c, node.input[0], node.output[0], [*steps, *([("MINIMUM", _number(high))] if high < math.inf else [])])


def _hard_sigmoid(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    slope, centre = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    _steps(c, node.input[0], node.output[0], [("MUL", _number(slope)), ("ADD", _number(centre)), ("RELU_0_TO_1", ())])


def _softplus(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow; Mish is x times its tanh."""
    source, result = node.input[0], node.output[0]
    steps = (("ABS", ()), ("NEG", ()), ("EXP", ()), ("ADD", _number(1.0)), ("LOG", ()))
    _steps(c, source, f"{result}/below", steps)
    _apply(c, "RELU", source, f"{result}/above")
    if node.op_type == "Softplus":
        _apply(c, "ADD", f"{result}/above", result, f"{result}/below")
    else:
        _apply(c, "ADD", f"{result}/above", f"{result}/sum", f"{result}/below")
        _apply(c, "TANH", f"{result}/sum", f"{result}/tanh")
        _apply(c, "MUL", source, result, f"{result}/tanh")


def _elu(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """Elu, Selu and Celu: gamma * (max(x, 0) + alpha * (exp(min(x, 0) / divisor) - 1))."""
    source, result, kind = node.input[0], node.output[0], node.op_type
    alpha = attributes.get("alpha", 1.6732632423543772 if kind == "Selu" else 1.0)
    if kind == "Elu" and alpha == 1.0:
        _apply(c, "ELU", source, result)
        return
    gamma = attributes.get("gamma", 1.0507009873554805) if kind == "Selu" else 1.0
    inner = ("MUL", _number(1 / alpha if kind == "Celu" else 1.0))
    steps = (("MINIMUM", _number(0.0)), inner, ("EXP", ()), ("SUB", _number(1.0)), ("MUL", _number(alpha)))
    _steps(c, source, f"{result}/below", steps)
    _apply(c, "RELU", source, f"{result}/above")
    _apply(c, "ADD", f"{result}/above", f"{result}/sum", f"{result}/below")
    _apply(c, "MUL", f"{result}/sum", result, *_number(gamma))


def _logical(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """Comparisons, logic and Where, of floats and truth values."""
    if any(c.dtype(name).kind == "i" for name in (*node.input, *node.output)):
        raise c.refusal(node, "of integers is not written; that of floats is")
    rank = len(c.shape(node.output[0]))
    last = rank == 4 and any(c.is_last(name) for name in node.input)
    made = _moved(c, node, node.output[0], c.shape(node.output[0]), last=last, integers=False)
    c.out.operator(_LOGICAL[node.op_type], [_operand(c, name, rank, last) for name in node.input], [made])


def _arg_max(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    if attributes.get("select_last_index", 0):
        raise c.refusal(node, "of the last place is not in LiteRT")
    source, result, shape = node.input[0], node.output[0], c.shape(node.input[0])
    axis = int(attributes.get("axis", 0)) % len(shape)
    rest, kind = [*shape[:axis], *shape[axis + 1 :]], c.dtype(result)
    made = c.new(node.name or result, rest, dtype=kind)
    read = [c.get(source, last=False), c.out.constant(np.asarray(axis, np.int32))]
    c.out.operator("ARG_MAX", read, [made], outputType=c.out.types[kind])
    if attributes.get("keepdims", 1):
        flat, made = made, c.new(f"{result}/kept", c.shape(result), dtype=kind)
        c.reshape(flat, made)
    c.forms[result, False, False] = made


def _reciprocal(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _steps(c, node.input[0], node.output[0], [("POW", _number(-1.0))])


def _prelu(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    slope = c.value(node.input[1])
    if slope is None:
        raise c.refusal(node, "has a computed slope")
    last, rank = c.is_last(node.input[0]), len(c.shape(node.input[0]))
    wide = slope.reshape((1,) * (rank - slope.ndim) + slope.shape)
    _apply(c, "PRELU", node.input[0], node.output[0], (wide.transpose(_LAST) if last else wide)[0])


def _erf(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """GELU as exporters spell it, in any order: LiteRT has no Erf."""
    form = OnnxForm(c.graph, opset_of(c.proto))
    found = spelled_activation(node.output[0], form)
    if found is None or found.name != "gelu":
        raise c.refusal(node, "outside a GELU is not in LiteRT")
    c.done.update(found.values)
    _apply(c, "GELU", found.x, found.values[-1], approximate=False)


# -- what moves, joins or pools ---------------------------------------------------------------------------------------


def _keeps(c: _Converter, node: onnx.NodeProto, names: Sequence[str]) -> bool:
    if not c.integers(*names) or not all(c.scales[names[0]].same(c.scales[name]) for name in names):
        return False
    for result in node.output:
        c.scales[result] = c.scales[names[0]]
    return True


def _moved(
    c: _Converter, node: onnx.NodeProto, result: str, shape: Sequence[int], *, last: bool, integers: bool
) -> int:
    kept = c.scales[result] if integers else None
    made = c.new(node.name or result, c.placed(shape, last), kept, c.dtype(result))
    c.forms[result, last, integers] = made
    return made


def _through(
    c: _Converter, node: onnx.NodeProto, op: str, *constants: Array, last: bool = False, integers: bool, **options: Any
) -> None:
    """Add an operator of one tensor, in a layout, and of constants."""
    result = node.output[0]
    made = _moved(c, node, result, c.shape(result), last=last, integers=integers)
    inputs = [c.get(node.input[0], last=last, integers=integers), *map(c.out.constant, constants)]
    c.out.operator(op, inputs, [made], **options)


def _axis(axis: int, rank: int, last: bool) -> int:
    return _PLACE[axis % rank] if last else axis % rank


def _identity(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, result = node.input[0], node.output[0]
    if c.dtype(source) == c.dtype(result):
        c._alias(result, source)
        return
    last = c.is_last(source)
    c.forms[result, last, False] = c.cast(c.get(source, last=last), c.dtype(result))


def _reshape(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, result = node.input[0], node.output[0]
    integers = _keeps(c, node, [source])
    made = _moved(c, node, result, c.shape(result), last=False, integers=integers)
    c.reshape(c.get(source, last=False, integers=integers), made)


def _transpose(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """The order of axes is composed with the layout: from channels second to last, and back, nothing moves."""
    source, result = node.input[0], node.output[0]
    integers, rank = _keeps(c, node, [source]), len(c.shape(source))
    order = tuple(attributes.get("perm", range(rank)[::-1]))
    held = c.is_last(source)
    order = tuple(_PLACE[i] for i in order) if held else order
    read = c.get(source, last=held, integers=integers)
    if order == tuple(range(rank)):
        c.forms[result, False, integers] = read
    elif rank == 4 and tuple(order[i] for i in _LAST) == (0, 1, 2, 3):
        c.forms[result, True, integers] = read
    else:
        c.move(read, _moved(c, node, result, c.shape(result), last=False, integers=integers), order)


def _concat(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    result, names = node.output[0], list(node.input)
    rank = len(c.shape(result))
    last, integers = rank == 4 and any(map(c.is_last, names)), _keeps(c, node, names)
    inputs = [c.get(name, last=last, integers=integers) for name in names]
    made = _moved(c, node, result, c.shape(result), last=last, integers=integers)
    c.out.operator("CONCATENATION", inputs, [made], axis=_axis(int(attributes["axis"]), rank, last))


def _split(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, rank = node.input[0], len(c.shape(node.input[0]))
    integers, last = _keeps(c, node, [source]), c.is_last(source)
    axis = int(attributes.get("axis", 0)) % rank
    sizes = [c.shape(result)[axis] for result in node.output]
    made = [_moved(c, node, result, c.shape(result), last=last, integers=integers) for result in node.output]
    inputs = [c.get(source, last=last, integers=integers), c.numbers(sizes)]
    inputs.append(c.out.constant(np.asarray(_axis(axis, rank, last), np.int32)))
    c.out.operator("SPLIT_V", inputs, made, numSplits=len(made), kind="SplitV")


def _slice(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source = node.input[0]
    shape, integers, last = c.shape(source), _keeps(c, node, [source]), c.is_last(source)
    starts, ends, axes, steps = (c.given(node, place) for place in range(1, 5))
    if starts is None or ends is None:
        raise c.refusal(node, "without bounds is not in the standard since opset 10")
    axes = np.arange(starts.size) if axes is None else axes
    bounds = [[0, n, 1] for n in shape]
    for i, axis in enumerate(axes.reshape(-1)):
        step = 1 if steps is None else int(steps.reshape(-1)[i])
        if step < 1:
            raise c.refusal(node, "with a negative step is not written")
        cut = slice(int(starts.reshape(-1)[i]), int(ends.reshape(-1)[i]), step)
        bounds[int(axis)] = list(cut.indices(shape[int(axis)]))
    placed = np.asarray([bounds[i] for i in _LAST] if last else bounds, np.int32)
    _through(c, node, "STRIDED_SLICE", *placed.T, last=last, integers=integers)


def _gather(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source = node.input[0]
    indices, axis = c.value(node.input[1]), int(attributes.get("axis", 0)) % len(c.shape(source))
    if indices is None:
        raise c.refusal(node, "with computed indices is not written")
    integers = _keeps(c, node, [source])
    chosen = np.where(indices < 0, indices + c.shape(source)[axis], indices).astype(np.int32)
    _through(c, node, "GATHER", chosen, integers=integers, axis=axis)


def _pad(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, rank = node.input[0], len(c.shape(node.input[0]))
    pads, value, axes = (c.given(node, place) for place in range(1, 4))
    filling = 0.0 if value is None else float(value.reshape(-1)[0])
    mode = attributes.get("mode", "constant")
    integers = not filling and _keeps(c, node, [source])  # a value beside 0 is on no grid
    if pads is None or mode not in {"constant", "reflect"} or pads.min() < 0 or (filling and mode != "constant"):
        raise c.refusal(node, f"of mode {mode!r}, value {filling} or computed or negative sizes is not written")
    ends = np.zeros((rank, 2), np.int32)
    for i, axis in enumerate(range(rank) if axes is None else axes.reshape(-1)):
        ends[int(axis)] = pads.reshape(2, -1)[:, i]
    last = c.is_last(source)
    placed = ends[list(_LAST)] if last else ends
    if filling:
        number = np.asarray([filling], c.dtype(source))
        _through(c, node, "PADV2", placed, number, last=last, integers=False, kind="PadV2")
    else:
        _through(c, node, "PAD" if mode == "constant" else "MIRROR_PAD", placed, last=last, integers=integers)


def _max_pool(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, result = node.input[0], node.output[0]
    window = _window(c, node, attributes)
    if set(window.dilations) != {1} or len(node.output) > 1:
        raise c.refusal(node, "with dilations or indices is not in LiteRT")
    integers = _keeps(c, node, [source])
    read, padding = _padded(c, source, window, integers=integers, least=True, node=node)
    _pool(c, "MAX_POOL_2D", read, result, window, padding, integers=integers)


def _pool(c: _Converter, op: str, read: int, result: str, window: Window, padding: int, *, integers: bool) -> None:
    (height, width), (rows, columns) = window.kernel, window.strides
    options = {"filterHeight": height, "filterWidth": width, "strideH": rows, "strideW": columns}
    scales, shape = c.scales[result] if integers else None, c.shape(result)
    made = c.add(op, [read], result, c.placed(_image(shape), True), scales, padding=padding, kind="Pool2D", **options)
    made, last = c.of_image(made, shape, scales)
    c.forms[result, last, integers] = made


def _average_pool(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, window = node.input[0], _window(c, node, attributes)
    if set(window.dilations) != {1}:
        raise c.refusal(node, "with dilations is not in LiteRT")
    counted = bool(attributes.get("count_include_pad", 0))
    apart = counted and any(map(any, window.pads))  # SAME counts no padding
    read, padding = _padded(c, source, window, integers=False, least=False, node=node, apart=apart)
    written = padding == c.fb.Padding.VALID and read != c.image(source, integers=False)
    if written and (window.ceil or not counted):
        raise c.refusal(node, "with this padding is not in LiteRT; count_include_pad=True without ceil_mode is")
    _pool(c, "AVERAGE_POOL_2D", read, node.output[0], window, padding, integers=False)


_REDUCTIONS = {"ReduceMean": "MEAN", "ReduceSum": "SUM", "ReduceMax": "REDUCE_MAX", "ReduceMin": "REDUCE_MIN"}


def _reduce(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, rank = node.input[0], len(c.shape(node.input[0]))
    pooled = node.op_type == "GlobalAveragePool"
    axes, keep = (list(range(2, rank)), True) if pooled else _axes(c, node, attributes)
    if not axes:
        c._alias(node.output[0], source)
        return
    op = "MEAN" if pooled else _REDUCTIONS[node.op_type]
    chain = c.chain(node.output[0])
    if op != "MEAN" or not c.integers(source) or chain.fused or chain.limits:
        chain = _Chain(node.output[0])
    integers, last = chain.scales is not None, c.is_last(source)
    (source,) = c.alike(chain, source)
    inputs = [c.get(source, last=last, integers=integers), c.numbers([_axis(a, rank, last) for a in axes])]
    if keep or not last:
        c.emit(op, inputs, node, chain, last=last, keepDims=keep, kind="Reducer")
        return
    left = [a for a in _LAST if a not in axes]
    shape = c.shape(node.output[0])
    if left != sorted(left):  # channels come last there: put what is left into its order
        by = {a: shape[i] for i, a in enumerate(sorted(left))}
        sizes = [by[a] for a in left]
        made = c.add(op, inputs, f"{node.name}/mean", sizes, chain.scales, kind="Reducer", keepDims=False)
        ordered = c.new(node.name, shape, chain.scales)
        c.move(made, ordered, [left.index(a) for a in sorted(left)])
        c.store(chain, ordered, False)
        return
    c.emit(op, inputs, node, chain, last=False, keepDims=False, kind="Reducer")


def _axes(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> tuple[list[int], bool]:
    rank, given = len(c.shape(node.input[0])), c.given(node, 1)
    axes = [int(a) % rank for a in (attributes.get("axes", ()) if given is None else given.reshape(-1))]
    every = [] if attributes.get("noop_with_empty_axes") else list(range(rank))
    return axes or every, bool(attributes.get("keepdims", 1))


def _length(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source, result, shape = node.input[0], node.output[0], c.shape(node.input[0])
    axes, keep = _axes(c, node, attributes)
    squares, total = c.new(f"{node.name}/squares", shape), c.new(f"{node.name}/sum", c.shape(result))
    c.out.operator("SQUARE", [c.get(source, last=False)], [squares])
    c.out.operator("SUM", [squares, c.numbers(axes)], [total], kind="Reducer", keepDims=keep)
    c.out.operator("SQRT", [total], [_moved(c, node, result, c.shape(result), last=False, integers=False)])


def _softmax(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    rank = len(c.shape(node.input[0]))
    axis = int(attributes.get("axis", -1)) % rank
    last = rank == 4 and axis == 1
    if axis != rank - 1 and not last:
        raise c.refusal(node, f"over axis {axis} of {rank} is not written; LiteRT's is over the last")
    op, options = ("SOFTMAX", {"beta": 1.0}) if node.op_type == "Softmax" else ("LOG_SOFTMAX", {})
    _through(c, node, op, last=last, integers=False, **options)


def _resize(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    source = node.input[0]
    shape, out = c.shape(source), c.shape(node.output[0])
    mode, kind = attributes.get("mode", "nearest"), attributes.get("coordinate_transformation_mode", "half_pixel")
    if len(shape) != 4 or shape[:2] != out[:2] or mode not in {"nearest", "linear"}:
        raise c.refusal(node, f"of mode {mode!r} on {len(shape)} axes is not in LiteRT")
    exact = kind == "asymmetric" and attributes.get("nearest_mode", "round_prefer_floor") == "floor"
    whole = all(b % a == 0 for a, b in zip(shape[2:], out[2:], strict=True))
    if mode == "nearest" and not exact and not (whole and kind in {"half_pixel", "asymmetric"}):
        raise c.refusal(node, f"of mode nearest with {kind} is not in LiteRT")
    if mode == "linear" and kind not in {"half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"}:
        raise c.refusal(node, f"of mode linear with {kind} is not in LiteRT")
    if attributes.get("antialias") or attributes.get("exclude_outside"):
        raise c.refusal(node, "with antialias or exclude_outside is not in LiteRT")
    factors = c.given(node, 2)
    sizes = [] if factors is None or kind == "align_corners" else list(zip(shape, factors.flat, out, strict=False))
    if any(abs(n * float(factor) - size) > 1e-3 for n, factor, size in sizes):
        raise c.refusal(node, "by a factor that makes no whole size is not in LiteRT; interpolate to a size")
    integers = mode == "nearest" and _keeps(c, node, [source])
    options = {"alignCorners": kind == "align_corners", "halfPixelCenters": "half_pixel" in kind}
    if mode == "nearest":
        options = {"alignCorners": False, "halfPixelCenters": False}
    op = "RESIZE_NEAREST_NEIGHBOR" if mode == "nearest" else "RESIZE_BILINEAR"
    _through(c, node, op, np.asarray(out[2:], np.int32), last=True, integers=integers, **options)


def _depth_to_space(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    """The pixel shuffle of torch has the block innermost (CRD), LiteRT's outermost: channels are reordered before."""
    source, result, block = node.input[0], node.output[0], int(attributes["blocksize"])
    integers, shape = _keeps(c, node, [source]), c.shape(source)
    read = c.get(source, last=True, integers=integers)
    if attributes.get("mode", "DCR") == "CRD":
        order = np.arange(shape[1]).reshape(-1, block * block).T.reshape(-1).astype(np.int32)
        ordered = c.new(f"{node.name}/ordered", c.placed(shape, True), c.scales[source] if integers else None)
        c.out.operator("GATHER", [read, c.out.constant(order)], [ordered], axis=3)
        read = ordered
    made, scales = _moved(c, node, result, c.shape(result), last=True, integers=integers), c.scales.get(result)
    if not integers or scales is None or scales.bits == 8:
        c.out.operator("DEPTH_TO_SPACE", [read], [made], blockSize=block)
        return
    images, channels, height, width = shape  # it has no kernel for INT16: rows of a block before its columns
    size = images * height, width, block, channels // block
    rows = c.new(f"{node.name}/rows", size, scales)
    turned = c.new(f"{node.name}/turned", [size[i] for i in (0, 2, 1, 3)], scales)
    c.reshape(read, rows)
    c.move(rows, turned, (0, 2, 1, 3))
    c.reshape(turned, made)


def _batch_norm(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    gamma, beta, mean, variance = (c.value(name) for name in node.input[1:5])
    if gamma is None or beta is None or mean is None or variance is None or attributes.get("training_mode"):
        raise c.refusal(node, "has computed statistics")
    factor = gamma / np.sqrt(variance + attributes.get("epsilon", 1e-5))
    spread = (-1,) if c.is_last(node.input[0]) else (-1, *[1] * (len(c.shape(node.input[0])) - 2))
    pairs = (("MUL", factor), ("ADD", beta - mean * factor))
    _steps(c, node.input[0], node.output[0], [(op, (value.astype(np.float32).reshape(spread),)) for op, value in pairs])


def _layer_norm(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    rank = len(c.shape(node.input[0]))
    if int(attributes.get("axis", -1)) % rank != rank - 1:
        raise c.refusal(node, "over several axes is not written")
    affine = [c.get(name, last=False) if name else None for name in node.input[1:]]
    _normalized(c, node, [rank - 1], attributes, affine)


def _instance_norm(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    rank, values = len(c.shape(node.input[0])), [c.value(name) for name in node.input[1:]]
    affine = []
    for value in values:
        if value is None:
            raise c.refusal(node, "has a computed scale or bias")
        affine.append(c.out.constant(value.astype(np.float32).reshape(-1, *[1] * (rank - 2))))
    _normalized(c, node, list(range(2, rank)), attributes, affine)


def _normalized(
    c: _Converter,
    node: onnx.NodeProto,
    axes: Sequence[int],
    attributes: Mapping[str, Any],
    affine: Sequence[int | None],
) -> None:
    """(x - mean) * rsqrt(mean of squares + epsilon) over axes, times and plus the affine tensors."""
    shape = c.shape(node.input[0])
    narrow, places = tuple(1 if i in axes else n for i, n in enumerate(shape)), c.numbers(axes)
    x, name = c.get(node.input[0], last=False), node.name
    mean = c.add("MEAN", [x, places], f"{name}/mean", narrow, kind="Reducer", keepDims=True)
    centred = c.add("SUB", [x, mean], f"{name}/centred", shape)
    squares = c.add("MUL", [centred, centred], f"{name}/squares", shape)
    variance = c.add("MEAN", [squares, places], f"{name}/variance", narrow, kind="Reducer", keepDims=True)
    epsilon = c.out.constant(np.asarray(attributes.get("epsilon", 1e-5), np.float32))
    above_zero = c.add("ADD", [variance, epsilon], f"{name}/sum", narrow)
    root = c.add("RSQRT", [above_zero], f"{name}/root", narrow)
    root = c.add("MUL", [centred, root], f"{name}/normal", shape)
    for op, tensor in zip(("MUL", "ADD"), affine, strict=False):
        if tensor is not None:
            root = c.add(op, [root, tensor], f"{name}/{op.lower()}", shape)
    c.forms[node.output[0], False, False] = root


def _expand(c: _Converter, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    integers, times = _keeps(c, node, [node.input[0]]), c.given(node, 1) if node.op_type == "Tile" else None
    sizes = np.asarray(c.shape(node.output[0]) if times is None else times, np.int32)
    _through(c, node, "BROADCAST_TO" if times is None else "TILE", sizes, integers=integers)


HANDLERS: dict[str, Handler] = {
    "QuantizeLinear": _Converter.quantize,
    "DequantizeLinear": _Converter.dequantize,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    **dict.fromkeys(("Softplus", "Mish"), _softplus),
    **dict.fromkeys(("Elu", "Selu", "Celu"), _elu),
    **dict.fromkeys(_LOGICAL, _logical),
    "ArgMax": _arg_max,
    "Reciprocal": _reciprocal,
    "PRelu": _prelu,
    "Erf": _erf,
    **dict.fromkeys(("Identity", "Dropout", "Cast"), _identity),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Pad": _pad,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    **dict.fromkeys(("GlobalAveragePool", *_REDUCTIONS), _reduce),
    "ReduceL2": _length,
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "Resize": _resize,
    "DepthToSpace": _depth_to_space,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "InstanceNormalization": _instance_norm,
    **dict.fromkeys(("Expand", "Tile"), _expand),
}
