"""Audits a built engine: the type of every layer, the bytes that it moves, findings, and what the recipe requires.

`with_rows` infers how many rows each image has in the open dimension of a tensor, such as tokens or heads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import onnx

from compress.engines.base import RuntimeLayer, load_onnx
from compress.errors import first_few
from compress.export.names import is_node
from compress.onnx_graph import WEIGHTED_OPS, OnnxGraph, inferred_graph, whole_shapes

Operation = Literal["conv", "product", "pool", "pointwise", "reformat", "host", "other"]

# Bytes of one element of each type that TensorRT names.
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

FLOATS = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16"})
EIGHT_BITS = frozenset({"int8", "uint8", "fp8"})
# Types that products are computed in, from wide to narrow.
_NARROW = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "uint8", "int8")

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


# Steps of generated kernels that convolve: correlation, and deconvolution.
_CONVOLVE = {"Corr", "Deco"}
_PRODUCTS = _CONVOLVE | {"Fc", "Gemm", "Mat", "Mha"}


def operation(layer: EngineLayer) -> Operation:
    if _CONVOLVE.intersection(fused_steps(layer.name)):
        return "conv"
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
    """Type of the first activation (of TensorRT's attention: the narrowest), or of the weight if unknown."""
    read, written = activations(layer)
    weight = weight_of(layer)
    if is_attention(layer) and layer.kind != "Attention":  # its mask may be of a wider type, and come first
        read = tuple(sorted(read, key=lambda t: -_NARROW.index(t.dtype) if t.dtype in _NARROW else 1))
    types = [t.dtype for t in read[:1]] + [layer.weight_type or (weight.dtype if weight else "unknown")]
    if EIGHT_BITS.intersection(types[:1]) and _dequantizes(layer.name):
        return next((t.dtype for t in written if t.dtype in FLOATS), "fp32")
    return next((name for name in types if name not in {"", "unknown"}), "unknown")


def _dequantizes(name: str) -> bool:
    # A generated kernel that multiplies in float casts its integers and multiplies them by their scale first.
    steps = fused_steps(name)
    before = list(itertools.takewhile(lambda step: step not in _PRODUCTS, steps))
    return ("Cast", "Mul") in itertools.pairwise(before) and len(before) < len(steps)


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


_View = tuple[str, tuple[int, ...]]
_Rows = dict[_View, int]
# Steps after which the open dimension may hold something else.
_MIXES = {"Resh", "Tran", "Slic", "Gath", "Repl", "Squ", "Perm"}
# Steps that may write more than was read.
_GROWS = {"Repl", "Conc", "Iota", "Gath"}
# Steps that write one element for each that they read.
_KEEPS = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Cast",
    "Relu",
    "Erf",
    "Exp",
    "Sqrt",
    "Min",
    "Max",
    "Roun",
    "Resh",
    "Tran",
    "Move",
}
_TWO, _THREE = 2, 3


@dataclass(frozen=True, kw_only=True)
class NodeOutput:
    """A result of a node.

    Attributes:
        dims: shape for one image; a dimension of batch times tokens is given as tokens.
        users: nodes that read it.
        result: True if it is an output of the network.
    """

    dims: tuple[int, ...]
    users: frozenset[str]
    result: bool


# Results by the name of their node, without those that do not grow with the batch or whose size is unknown.
OnnxShapes = Mapping[str, tuple[NodeOutput, ...]]


def with_rows(listing: EngineListing, shapes: OnnxShapes | None = None) -> EngineListing:
    """The listing with `rows` of every tensor, None if unknown; `shapes` are of its ONNX file."""
    known = _borders(listing)
    _spread(listing, shapes or {}, known)
    _drop_contradictions(listing, known)

    def filled(tensors: Sequence[EngineTensor]) -> tuple[EngineTensor, ...]:
        return tuple(replace(t, rows=known.get(_view(t))) if -1 in t.shape else t for t in tensors)

    layers = tuple(replace(x, inputs=filled(x.inputs), outputs=filled(x.outputs)) for x in listing.layers)
    return replace(listing, layers=layers)


