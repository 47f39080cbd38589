"""What an engine does with a network: the type of every layer, the bytes that it moves, and what is wrong with that.

The order of trust: a recipe asks, an ONNX file says, an engine does. Pure functions over the layers that a parser read
(`nvidia_log`, `nvidia_inspector`): bytes are counted from types and shapes, once for each tensor that a kernel reads or
writes, so they are what the kernels ask of memory; a cache may serve some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from compress.engines.audited_layer import AuditedLayer, judge_layer
from compress.engines.engine_findings import Finding, find, megabytes
from compress.engines.engine_layers import (
    EIGHT_BITS,
    EngineLayer,
    EngineListing,
    EngineTensor,
    activations,
    operation,
)


@dataclass(frozen=True, kw_only=True)
class EngineAudit:
    """An engine, judged.

    Attributes:
        source: what told of it.
        fixed_batch: images of one run; None where the batch size is open.
        layers: in the order in which they run.
        findings: what to know, the weightiest first.
        fp16_bytes: estimate of what the same network moves an image in pure fp16, epilogues fused.
        advice: what to do about the bytes; "" where there is nothing to say.
    """

    source: str
    fixed_batch: int | None
    layers: tuple[AuditedLayer, ...]
    findings: tuple[Finding, ...]
    fp16_bytes: float
    advice: str

    @property
    def activation_bytes(self) -> float:
        """Moved for one image by all layers."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def weight_bytes(self) -> float:
        """Constants of all layers."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def kernels(self) -> int:
        """Layers that run on the GPU."""
        return sum(layer.role != "host" for layer in self.layers)

    @property
    def weighted(self) -> tuple[AuditedLayer, ...]:
        """Convolutions and products."""
        return tuple(layer for layer in self.layers if layer.role == "weighted")

    def share(self, *types: str) -> float:
        """Share of the known macs that are computed in one of `types`, 0 to 1."""
        total = sum(layer.macs or 0 for layer in self.weighted)
        return sum(layer.macs or 0 for layer in self.weighted if layer.precision in types) / total if total else 0.0


def audit_engine(listing: EngineListing, *, sparse_nodes: Collection[str] = ()) -> EngineAudit:
    """Judge an engine.

    Args:
        listing: its layers, from `parse_build_log` or `parse_inspector`.
        sparse_nodes: ONNX nodes whose weights are 2:4 (`audit_sparsity`), for engines that do not tell.
    """
    batch = _fixed_batch(listing)
    per = batch or 1
    from_weighted = {
        tensor.name
        for layer in listing.layers
        if operation(layer) in {"conv", "product"}
        for tensor in activations(layer)[1]
    }
    layers = tuple(judge_layer(layer, from_weighted, per) for layer in listing.layers)
    border = {*listing.inputs, *listing.outputs}
    findings = tuple(find(layers, listing, per=per, sparse_nodes=sparse_nodes))
    estimate = sum(_fp16_bytes(layer, audited, border) for layer, audited in zip(listing.layers, layers, strict=True))
    audit = EngineAudit(
        source=listing.source,
        fixed_batch=batch,
        layers=layers,
        findings=findings,
        fp16_bytes=estimate / per,
        advice="",
    )
    return _with_advice(audit)


def _fixed_batch(listing: EngineListing) -> int | None:
    """First dimension of the network's input; None where it is open or where nothing tells."""
    written = {t.name for layer in listing.layers for t in layer.outputs}
    open_inputs = [t for layer in listing.layers for t in activations(layer)[0] if t.name not in written]
    named = [t for t in open_inputs if t.name in listing.inputs] or [t for t in open_inputs if len(t.shape) > 1]
    size = named[0].shape[0] if named and named[0].shape else -1
    return size if size > 0 else None


def _fp16_bytes(layer: EngineLayer, audited: AuditedLayer, border: Collection[str]) -> float:
    """Bytes of the kernel that would stand in a layer's place in an fp16 engine, 0 where it would have fused away."""
    read, written = activations(layer)

    def half(tensors: Iterable[EngineTensor]) -> float:
        return sum(t.bytes() or 0 if t.name in border else 2 * t.elements() for t in tensors)

    if audited.role == "host":
        return 0.0
    if audited.role in {"requantize", "add"}:
        largest = max(t.elements() for t in read)
        shrinks = max(t.elements() for t in written) < largest  # a mean in the same kernel: it stays, and reads its sum
        residual = 2.0 * largest * (sum(t.elements() == largest for t in read) - 1)
        return residual + (2.0 * largest + half(written[:1]) if shrinks else 0.0)
    return half(read) + half(written[:1] if audited.role == "quantize" else written)


def _with_advice(audit: EngineAudit) -> EngineAudit:
    moved, half = audit.activation_bytes, audit.fp16_bytes
    eight = audit.share(*EIGHT_BITS)
    if eight and moved > 1.02 * half:
        wide = {t for layer in audit.weighted if layer.precision in EIGHT_BITS for t in layer.output_types} & {"fp32"}
        narrower = (
            " Exporting with precision fp16 and channel_scales output lets them write FP16, which halves that traffic."
            if wide
            else ""
        )
        text = (
            f"INT8 moves {megabytes(moved)} an image here, more than the {megabytes(half)} that the same network would "
            "move in fp16: its convolutions do not write 8 bits, and other kernels quantize what they wrote. Where "
            "memory is the bound, that is most small layers and small batches, build fp16 (quantization: null, "
            f"export.precision: fp16).{narrower}"
        )
    elif not eight and audit.share("fp32", "tf32") > 0.5:
        text = f"The engine computes in FP32; fp16 would move {megabytes(half)} an image instead of {megabytes(moved)}."
    else:
        text = ""
    return replace(audit, advice=text)
