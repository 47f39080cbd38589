"""What is in an ONNX file: which weighted operations are INT8, which are not and why, and whether its scales are sane.

Only the file is read, so that the audit also tells the truth of files that others wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from compress.errors import AuditError
from compress.sparsity.masks import verify_nm

WEIGHTED_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_INTEGERS = frozenset({"int8", "uint8", "int4", "uint4"})
_PASSES = frozenset(
    "MaxPool Reshape Flatten Transpose Squeeze Unsqueeze Split Slice Concat Identity Gather Expand Cast".split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One weighted operation.

    Attributes:
        name: ONNX node.
        op_type: `Conv`, `ConvTranspose`, `Gemm` or `MatMul`.
        input_type, weight_type: `int8`, `uint8`, `int4`, `float8_e4m3fn`, ... where a DequantizeLinear stands before;
            else the float type.
        per_channel: whether the weight has a scale for each channel.
        weight_elements: elements of a constant weight; 0 for a product of two activations.
        int8: both inputs are integers of 8 bits or fewer.
        reason: why it is not; "" when it is.
    """

    name: str
    op_type: str
    input_type: str
    weight_type: str
    per_channel: bool
    weight_elements: int
    int8: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class OnnxAudit:
    """What an ONNX file holds.

    Attributes:
        path: the file.
        opset: of the default domain.
        rows: the weighted operations, in graph order.
        activation_pairs: QuantizeLinear nodes.
        float_type: type of the part that is not quantized (`float32` or `float16`).
        ops: number of nodes by type.
        metadata: of the model.
    """

    path: Path
    opset: int
    rows: tuple[AuditRow, ...]
    activation_pairs: int
    float_type: str
    ops: dict[str, int]
    metadata: dict[str, str]

    @property
    def int8_share(self) -> float:
        """Share of weight elements that are in INT8 operations, 0 to 1."""
        total = sum(row.weight_elements for row in self.rows)
        return sum(row.weight_elements for row in self.rows if row.int8) / total if total else 0.0


