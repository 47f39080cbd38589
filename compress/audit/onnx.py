"""Audits an ONNX file: which weighted operations are INT8, why the others are not, and if the scales are valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray

from compress.errors import AuditError
from compress.export.casting import types_of
from compress.export.names import TARGET_KEY
from compress.export.targets import refusal
from compress.files import path_of
from compress.onnx_graph import (
    MOVED_OVER,
    PASSES,
    WEIGHTED_OPS,
    OnnxGraph,
    attribute,
    mend,
    opset_of,
    subgraphs,
)
from compress.sparsity.parametrization import verify_nm
from compress.support.imports import any_failure

_INTEGERS = frozenset({"int8", "uint8", "int4", "uint4"})

_WIDE = "has 16 bits, with which LiteRT alone computes in integers (16x8)"
_NOT_BYTES = {"float8_e4m3fn": "is FP8, not INT8", "float8_e5m2": "is FP8, not INT8", "int16": _WIDE, "uint16": _WIDE}

_SHORT = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "double": "FP64"}

_ABSORBED = frozenset({"Relu", "Clip"})

# Operators with weights that have no INT8 form in any file, with the places of these among their inputs.
_FLOAT = {
    **dict.fromkeys(("LSTM", "GRU", "RNN"), ("recurrent operations stay float", slice(1, 3))),
    "DeformConv": ("deformable convolutions stay float", slice(1, 2)),
    "Einsum": ("it is no product of two matrices", slice(None)),
}


@dataclass(frozen=True, kw_only=True)
class AuditedNode:
    """One weighted operation of an ONNX file.

    Attributes:
        op_type: `Conv`, `ConvTranspose`, `Gemm`, `MatMul`, or one that is always float, as `LSTM`.
        input_type, weight_type: `int8`, `uint8`, `int4`, `float8_e4m3fn`, ... after a DequantizeLinear; else `float`.
        per_channel: True if the weight has a scale for each channel.
        weight_elements: elements of a constant weight; 0 for a product of two activations.
        int8: True if both inputs are integers of 8 bits or fewer, and the file's target then computes so.
        reason: what is not so; "" if `int8`.
        float_type: of its result: `float32`, `float16`, `bfloat16`; a strongly typed engine computes in it what is not
            quantized.
        float_on: engines that compute it in float although both inputs are integers, and why.
    """

    name: str
    op_type: str
    input_type: str
    weight_type: str
    per_channel: bool
    weight_elements: int
    int8: bool
    reason: str
    float_type: str = "float32"
    float_on: dict[str, str] = field(default_factory=dict)

    def type_on(self, engine: str) -> str:
        """Return the type in which an engine computes it, as far as the file decides."""
        family = engine.removesuffix("-rtx")
        if {self.input_type, self.weight_type} <= _INTEGERS and not self.float_on.keys() & {engine, family}:
            return "INT8"
        if family == "tensorrt":
            both = self.input_type.startswith("float8") and self.weight_type.startswith("float8")
            return "FP8" if both else _SHORT.get(self.float_type, self.float_type)
        return "not computed" if engine == "onnxruntime" and self.float_type == "bfloat16" else "FP32"


@dataclass(frozen=True, kw_only=True)
class OnnxAudit:
    """Content of an ONNX file.

    Attributes:
        rows: the weighted operations, in graph order.
        activation_pairs: number of QuantizeLinear nodes.
        float_type: type of the part that is not quantized (`float32`, `float16` or `bfloat16`).
        ops: number of nodes by type.
        producer: that wrote the file, and its version.
        others: operators of domains that engines know by plugins or libraries of their own, with their number.
        refusals: why engines do not load it; "" if they do.

    Examples:
        >>> audit = compress.audit_onnx("int8.onnx")
        >>> audit.int8_share, audit.float_type
        (1.0, 'float32')
    """

    path: Path
    opset: int
    rows: tuple[AuditedNode, ...]
    activation_pairs: int
    float_type: str
    ops: dict[str, int]
    metadata: dict[str, str]
    producer: str = ""
    others: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> str:
        return self.refusals.get(self.metadata.get(TARGET_KEY, ""), "")

    def refused_by(self, engine: str) -> str:
        if engine not in self.refusals:
            self.refusals[engine] = refusal(self.path, engine)
        return self.refusals[engine]

    def products_on(self, engine: str) -> dict[str, int]:
        """Return the number of weighted operations by the type in which an engine computes them.

        Args:
            engine: `tensorrt` (11, strongly typed), `tensorrt-rtx`, `openvino` or `onnxruntime` (on a CPU, where
                float16 is computed in float32, or in a type that the processor is faster in).
        """
        if self.rows and self.refused_by(engine):
            return {"not computed": len(self.rows)}
        return dict(sorted(Counter(row.type_on(engine) for row in self.rows).items()))

    @property
    def mending(self) -> tuple[str, str]:
        """Return what the file lacks for TensorRT 11, and the command that adds it; ("", "") if nothing.

        The command lacks the data to calibrate with.
        """
        found = Counter(row.type_on("tensorrt") for row in self.rows)
        if not self.rows or (self.activation_pairs and self.float_type != "float32"):
            return "", ""
        if self.activation_pairs:
            return "its remainder is float32", f"python -m compress cast {self.path} --data DIR"
        if "FP32" in found:
            return (
                "it is not quantized, and float32",
                f"python -m compress ptq --onnx {self.path} --data DIR --precision fp16",
            )
        return "it is not quantized", f"python -m compress ptq --onnx {self.path} --data DIR"

    @property
    def int8_share(self) -> float:
        """Share of weight elements that are in INT8 operations, 0 to 1."""
        total = sum(row.weight_elements for row in self.rows)
        return sum(row.weight_elements for row in self.rows if row.int8) / total if total else 0.0


def audit_onnx(path: Path | str) -> OnnxAudit:
    """Read an ONNX file and list its weighted operations, each INT8 or with the reason why not.

    Raises:
        AuditError: the file is not ONNX, or a scale is zero, NaN, infinite or negative; the message names the node.

    Examples:
        >>> [(row.op_type, row.int8) for row in compress.audit_onnx("int8.onnx").rows]
        [('Conv', True), ('Gemm', True)]
    """
    path = path_of(path)
    proto = _load(path)
    try:
        return _audit(path, proto)
    except (IndexError, KeyError, TypeError, ValueError) as error:  # types and shapes that the checker lets pass
        raise AuditError(
            f"{path} is not a valid ONNX file ({type(error).__name__}: {error}); export it again"
        ) from error


def _audit(path: Path, proto: onnx.ModelProto) -> OnnxAudit:
    nodes = list(_nodes(OnnxGraph(proto.graph)))
    for view in {id(view): view for _, view, _ in nodes}.values():
        _check_scales(view)
    ops = Counter(node.op_type for node, _, _ in nodes)
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    target = metadata.get(TARGET_KEY, "")
    refused = refusal(path, target)
    others = Counter(f"{node.domain}.{node.op_type}" for node, _, _ in nodes if node.domain not in {"", "ai.onnx"})
    types, computed = {tensor.data_type for tensor in proto.graph.initializer}, types_of(proto)
    halves = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}
    return OnnxAudit(
        path=path,
        opset=opset_of(proto),
        rows=tuple(
            _unless(refused, _within(_typed(node, view, target, computed), place))
            for node, view, place in nodes
            if node.op_type in WEIGHTED_OPS | _FLOAT.keys() and len(node.input) > 1
        ),
        activation_pairs=ops["QuantizeLinear"],
        float_type=next((name for dtype, name in halves.items() if dtype in types), "float32"),
        ops=dict(sorted(ops.items())),
        metadata=metadata,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        others=tuple(f"{name} ({count})" for name, count in sorted(others.items())),
        refusals={target: refused} if target else {},
    )


def _unless(refused: str, row: AuditedNode) -> AuditedNode:
    return replace(row, int8=False, reason=refused) if refused else row


def _typed(node: onnx.NodeProto, view: OnnxGraph, target: str, types: dict[str, int]) -> AuditedNode:
    row = _float(node, view) if node.op_type in _FLOAT else _audited(node, view, target)
    dtype = types.get(node.output[0], 0)
    name = onnx.helper.tensor_dtype_to_string(dtype).partition(".")[2].lower() if dtype else ""
    return replace(row, float_type={"": row.float_type, "float": "float32"}.get(name, name))


def _nodes(view: OnnxGraph, place: str = "") -> Iterator[tuple[onnx.NodeProto, OnnxGraph, str]]:
    """Yield each node of a graph and its subgraphs, with its graph and the path of the nodes that hold it."""
    for node in view.graph.node:
        yield node, view, place
        for inner in subgraphs([node]):
            yield from _nodes(OnnxGraph(inner, view), f"{place}{node.name or node.op_type}/")


def _within(row: AuditedNode, place: str) -> AuditedNode:
    if not place:
        return row
    reason = row.reason and f"{row.reason}; it is inside {place.rstrip('/')}, which is not quantized"
    return replace(row, name=f"{place}{row.name}", reason=reason)


@dataclass(frozen=True, kw_only=True)
class NodeSparsity:
    """Zeros in the constant weight of one operation: their share of the elements, and whether they are N:M.

    Attributes:
        violations: groups of m input channels with more than n values; None if m does not divide the channels.
    """

    name: str
    dtype: str
    zeros: float
    violations: int | None


def audit_sparsity(path: Path | str, n: int = 2, m: int = 4) -> tuple[NodeSparsity, ...]:
    """Look for n values at most in every m consecutive input channels of each constant weight (AuditError: no ONNX)."""
    rows = []
    for node, view, place in _nodes(OnnxGraph(_load(Path(path)).graph)):
        if node.op_type not in WEIGHTED_OPS:
            continue
        source = view.dequantizer(node.input[1], PASSES)
        weight = _stored(node.input[1] if source is None else source.input[0], view)
        if weight is None or weight.ndim < 2:
            continue
        axis = 1
        if node.op_type in {"MatMul", "Gemm"}:
            axis = (attribute(node, "transB", 0) + _transposes(node.input[1], view)) % 2
        fits = weight.shape[axis] % m == 0
        rows.append(
            NodeSparsity(
                name=place + (node.name or node.output[0]),
                dtype=str(weight.dtype),
                zeros=float((weight == 0).mean()),
                violations=verify_nm(weight, n, m, axis=axis) if fits else None,
            )
        )
    return tuple(rows)


def sparse_nodes(path: Path | str) -> tuple[str, ...]:
    """The operations of an ONNX file whose weights are 2:4 (AuditError: the file is not ONNX)."""
    return tuple(row.name for row in audit_sparsity(path) if row.violations == 0)


def _load(path: Path) -> onnx.ModelProto:
    if not path.exists():
        raise AuditError(f"{path} does not exist; give an ONNX file")
    if not path.is_file():  # /dev/zero never ends
        raise AuditError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; give an ONNX file")
    with any_failure(lambda e: AuditError(f"{path} is not a valid ONNX file: {' '.join(str(e).split())[:300]}")):
        proto = onnx.load(path)
        mend(proto)
        onnx.checker.check_model(proto)
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
    return proto


def _check_scales(view: OnnxGraph) -> None:
    for node in view.graph.node:
        scale = view.array(node.input[1]) if node.op_type in {"QuantizeLinear", "DequantizeLinear"} else None
        if scale is None:
            continue
        value = scale.astype(np.float64)
        bad = ~(np.isfinite(value) & (value > 0))
        if bad.any():
            raise AuditError(
                f"{node.name or node.output[0]}: scale is {value[bad].flat[0]} in {int(bad.sum())} of {value.size} "
                "places; a scale is positive and finite. Calibrate again, or leave the layer float"
            )


def _transposes(name: str, view: OnnxGraph) -> int:
    """Count the Transpose nodes between a tensor and the constant that it comes from."""
    producer, count = view.producers.get(name), 0
    while producer is not None and producer.op_type in PASSES | {"DequantizeLinear"}:
        count += producer.op_type == "Transpose"
        producer = view.producers.get(producer.input[0])
    return count


def _stored(name: str, view: OnnxGraph) -> NDArray[Any] | None:
    """A constant, or the weight that a file quantizes itself (ModelOpt) or clips (Brevitas)."""
    maker = view.producers.get(name)
    return view.array(maker.input[0] if maker is not None and maker.op_type in {"QuantizeLinear", "Clip"} else name)


def _integer_type(node: onnx.NodeProto, view: OnnxGraph) -> str:
    source = view.array(node.input[0])
    if source is None and len(node.input) > 2:
        source = view.array(node.input[2])  # the zero point has the same type
    return "uint8" if source is None else str(source.dtype)


def _float(node: onnx.NodeProto, view: OnnxGraph) -> AuditedNode:
    reason, places = _FLOAT[node.op_type]
    weights = [view.array(name) for name in node.input[places]]
    return AuditedNode(
        name=node.name or node.output[0],
        op_type=node.op_type,
        input_type="float",
        weight_type="float",
        per_channel=False,
        weight_elements=sum(int(w.size) for w in weights if w is not None),
        int8=False,
        reason=reason,
    )


def _is_requantized(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    """True if quantizers alone read a result, after activations that a quantizer absorbs."""
    tensor = node.output[0]
    while tensor not in view.outputs:
        readers = view.consumers.get(tensor, [])
        kinds = {reader.op_type for reader in readers}
        if kinds == {"QuantizeLinear"}:
            return True
        if len(readers) != 1 or not kinds <= _ABSORBED:
            return False
        tensor = readers[0].output[0]
    return False


def _why_float(node: onnx.NodeProto, view: OnnxGraph, scale: NDArray[Any] | None) -> dict[str, str]:
    """Why engines compute an operation in float although both inputs are integers."""
    between = [producer for name in node.input[:2] for producer in view.before(name, PASSES) if producer is not None]
    casts = {attribute(one, "to", 0) for one in between if one.op_type == "Cast"}
    found = _several_scales(node, view)
    if node.op_type == "ConvTranspose":
        found["tensorrt-rtx"] = (
            "TensorRT-RTX computes transposed convolutions in float, and TensorRT in INT8: for TensorRT-RTX leave them "
            "float, or write a convolution and DepthToSpace"
        )
    if onnx.TensorProto.BFLOAT16 in casts:
        found["openvino"] = "a cast to bfloat16 lies between it and its pair: OpenVINO moves no pair over it"
    why = _on_onnxruntime(node, view, scale, {one.op_type for one in between})
    return found | ({"onnxruntime": why} if why else {})


def _on_onnxruntime(node: onnx.NodeProto, view: OnnxGraph, scale: NDArray[Any] | None, between: set[str]) -> str:
    held = sorted(between & (PASSES - MOVED_OVER))
    sources = [one for name in node.input[:2] if (one := view.dequantizer(name, PASSES)) is not None]
    if held:
        which = "a cast" if "Cast" in held else f"a {held[0]}"
        return f"{which} lies between it and its pair: ONNX Runtime moves no pair over it"
    if node.op_type == "MatMul" and _stored(sources[0].input[0], view) is not None:
        return "its weight is on the left: ONNX Runtime multiplies in 8 bits by weights on the right"
    if node.op_type == "Gemm" and any(len(one.input) < 3 or not one.input[2] for one in sources):
        return "a pair has no zero point, which ONNX Runtime asks for in a Gemm"
    if node.op_type == "Gemm" and (of_input := view.array(sources[0].input[1])) is not None and of_input.size > 1:
        return "its input has several scales: ONNX Runtime takes one in a Gemm"
    if node.op_type == "ConvTranspose":
        return "ONNX Runtime computes transposed convolutions in float"
    if node.op_type == "Conv" and not _is_requantized(node, view):
        return "its result is not quantized: ONNX Runtime computes a convolution in 8 bits only between two pairs"
    if scale is not None and scale.dtype != np.float32:
        return f"its pairs have scales of {scale.dtype}: ONNX Runtime computes in 8 bits with float32 scales only"
    return ""


_ONE_SCALE = "engines multiply integers with one scale for all values that are summed"


def _several_scales(node: onnx.NodeProto, view: OnnxGraph) -> dict[str, str]:
    # Why engines multiply in float: values within one sum have scales of their own.
    found: dict[str, str] = {}
    for place, part in enumerate(("input", "weight")):
        passed = [one for one in view.before(node.input[place], PASSES) if one is not None]
        sources = [one for one in passed if one.op_type == "DequantizeLinear"]
        scales = [scale for one in sources if (scale := view.array(one.input[1])) is not None]
        conv = node.op_type in {"Conv", "ConvTranspose"}
        if any(not np.array_equal(scale, scales[0]) for scale in scales):
            joined = [attribute(one, "axis", 0) for one in passed if one.op_type == "Concat"]
            if conv or place or any(joined):  # rows of a matrix are not summed
                why = f"a Concat joins parts of its {part} with scales of their own: {_ONE_SCALE}"
                found |= dict.fromkeys(("tensorrt", "openvino")[: 1 + place], why)
        elif scales and scales[0].size > 1 and not _of_results(node, place, sources[0], passed, view):
            why = f"its {part} has a scale for each part of an axis that the product sums over: {_ONE_SCALE}"
            # OpenVINO multiplies a depthwise input's scales into the weight, and matrix products in integers.
            found |= dict.fromkeys(("tensorrt", "openvino")[: 2 if conv and place else 1], why)
            if conv and not place and attribute(node, "group", 1) == 1:
                found["openvino"] = why
        elif conv and not place and scales and scales[0].shape == (1,):
            found["tensorrt-rtx"] = (
                "its input's scale has the shape (1,), which TensorRT-RTX takes for one of each channel: write a scale "
                "without dimensions"
            )
    return found


def _of_results(
    node: onnx.NodeProto, place: int, source: onnx.NodeProto, passed: list[onnx.NodeProto], view: OnnxGraph
) -> bool:
    # Whether the axis of an operand's scales is one of the product's results.
    stored, axis = _stored(source.input[0], view), attribute(source, "axis", 1)
    if attribute(source, "block_size", 0):
        return True
    if stored is not None and stored.ndim:
        axis %= stored.ndim
        for one in reversed(passed):
            if one.op_type == "Transpose":
                axis = list(attribute(one, "perm", range(stored.ndim)[::-1])).index(axis)
    if any(one.op_type in PASSES - {"Transpose", "Identity", "Cast"} for one in passed):
        return False
    last = -1 if stored is None else stored.ndim - 1
    first = {"MatMul": last - 1, "Gemm": attribute(node, "transA", 0)}
    second = {"MatMul": last, "Gemm": 1 - attribute(node, "transB", 0), "Conv": 0, "ConvTranspose": 1}
    if node.op_type == "MatMul" and stored is None and axis >= 0:  # of unknown rank
        first, second = {"MatMul": 0}, {"MatMul": 1}
    return axis == (second if place else first).get(node.op_type)


def _audited(node: onnx.NodeProto, view: OnnxGraph, target: str) -> AuditedNode:
    data, weight = (view.dequantizer(name, PASSES) for name in node.input[:2])
    constant = _stored(node.input[1] if weight is None else weight.input[0], view)
    if constant is None and node.op_type == "MatMul":  # the weight may be on the left
        left = _stored(node.input[0] if data is None else data.input[0], view)
        data, weight, constant = (data, weight, None) if left is None else (weight, data, left)
    scale = None if weight is None else view.array(weight.input[1])
    types = ["float" if source is None else _integer_type(source, view) for source in (data, weight)]
    missing = [
        f"{name} {_NOT_BYTES.get(dtype, 'is not quantized')}"
        for dtype, name in zip(types, ("its input", "its weight"), strict=True)
        if dtype not in _INTEGERS
    ]
    why_float = {} if missing else _why_float(node, view, scale)
    missing += [why_float[target]] if target in why_float else []
    return AuditedNode(
        name=node.name or node.output[0],
        op_type=node.op_type,
        input_type=types[0],
        weight_type=types[1],
        per_channel=scale is not None and scale.size > 1,
        weight_elements=0 if constant is None else int(constant.size),
        int8=not missing,
        reason="; ".join(missing),
        float_on=why_float,
    )
