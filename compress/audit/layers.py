"""The layers of a built engine, in one form for all sources, and the audit of each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Operation = Literal["conv", "product", "pool", "pointwise", "reformat", "host", "other"]

TYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 0.5,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "int4": 0.5,
    "bool": 1,
}
"""Bytes of one element of each type that TensorRT names."""

FLOATS = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16"})
EIGHT_BITS = frozenset({"int8", "uint8", "fp8"})

_SPELLINGS = {
    "float": "fp32",
    "float32": "fp32",
    "fp32": "fp32",
    "double": "fp64",
    "half": "fp16",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8e4m3": "fp8",
    "e4m3": "fp8",
    "fp4": "fp4",
    "fp4e2m1": "fp4",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "int4": "int4",
    "bool": "bool",
}


def type_name(text: str) -> str:
    """The short name of a type in any of TensorRT's spellings, or in a sentence that holds one; else "unknown".

    >>> type_name("Half"), type_name("Thirty-two wide channel vectorized row major Int8 format"), type_name("N/A")
    ('fp16', 'int8', 'unknown')
    """
    for word in re.findall(r"[A-Za-z]+\d*[A-Za-z]*\d*", text):
        if word.lower() in _SPELLINGS:
            return _SPELLINGS[word.lower()]
    return "unknown"


@dataclass(frozen=True, kw_only=True)
class EngineTensor:
    """A tensor that a layer reads or writes.

    Attributes:
        dtype: key of `TYPE_BYTES`, or "unknown".
        shape: -1 is a dimension that is known only when it runs.
        format: memory layout, in TensorRT's words.
        strides: in elements; () if unknown. A part has the strides of the larger tensor.
        rows: part of the open dimension that belongs to one image; None = unknown, or, without a shape, of a tensor of
            unknown shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    format: str = ""
    strides: tuple[int, ...] = ()
    rows: int | None = 1

    def elements(self) -> int | None:
        """The elements in memory for an image, with padded channels; None if the rows are unknown."""
        if self.rows is None and (-1 in self.shape or not self.shape):
            return None
        shape = [(self.rows or 1) if size < 0 else size for size in self.shape]
        if len(shape) >= 3:
            step = _channel_step(self.format)
            shape[1] = -(-shape[1] // step) * step
        return math.prod(shape)

    def bytes(self) -> float | None:
        size, elements = TYPE_BYTES.get(self.dtype), self.elements()
        return None if size is None or elements is None else elements * size


_WIDE = {"two": 2, "four": 4, "eight": 8, "sixteen": 16, "thirty-two": 32}


def _channel_step(text: str) -> int:
    match = re.search(r"channel % (\d+)", text)
    if match:
        return int(match[1])
    match = re.match(r"([A-Za-z-]+) wide channel", text)
    return _WIDE.get(match[1].lower(), 1) if match else 1


@dataclass(frozen=True, kw_only=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        kind: the engine's own name of the operation, such as `CaskConvolution`.
        onnx_nodes: nodes of the ONNX file that it came from; () if unreported.
        constants: () if the engine does not list them.
        tactic: kernel chosen; "" if it is chosen later or unknown.
        weight_elements: elements of its weight, if reported apart from the constants.
        weight_type: their type; "" if it is not reported apart.
        out_channels: of a convolution, if reported.
        sparse_weights: True if the builder found a 2:4 weight; None if it does not report it.
    """

    name: str
    kind: str
    onnx_nodes: tuple[str, ...] = ()
    inputs: tuple[EngineTensor, ...] = ()
    outputs: tuple[EngineTensor, ...] = ()
    constants: tuple[EngineTensor, ...] = ()
    tactic: str = ""
    weight_elements: int | None = None
    weight_type: str = ""
    out_channels: int | None = None
    sparse_weights: bool | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineListing:
    """All layers of an engine in the order in which they run; `notes` say what the source does not report."""

    source: str
    layers: tuple[EngineLayer, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_KINDS: tuple[tuple[Operation, str], ...] = (
    ("host", r"^(shape_call|shapecall|constant|signal|wait|device_?to_?shape|shape_?host.*|trainstation|noop)"),
    ("conv", r"conv|correlation"),
    ("product", r"gemm|matri|fullyconnected|matmul|^fc\b|mha|attention"),
    ("pool", r"pool"),
    ("reformat", r"reformat|shuffle|copy|^move|^slice|concat|^cast|^transpose"),
    ("pointwise", r"^kgen|pointwise|elementwise|activation|^scale|quantize|reduce|unary|softmax|^foreignnode|^pwn"),
)
_MOVES = {"Tran", "Cast", "Move", "Repl", "Conc", "Resh", "Res", "Slic", "Squ", "Copy", "Perm"}


def operation(layer: EngineLayer) -> Operation:
    if layer.kind.lower() in {"runtime_fusion", "fusion"}:  # products and small convolutions with what follows them
        named = re.search("Fc|Gemm|Mha|Mat", layer.name) or "gemm" in layer.tactic
        return "product" if weight_of(layer) is not None or named else "pointwise"
    if is_attention(layer):
        return "product"
    for name, pattern in _KINDS:
        if re.search(pattern, layer.kind, re.IGNORECASE):
            moves = name == "pointwise" and fused_steps(layer.name) and set(fused_steps(layer.name)) <= _MOVES
            return "reformat" if moves else name
    return "other"


def is_attention(layer: EngineLayer) -> bool:
    """True if a layer is both products of an attention and the softmax between them, in one kernel."""
    generated = layer.kind.lower() == "kgen" and re.match(r"_gemm_mha", layer.name) is not None
    return generated or layer.kind == "Attention"


def fused_steps(name: str) -> tuple[str, ...]:
    """The steps that a generated kernel is named after; () if the name has another form.

    >>> fused_steps("__myl_MulAddReluMulMinMaxRounCast_myl0_3")
    ('Mul', 'Add', 'Relu', 'Mul', 'Min', 'Max', 'Roun', 'Cast')
    """
    match = re.match(r"__myl_([A-Za-z0-9]+)_myl", name)
    return tuple(re.findall(r"[A-Z][a-z0-9]*", match[1])) if match else ()


def weight_of(layer: EngineLayer) -> EngineTensor | None:
    """The constant that is a layer's weight: the largest with two dimensions that are more than one."""
    found = [c for c in layer.constants if sum(size > 1 for size in c.shape) > 1]
    return max(found, key=lambda c: c.elements() or 0, default=None)


def macs(layer: EngineLayer) -> int | None:
    """The multiply-accumulates for an image: 0 without a product, None if the weight is unknown."""
    kind = operation(layer)
    if kind not in {"conv", "product"}:
        return None if kind == "other" else 0
    if not layer.outputs:
        return None
    out = layer.outputs[0]
    if -1 in out.shape and out.rows is None:
        return None
    elements = math.prod((out.rows or 1) if size < 0 else size for size in out.shape)
    if is_attention(layer):
        return _attention_macs(layer, elements)
    weight = weight_of(layer) or _weight_input(layer)
    count = layer.weight_elements or (weight.elements() if weight else None)
    if count is None:
        return None
    channels = layer.out_channels or _out_channels(kind, weight, out.shape)
    return elements * count // channels if channels else None


def _attention_macs(layer: EngineLayer, elements: int) -> int | None:
    """T * S * (d + width of a value) for each head: queries (..., T, d), keys (..., d, S) in either order."""
    if len(layer.inputs) < 3 or any(len(t.shape) < 2 for t in (*layer.inputs[:2], layer.outputs[0])):
        return None
    depth, width, keys = layer.inputs[0].shape[-1], layer.outputs[0].shape[-1], list(layer.inputs[1].shape[-2:])
    if depth not in keys or min(depth, width, *keys) < 1:
        return None
    keys.remove(depth)
    return elements // width * keys[0] * (depth + width)


def _out_channels(kind: Operation, weight: EngineTensor | None, out: Sequence[int]) -> int | None:
    if weight is None or len(out) < 2:
        return None
    if kind == "conv":
        return weight.shape[0]
    shared = [size for size in weight.shape if size > 1 and size in out[1:]]
    return shared[-1] if len(set(shared)) == 1 or shared else None


def _weight_input(layer: EngineLayer) -> EngineTensor | None:
    """A convolution's weight that another layer prepares while the engine runs."""
    if operation(layer) != "conv" or not layer.outputs:
        return None
    out = layer.outputs[0].shape
    for tensor in layer.inputs[1:]:
        if len(tensor.shape) >= 4 and min(tensor.shape) > 0 and tensor.shape != out and tensor.shape[0] == out[1]:
            return tensor
    return None


def activations(layer: EngineLayer) -> tuple[tuple[EngineTensor, ...], tuple[EngineTensor, ...]]:
    """(Read, written) activations of a layer, each tensor once, without weights prepared by other layers."""
    weight = _weight_input(layer)
    read = {t.name: t for t in layer.inputs if t is not weight}
    return tuple(read.values()), tuple({t.name: t for t in layer.outputs}.values())


Role = Literal["weighted", "pool", "quantize", "requantize", "add", "reformat", "float", "host"]


@dataclass(frozen=True, kw_only=True)
class AuditedLayer:
    """One layer of an engine. Bytes and macs are for one image.

    Attributes:
        role: `weighted` multiplies by a weight; `quantize` converts a float to 8 bits; `requantize` converts the float
            result of a weighted layer; `add` is one of these, or a float kernel, that also sums two branches; `host`
            does not run on the GPU.
        precision: type in which a weighted layer multiplies; "" of the others.
        input_types, output_types, formats: of the activations, in order; formats are of the outputs.
        read_bytes, written_bytes: activations.
        weight_bytes: constants, read once for a run of any batch size.
        macs: None = unknown.
        sparse: True if its kernel skips the zeros of a 2:4 weight; None = unknown.
        unknown_sizes: number of activations of unknown type or size; the bytes are without them.
        fp16_bytes: estimate of the activation bytes of an fp16 engine in its place; 0 if that fuses it away.
    """

    name: str
    kind: str
    operation: Operation
    role: Role
    onnx_nodes: tuple[str, ...]
    precision: str
    input_types: tuple[str, ...]
    output_types: tuple[str, ...]
    formats: tuple[str, ...]
    read_bytes: float
    written_bytes: float
    weight_bytes: float
    macs: int | None
    tactic: str
    sparse: bool | None
    unknown_sizes: int
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    fp16_bytes: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def activation_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


def audit_layer(
    layer: EngineLayer, from_weighted: Collection[str], per: int, border: Collection[str] = ()
) -> AuditedLayer:
    """Audit a layer.

    `from_weighted` are the tensors that convolutions and products write, `border` the network's own inputs and outputs,
    which keep their type; `per` is the number of images in the shapes.
    """
    read, written = activations(layer)
    kind = operation(layer)
    counted = macs(layer)
    role = _role(layer, kind, from_weighted)
    return AuditedLayer(
        name=layer.name,
        kind=layer.kind,
        operation=kind,
        role=role,
        onnx_nodes=layer.onnx_nodes,
        precision=_precision(layer) if role == "weighted" else "",
        input_types=tuple(t.dtype for t in read),
        output_types=tuple(t.dtype for t in written),
        formats=tuple(t.format for t in written),
        read_bytes=sum(t.bytes() or 0.0 for t in read) / per if role != "host" else 0.0,
        written_bytes=sum(t.bytes() or 0.0 for t in written) / per if role != "host" else 0.0,
        weight_bytes=_weight_bytes(layer),
        macs=None if counted is None else counted // per,
        tactic=layer.tactic,
        sparse="sparse" in layer.tactic or "sptensor" in layer.tactic if layer.tactic else None,
        unknown_sizes=sum(t.bytes() is None for t in (*read, *written)),
        reads=tuple(t.name for t in read),
        writes=tuple(t.name for t in written),
        fp16_bytes=_fp16_bytes(layer, role, border) / per,
        more=layer.more,
    )


def _precision(layer: EngineLayer) -> str:
    """The type of the first activation, or of the weight if that is unknown."""
    read, _ = activations(layer)
    weight = weight_of(layer)
    types = [t.dtype for t in read[:1]] + [layer.weight_type or (weight.dtype if weight else "unknown")]
    return next((name for name in types if name not in {"", "unknown"}), "unknown")


def _weight_bytes(layer: EngineLayer) -> float:
    listed = sum(c.bytes() or 0.0 for c in layer.constants)
    if listed or layer.weight_elements is None:
        return listed
    return layer.weight_elements * {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2}.get(layer.weight_type, 4)


def _role(layer: EngineLayer, kind: Operation, from_weighted: Collection[str]) -> Role:
    if kind in {"conv", "product"}:
        return "weighted"
    if kind in {"host", "pool"}:
        return "host" if kind == "host" else "pool"
    read, written = activations(layer)
    if not written:
        return "host"
    if _sums(layer):
        return "add"
    to_eight = any(t.dtype in EIGHT_BITS for t in written) and any(t.dtype in FLOATS for t in read)
    if to_eight:
        return "requantize" if any(t.name in from_weighted for t in read) else "quantize"
    return "reformat" if kind == "reformat" else "float"


def _sums(layer: EngineLayer) -> bool:
    read, _ = activations(layer)
    most = max((t.elements() or 0 for t in read), default=0)
    branches = sum(t.elements() == most for t in read)
    return most > 0 and branches > 1 and any("add" in name.lower() for name in (layer.name, *layer.onnx_nodes))


def _fp16_bytes(layer: EngineLayer, role: Role, border: Collection[str]) -> float:
    """The bytes of an fp16 kernel in a layer's place; 0 if it would have been fused away."""
    read, written = activations(layer)

    def half(tensors: Iterable[EngineTensor]) -> float:
        return sum(t.bytes() or 0 if t.name in border else 2 * (t.elements() or 0) for t in tensors)

    if role == "host":
        return 0.0
    if role in {"requantize", "add"}:
        largest = max(t.elements() or 0 for t in read)
        # A mean in the same kernel stays a kernel, which reads the sum.
        shrinks = max(t.elements() or 0 for t in written) < largest
        residual = 2.0 * largest * (sum(t.elements() == largest for t in read) - 1)
        leaves = any(t.name in border and t.dtype != "fp16" for t in written)  # converted by a kernel of its own
        return residual + (2.0 * largest + half(written[:1]) if shrinks or leaves else 0.0)
    return half(read) + half(written[:1] if role == "quantize" else written)