def audit_onnx(path: Path | str) -> OnnxAudit:
    """Read a file and say what is in it.

    Args:
        path: of an ONNX file, with its external weights beside it where it has any.

    Returns:
        A row for each weighted operation (is it INT8, and why not), operators counted, metadata.

    Raises:
        AuditError: not an ONNX file, or a scale that is zero, NaN, infinite or negative; names the node.
    """
    path = Path(path)
    proto = _load(path)
    graph = _Graph(proto)
    graph.check_scales()
    rows = tuple(graph.row(node) for node in proto.graph.node if node.op_type in WEIGHTED_OPS)
    ops: dict[str, int] = {}
    for node in proto.graph.node:
        ops[node.op_type] = ops.get(node.op_type, 0) + 1
    half = any(t.data_type == onnx.TensorProto.FLOAT16 for t in proto.graph.initializer)
    return OnnxAudit(
        path=path,
        opset=next((o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"}), 0),
        rows=rows,
        activation_pairs=ops.get("QuantizeLinear", 0),
        float_type="float16" if half else "float32",
        ops=dict(sorted(ops.items())),
        metadata={prop.key: prop.value for prop in proto.metadata_props},
    )


@dataclass(frozen=True, kw_only=True)
class SparsityAuditRow:
    """The zeros of one weighted operation's constant.

    Attributes:
        name: ONNX node.
        dtype: of the constant: `int8` where it is quantized.
        zeros: share of the elements that are zero.
        violations: groups of m consecutive input channels that hold more than n values; None where m does not divide
            the channels.
    """

    name: str
    dtype: str
    zeros: float
    violations: int | None


def audit_sparsity(path: Path | str, n: int = 2, m: int = 4) -> tuple[SparsityAuditRow, ...]:
    """Look for an n:m pattern along the input channels of every constant weight, in the integers where it is INT8.

    Args:
        path: ONNX file.
        n: values that a group may hold.
        m: consecutive input channels of a group.

    Raises:
        AuditError: not an ONNX file.
    """
    graph = _Graph(_load(Path(path)))
    rows = []
    for node in graph.nodes:
        if node.op_type not in WEIGHTED_OPS:
            continue
        source = graph.dequantizer(node.input[1], through=True)
        weight = graph.array(node.input[1] if source is None else source.input[0])
        if weight is None or weight.ndim < 2:
            continue
        axis = 1
        if node.op_type in {"MatMul", "Gemm"}:
            turned = next((a.i for a in node.attribute if a.name == "transB"), 0) + graph.transposes(node.input[1])
            axis = turned % 2
        fits = weight.shape[axis] % m == 0
        rows.append(
            SparsityAuditRow(
                name=node.name or node.output[0],
                dtype=str(weight.dtype),
                zeros=float((weight == 0).mean()),
                violations=verify_nm(weight, n, m, axis=axis) if fits else None,
            )
        )
    return tuple(rows)


def _load(path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(path)
        onnx.checker.check_model(proto)
    except FileNotFoundError:
        raise AuditError(f"{path} does not exist; give an ONNX file") from None
    except Exception as error:
        raise AuditError(f"{path} is not a valid ONNX file: {' '.join(str(error).split())[:300]}") from error
    return proto


class _Graph:
    """An ONNX graph with its constants and producers at hand."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.nodes = list(proto.graph.node)
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        self.producers = {output: node for node in self.nodes for output in node.output}
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self.constants[node.output[0]] = node.attribute[0].t

    def array(self, name: str) -> NDArray[np.generic] | None:
        """A constant's value, seen through Identity; None when `name` is computed."""
        if name in self.constants:
            return numpy_helper.to_array(self.constants[name])
        producer = self.producers.get(name)
        return self.array(producer.input[0]) if producer is not None and producer.op_type == "Identity" else None

    def check_scales(self) -> None:
        """Refuse scales that are no scales."""
        for node in self.nodes:
            if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
                continue
            scale = self.array(node.input[1])
            if scale is None:
                continue  # computed while running (dynamic quantization): nothing to check in the file
            value = scale.astype(np.float64)
            bad = ~(np.isfinite(value) & (value > 0))
            if bad.any():
                raise AuditError(
                    f"{node.name or node.output[0]}: scale is {value[bad].flat[0]} in {int(bad.sum())} of {value.size} "
                    "places; a scale is positive and finite. Calibrate again, or leave the layer float"
                )

    def dequantizer(self, name: str, *, through: bool) -> onnx.NodeProto | None:
        """The DequantizeLinear that a tensor comes from, back through operations that keep the values if asked."""
        producer = self.producers.get(name)
        while producer is not None and through and producer.op_type in _PASSES:
            producer = self.producers.get(producer.input[0])
        return producer if producer is not None and producer.op_type == "DequantizeLinear" else None

    def transposes(self, name: str) -> int:
        """Transpose nodes between a tensor and the constant that it comes from."""
        producer, count = self.producers.get(name), 0
        while producer is not None and producer.op_type in _PASSES | {"DequantizeLinear"}:
            count += producer.op_type == "Transpose"
            producer = self.producers.get(producer.input[0])
        return count

    def integer_type(self, node: onnx.NodeProto) -> str:
        """Type of the integers that a DequantizeLinear reads."""
        source = self.array(node.input[0])
        if source is not None:
            return str(source.dtype)
        zero_point = self.array(node.input[2]) if len(node.input) > 2 else None
        return str(zero_point.dtype) if zero_point is not None else "uint8"

    def row(self, node: onnx.NodeProto) -> AuditRow:
        """The audit of one weighted operation."""
        data, weight = (self.dequantizer(node.input[0], through=True), self.dequantizer(node.input[1], through=True))
        constant = self.array(weight.input[0]) if weight is not None else self.array(node.input[1])
        input_type = self.integer_type(data) if data is not None else "float"
        weight_type = self.integer_type(weight) if weight is not None else "float"
        scale = self.array(weight.input[1]) if weight is not None else None
        missing = [
            f"{what} is {'FP8, not INT8' if kind.startswith('float8') else 'not quantized'}"
            for kind, what in ((input_type, "its input"), (weight_type, "its weight"))
            if kind not in _INTEGERS
        ]
        return AuditRow(
            name=node.name or node.output[0],
            op_type=node.op_type,
            input_type=input_type,
            weight_type=weight_type,
            per_channel=scale is not None and scale.ndim > 0 and scale.size > 1,
            weight_elements=0 if constant is None else int(constant.size),
            int8=not missing,
            reason="; ".join(missing),
        )
