"""Audits a built engine: the type of every layer, the bytes that it moves, and findings about both."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from compress.audit.findings import Finding, find, layers_with_sparse_weights, megabytes, sparse_kernels_text
from compress.audit.layer import AuditedLayer, audit_layer
from compress.audit.layers import EIGHT_BITS, EngineListing, activations, operation
from compress.audit.rows import onnx_shapes, with_rows


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