def _view(tensor: EngineTensor) -> _View:
    return tensor.name, tensor.shape


def _open(tensors: Sequence[EngineTensor]) -> Iterator[EngineTensor]:
    return (t for t in tensors if t.shape.count(-1) == 1 and 0 not in t.shape)


def _known_size(shape: tuple[int, ...]) -> int:
    return math.prod(size for size in shape if size != -1)


def _borders(listing: EngineListing) -> _Rows:
    """The rows of the network's own inputs and outputs, whose first dimension is the batch."""
    border = {*listing.inputs, *listing.outputs}
    every = [t for layer in listing.layers for t in (*_open(layer.inputs), *_open(layer.outputs)) if t.name in border]
    ranks = {name: max(len(t.shape) for t in every if t.name == name) for name in {t.name for t in every}}
    return {_view(t): 1 for t in every if t.shape[0] == -1 and len(t.shape) == ranks[t.name]}


def _from_onnx(layer: EngineLayer, shapes: OnnxShapes, known: _Rows) -> None:
    """Infer rows from ONNX results of the same shape that the layer writes, if all of them agree."""
    leaving = [
        out
        for node in layer.onnx_nodes
        for out in shapes.get(node, ())
        if out.result or not out.users <= set(layer.onnx_nodes)
    ]
    most = _most_written(layer, known)
    for tensor in _open(layer.outputs):
        rows = {n for out in leaving if (n := _rows_left(tensor.shape, out.dims)) is not None}
        rows = {n for n in rows if n * _known_size(tensor.shape) <= most}
        if len(rows) == 1:
            known.setdefault(_view(tensor), rows.pop())


def _most_written(layer: EngineLayer, known: _Rows) -> float:
    steps, read = fused_steps(layer.name), list(_open(layer.inputs))
    if not steps or set(steps) & _GROWS or not read or operation(layer) == "product":
        return math.inf
    sizes = [known[_view(t)] * _known_size(t.shape) for t in read if _view(t) in known]
    return max(sizes) if len(sizes) == len(read) else math.inf


def _rows_left(shape: tuple[int, ...], dims: tuple[int, ...]) -> int | None:
    """The rows of the open dimension for a result of `dims`; None if the shape is not a view of it.

    >>> _rows_left((-1, 64), (17, 64)), _rows_left((-1, 17, 32), (2, 17, 32)), _rows_left((-1, 1), (17, 64))
    (17, 2, None)
    """
    own, whole = (Counter(size for size in sizes if size > 1) for sizes in (shape, dims))
    reduced = shape[-1] == 1 and dims[-1:] != (1,)
    if not own or reduced or own - whole:
        return None
    return math.prod((whole - own).elements())


def _spread(listing: EngineListing, shapes: OnnxShapes, known: _Rows) -> None:
    """Infer further rows from `known`, layer after layer, until none follow."""
    views: dict[str, dict[_View, EngineTensor]] = {}
    for layer in listing.layers:
        for tensor in (*_open(layer.inputs), *_open(layer.outputs)):
            views.setdefault(tensor.name, {})[_view(tensor)] = tensor
    before = -1
    while len(known) > before:
        before = len(known)
        for layer in listing.layers:
            for tensor in (*_open(layer.inputs), *_open(layer.outputs)):
                _from_other_views(tensor, views[tensor.name], known)
            _conserve(layer, known)
            _from_onnx(layer, shapes, known)
            _through(layer, known)


