"""Audits one layer of an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.audit.layers import (
    EIGHT_BITS,
    FLOATS,
    EngineLayer,
    EngineTensor,
    Operation,
    activations,
    macs,
    operation,
    weight_of,
)

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