def _from_other_views(tensor: EngineTensor, views: dict[_View, EngineTensor], known: _Rows) -> None:
    """Infer rows from other views of the same tensor: a part has its strides and rows, any other all its elements."""
    if _view(tensor) in known:
        return
    found = set()
    for view, other in views.items():
        if view not in known:
            continue
        part = tensor.strides and tensor.strides == other.strides and tensor.shape.index(-1) == other.shape.index(-1)
        size, own = known[view] * _known_size(other.shape), _known_size(tensor.shape)
        if part:
            found.add(known[view])
        elif size % own == 0:
            found.add(size // own)
    if len(found) == 1:
        known[_view(tensor)] = found.pop()


def _conserve(layer: EngineLayer, known: _Rows) -> None:
    """Infer rows through a kernel that writes as many elements as it reads."""
    read, written = list(_open(layer.inputs)), list(_open(layer.outputs))
    steps = set(fused_steps(layer.name))
    if not steps or steps - _KEEPS or len(read) != 1 or len(written) != 1 or _view(read[0]) not in known:
        return
    size = known[_view(read[0])] * _known_size(read[0].shape)
    if size % _known_size(written[0].shape) == 0:
        known.setdefault(_view(written[0]), size // _known_size(written[0].shape))


def _through(layer: EngineLayer, known: _Rows) -> None:
    """Infer rows from other tensors of the layer whose rows are the same."""
    tensors = [*_open(layer.inputs), *_open(layer.outputs)]
    for tensor in tensors:
        if _view(tensor) in known:
            continue
        rows = {known[_view(t)] for t in tensors if _view(t) in known and _same_rows(layer, tensor.shape, t.shape)}
        if len(rows) == 1:
            known[_view(tensor)] = rows.pop()


def _same_rows(layer: EngineLayer, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if the open dimensions of two tensors of a layer hold the same rows."""
    if len(one) != len(other) or one.index(-1) != other.index(-1):
        return False
    if one[:-1] == other[:-1] and 1 in (one[-1], other[-1]) and one[-1] != other[-1]:
        return True  # the other input is the mean of this one over its last dimension
    steps = fused_steps(layer.name)
    if steps:
        return not set(steps) & _MIXES or (set(steps) & _MIXES == {"Repl"} and "Conc" in steps)
    return one == other or operation(layer) in {"conv", "product", "pool"} or "gemm" in layer.name


def _drop_contradictions(listing: EngineListing, known: _Rows) -> None:
    """Remove tensors of which a layer would read more than another wrote."""
    written = {
        t.name: known[_view(t)] * _known_size(t.shape)
        for layer in listing.layers
        for t in _open(layer.outputs)
        if _view(t) in known
    }
    wrong = {name for (name, shape), n in known.items() if n * _known_size(shape) > written.get(name, math.inf)}
    for view in [view for view in known if view[0] in wrong]:
        del known[view]


def onnx_shapes(path: Path | str) -> OnnxShapes:
    """The shapes of a file; {} if it cannot be read or shape inference fails."""
    try:
        model = onnx.load(str(path), load_external_data=False)
        two, three = (_inferred(model, batch) for batch in (_TWO, _THREE))
    except Exception:  # protobuf and shape inference have many classes of errors; rows are then unknown
        return {}
    view = OnnxGraph(model.graph)
    found: dict[str, tuple[NodeOutput, ...]] = {}
    for node in model.graph.node:
        found[node.name] = tuple(
            NodeOutput(
                dims=dims, users=frozenset(n.name for n in view.consumers.get(name, ())), result=name in view.outputs
            )
            for name in node.output
            if (dims := _per_image(two.get(name), three.get(name))) is not None
        )
    return found


def _inferred(model: onnx.ModelProto, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes that are known in all dimensions if the open batch of the inputs is `batch`."""
    weights = {tensor.name for tensor in model.graph.initializer}
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input if value.name not in weights}
    sizes = {
        name: (batch, *(size.dim_value if size.HasField("dim_value") else None for size in own[1:]))
        for name, own in dims.items()
        if own and not own[0].HasField("dim_value")
    }
    return whole_shapes(inferred_graph(model, sizes))


def _per_image(two: tuple[int, ...] | None, three: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The dimensions for one image.

    >>> _per_image((2, 17, 64), (3, 17, 64)), _per_image((34, 64), (51, 64)), _per_image((64, 64), (64, 64))
    ((17, 64), (17, 64), None)
    """
    if two is None or three is None or len(two) != len(three):
        return None
    grown = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(grown) != 1 or two[grown[0]] * _THREE != three[grown[0]] * _TWO:
        return None
    rows = two[grown[0]] // _TWO
    return tuple(rows if i == grown[0] else size for i, size in enumerate(two) if i != grown[0] or rows != 1)


FindingKind = Literal["float layer", "float output", "requantize", "reformat", "add", "fp32", "dense tactic", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fact that the owner of an engine should know, in one sentence.

    Attributes:
        layers: names of the layers concerned.
        bytes: activation bytes an image that they move; 0 if the finding is not about bytes.
    """

    kind: FindingKind
    text: str
    layers: tuple[str, ...]
    bytes: float = 0.0


def find(
    layers: Sequence[AuditedLayer],
    listing: EngineListing,
    *,
    per: int = 1,
    sparse_nodes: Collection[str] = (),
) -> list[Finding]:
    """All findings: first layers in floating point, then data that is moved twice, then the rest.

    `per` is the number of images in the listing's shapes; `sparse_nodes` are ONNX nodes with 2:4 weights.
    """
    weighted = [layer for layer in layers if layer.role == "weighted"]
    eight = [layer for layer in weighted if layer.precision in EIGHT_BITS]
    loose = [layer for layer in weighted if eight and layer.precision not in {*EIGHT_BITS, "unknown"}]
    wide = [layer for layer in eight if not set(layer.output_types) <= EIGHT_BITS]
    quantizing = [x for x in layers if x.role == "requantize" or (x.role == "add" and set(x.output_types) & EIGHT_BITS)]
    moved = [layer for layer in layers if layer.role == "reformat"]
    sums = [layer for layer in layers if layer.role == "add"]
    sparse = layers_with_sparse_weights(layers, listing, sparse_nodes)
    dense = [layer for layer in sparse if layer.sparse is False]
    later = [layer for layer in sparse if layer.sparse is None]
    unknown = [layer for layer in layers if layer.unknown_sizes]
    uncounted = (
        "layers with activations of unknown type or size, whose bytes are not counted: {n}. Give the ONNX file, or set "
        "a context's shapes and run the inspector again"
    )
    chosen_later = "layers with 2:4 weights whose kernel is chosen when the engine first runs, sparse or dense: {n}"
    return [
        *_of(loose, "float layer", "convolutions and products that multiply in floating point: {n} of {all}", weighted),
        *_of(
            wide, "float output", "8-bit convolutions and products that write {types}, not 8 bits: {n} of {all}", eight
        ),
        *_of(quantizing, "requantize", "kernels that quantize what a convolution wrote in {read}: {n}, {mb}"),
        *_of(moved, "reformat", "kernels that only change layout or type: {n}, {mb}"),
        *_of(sums, "add", "residual sums that did not fuse into a convolution: {n}, {mb}"),
        *_fp32(layers, listing, per),
        *_of(dense, "dense tactic", "layers with 2:4 weights that run a dense kernel: {n} of {all}", sparse),
        *_of(later, "unknown", chosen_later),
        *_of(unknown, "unknown", uncounted),
        *(Finding(kind="unknown", text=note, layers=()) for note in listing.notes),
    ]


def _of(
    layers: list[AuditedLayer], kind: FindingKind, text: str, among: list[AuditedLayer] | None = None
) -> list[Finding]:
    if not layers:
        return []
    total = sum(layer.activation_bytes for layer in layers)
    filled = text.format(
        n=len(layers),
        all=len(among or layers),
        mb=f"{megabytes(total)} an image",
        types=_listed(t for layer in layers for t in layer.output_types if t not in EIGHT_BITS),
        read=_listed(t for layer in layers for t in layer.input_types if t not in EIGHT_BITS),
    )
    return [Finding(kind=kind, text=filled, layers=tuple(layer.name for layer in layers), bytes=total)]


def _listed(types: Iterable[str]) -> str:
    return " or ".join(sorted({name.upper() for name in types})) or "another type"


def megabytes(count: float, *, unknown: int = 0) -> str:
    """Bytes for people; `unknown` is the number of tensors whose bytes are not included.

    >>> megabytes(114_965_312), megabytes(4000), megabytes(4_600_000, unknown=12)
    ('115.0 MB', '0.0 MB', '4.6 MB and 12 tensors of unknown size')
    """
    return f"{count / 1e6:.1f} MB{unknown_part(unknown)}"


def unknown_part(unknown: int) -> str:
    """The end of a sum of bytes in which `unknown` tensors are missing; "" if none is."""
    return f" and {unknown} tensor{'s' * (unknown > 1)} of unknown size" if unknown else ""


def _fp32(layers: Sequence[AuditedLayer], listing: EngineListing, per: int) -> list[Finding]:
    if not {t for layer in layers for t in layer.output_types} & {"fp16", "bf16", *EIGHT_BITS}:
        return []
    border = {*listing.inputs, *listing.outputs}
    wide, total = [], 0.0
    for layer, audited in zip(listing.layers, layers, strict=True):
        read, written = activations(layer)
        inside = [t for t in (*read, *written) if t.dtype in {"fp32", "tf32"} and t.name not in border]
        if inside and audited.role != "host":
            wide.append(audited.name)
            total += sum(t.bytes() or 0.0 for t in inside)
    if not wide:
        return []
    total /= per
    text = f"layers that read or write FP32 inside the network: {len(wide)}, {megabytes(total)} of FP32 an image"
    return [Finding(kind="fp32", text=text, layers=tuple(wide), bytes=total)]


def layers_with_sparse_weights(
    layers: Sequence[AuditedLayer], listing: EngineListing, sparse_nodes: Collection[str]
) -> list[AuditedLayer]:
    """Return convolutions and products with 2:4 weights, as reported or found in the ONNX file."""
    return [
        audited
        for layer, audited in zip(listing.layers, layers, strict=True)
        if audited.role == "weighted" and (layer.sparse_weights or set(layer.onnx_nodes) & set(sparse_nodes))
    ]


def sparse_kernels_text(masked: int, sparse: int, unknown: int) -> str:
    """How many layers with 2:4 weights run a sparse kernel.

    >>> sparse_kernels_text(19, 0, 19), sparse_kernels_text(19, 12, 0), sparse_kernels_text(0, 0, 0)
    ('19, kernels chosen when it runs', '12 of 19 sparse', 'none')
    """
    if not masked:
        return "none"
    if unknown == masked:
        return f"{masked}, kernels chosen when it runs"
    return f"{sparse} of {masked} sparse" + (f", {unknown} unknown" if unknown else "")


Require = Literal["int8", "fp16"]

# Kinds of OpenVINO and the engine cuda, and of ONNX Runtime's optimized graph.
_RUNTIME_WEIGHTED = frozenset(
    {"Convolution", "Deconvolution", "GroupConvolution", "FullyConnected", "MatMul", "Linear", "Attention", "Subgraph"}
    | {"QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulInteger", "ConvInteger"}
)
_FOLDED = frozenset({"Add", "Mul", "Sub", "Div"})


def unmet_by_audit(audit: EngineAudit, require: Require, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Describe how an audited engine violates a requirement; () if it does not.

    `int8`: every operation of `int8_nodes` computes in 8 bits, and there is one; `fp16`: none computes in FP32.
    """
    if require == "fp16":
        wide = [layer.name for layer in audit.weighted if layer.precision in {"fp32", "tf32"}]
        return (f"{len(wide)} of {len(audit.weighted)} layers compute in FP32: {first_few(wide, 3)}",) if wide else ()
    if not int8_nodes:
        return ("the ONNX file has no INT8 operation",)
    eight = [layer for layer in audit.weighted if layer.precision in EIGHT_BITS]
    if not any(layer.onnx_nodes for layer in audit.weighted):  # the engine does not report the nodes of its layers
        short = len(int8_nodes) - len(eight)
        text = f"{len(eight)} layers compute in 8 bits, and the ONNX file asks for {len(int8_nodes)}"
        return (text,) if short > 0 else ()
    return _missing(lost_in_audit(audit, int8_nodes), int8_nodes)


def lost_in_audit(audit: EngineAudit, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Return those of `int8_nodes` that no layer of an audited engine computes in 8 bits."""
    found = {node for layer in audit.weighted if layer.precision in EIGHT_BITS for node in layer.onnx_nodes}
    return tuple(node for node in int8_nodes if node not in found)


def unmet_by_runtime(
    layers: Sequence[RuntimeLayer], int8_nodes: Collection[str], also: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """Describe how an engine that lists its runtime layers is not INT8 where its ONNX file is."""
    if not int8_nodes:
        return ("the ONNX file has no INT8 operation",)
    return _missing(lost_in_runtime(layers, int8_nodes, also), int8_nodes)


def lost_in_runtime(
    layers: Sequence[RuntimeLayer], int8_nodes: Collection[str], also: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """Return those of `int8_nodes` that no runtime layer (OpenVINO, ONNX Runtime, cuda) computes in 8 bits.

    `also` has further names of an operation (`folded_names`).
    """
    eight = [one for one in layers if one.kind in _RUNTIME_WEIGHTED and one.precision in {"i8", "u8"}]
    names = [name for layer in eight for name in layer.original_names]
    known = {node: (node, *(also or {}).get(node, ())) for node in int8_nodes}
    lost = [node for node in int8_nodes if not any(is_node(name, one) for one in known[node] for name in names)]
    every = [one for group in known.values() for one in group]
    invented = [
        layer
        for layer in eight
        if layer.kind != "Subgraph" and not any(is_node(name, one) for one in every for name in layer.original_names)
    ]
    return tuple(lost) if len(lost) > len(invented) else ()


def folded_names(path: Path | str) -> dict[str, tuple[str, ...]]:
    """The names that an engine may give a product or convolution of a file instead of its own."""
    view = OnnxGraph(load_onnx(path).graph)
    found: dict[str, tuple[str, ...]] = {}
    for first in (node for node in view.graph.node if node.op_type in WEIGHTED_OPS):
        names, tensor = [], first.output[0]
        after = view.consumers.get(tensor, [])
        while len(after) == 1 and after[0].op_type in _FOLDED and view.fixed.issuperset({*after[0].input} - {tensor}):
            names.append(after[0].name)
            tensor = after[0].output[0]
            after = view.consumers.get(tensor, [])
        found[first.name] = (*names, tensor) if tensor in view.outputs else tuple(names)
    return found


def _missing(lost: Sequence[str], int8_nodes: Collection[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    some = first_few(lost, 3)
    return (f"{len(lost)} of {len(int8_nodes)} INT8 operations of the ONNX file are not INT8 here: {some}",)


@dataclass(frozen=True, kw_only=True)
class EngineAudit:
    """Audit of an engine.

    Attributes:
        fixed_batch: images of one run; None if the batch size is open.
        layers: in the order in which they run.
        findings: most important first.
        advice: how to move fewer bytes; "" if there is none.
        masked: layers with 2:4 weights.

    Examples:
        >>> audit = compress.audit_engine("int8.onnx")
        >>> audit.kernels, len(audit.weighted)
        (4, 2)
    """

    source: str
    fixed_batch: int | None
    layers: tuple[AuditedLayer, ...]
    findings: tuple[Finding, ...]
    advice: str = ""
    masked: tuple[AuditedLayer, ...] = ()

    @property
    def activation_bytes(self) -> float:
        """Activation bytes that all layers move for one image."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def fp16_bytes(self) -> float:
        """Estimate of the bytes that a fused fp16 network moves for one image."""
        return sum(layer.fp16_bytes for layer in self.layers)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the constants of all layers."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def unknown_sizes(self) -> int:
        """Number of activations of unknown size, which no sum of bytes includes."""
        return sum(layer.unknown_sizes for layer in self.layers if layer.role != "host")

    @property
    def kernels(self) -> int:
        """Number of layers that run on the GPU."""
        return sum(layer.role != "host" for layer in self.layers)

    @property
    def weighted(self) -> tuple[AuditedLayer, ...]:
        """Convolutions and products."""
        return tuple(layer for layer in self.layers if layer.role == "weighted")

    def sparse_kernels(self) -> str:
        """How many of `masked` run a sparse kernel."""
        sparse = [layer.sparse for layer in self.masked]
        return sparse_kernels_text(len(sparse), sparse.count(True), sparse.count(None))

    def share(self, *types: str) -> float:
        """The share of the known macs that are computed in one of `types`, 0 to 1."""
        total = sum(layer.macs or 0 for layer in self.weighted)
        return sum(layer.macs or 0 for layer in self.weighted if layer.precision in types) / total if total else 0.0


def audit_listing(
    listing: EngineListing, *, onnx: Path | str | None = None, sparse_nodes: Collection[str] = ()
) -> EngineAudit:
    """Audit a listing; `onnx` is the file that it was built from, which gives the rows of each image in a tensor.

    `sparse_nodes` are ONNX nodes whose weights are 2:4, for engines that do not report it.
    """
    listing = with_rows(listing, None if onnx is None else onnx_shapes(onnx))
    batch = _fixed_batch(listing)
    per = batch or 1
    from_weighted = {
        tensor.name
        for layer in listing.layers
        if operation(layer) in {"conv", "product"}
        for tensor in activations(layer)[1]
    }
    border = {*listing.inputs, *listing.outputs}
    layers = tuple(audit_layer(layer, from_weighted, per, border) for layer in listing.layers)
    findings = tuple(find(layers, listing, per=per, sparse_nodes=sparse_nodes))
    masked = tuple(layers_with_sparse_weights(layers, listing, sparse_nodes))
    audit = EngineAudit(source=listing.source, fixed_batch=batch, layers=layers, findings=findings, masked=masked)
    return replace(audit, advice=_advice(audit))


def _fixed_batch(listing: EngineListing) -> int | None:
    """The first dimension of the network's input; None if it is open or unknown."""
    written = {t.name for layer in listing.layers for t in layer.outputs}
    open_inputs = [t for layer in listing.layers for t in activations(layer)[0] if t.name not in written]
    named = [t for t in open_inputs if t.name in listing.inputs] or [t for t in open_inputs if len(t.shape) > 1]
    size = named[0].shape[0] if named and named[0].shape else -1
    return size if size > 0 else None


def _advice(audit: EngineAudit) -> str:
    """How to move fewer bytes; "" if there is no advice."""
    moved, half = audit.activation_bytes, audit.fp16_bytes
    if not audit.share(*EIGHT_BITS):
        if audit.share("fp32", "tf32") <= 0.5:
            return ""
        if audit.unknown_sizes:
            return "The engine computes in FP32; fp16 would move about half of its bytes."
        return f"The engine computes in FP32; fp16 would move {megabytes(half)} an image instead of {megabytes(moved)}."
    if moved <= 1.02 * half or audit.unknown_sizes:
        return ""
    text = (
        f"INT8 moves {megabytes(moved)} of activations an image here, and the same network in fp16 would move about "
        f"{megabytes(half)}: its convolutions do not write 8 bits, and other kernels quantize what they wrote. Where "
        "memory is the bound (small layers, small batches), build fp16: quantization null, export.precision fp16. INT8 "
        "pays where the products are the bound; `inspect engine FILE --device NAME` says in which layers."
    )
    wide = any("fp32" in layer.output_types for layer in audit.weighted if layer.precision in EIGHT_BITS)
    narrower = (
        " export.precision fp16 with export.channel_scales output lets its convolutions write FP16 instead of FP32."
    )
    return text + (narrower if wide else "")
