"""What an engine does with a network: the type of every layer, the bytes that it moves, and what is wrong with that.

The order of trust: a recipe asks, an ONNX file says, an engine does. Pure functions over the layers that a parser read
(`nvidia_log`, `nvidia_inspector`): bytes are counted from types and shapes, once for each tensor that a kernel reads or
writes, so they are what the kernels ask of memory; a cache may serve some of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from compress.engines.audited_layer import AuditedLayer, judge_layer
from compress.engines.engine_findings import Finding, find, masked_layers, megabytes, sparse_kernels_text
from compress.engines.engine_layers import EIGHT_BITS, EngineListing, activations, operation
from compress.engines.engine_rows import with_rows
from compress.engines.onnx_shapes import onnx_shapes


@dataclass(frozen=True, kw_only=True)
class EngineAudit:
    """An engine, judged.

    Attributes:
        source: what told of it.
        fixed_batch: images of one run; None where the batch size is open.
        layers: in the order in which they run.
        findings: what to know, the weightiest first.
        advice: what to do about the bytes; "" where there is nothing to say.
        masked: layers with 2:4 weights.
    """

    source: str
    fixed_batch: int | None
    layers: tuple[AuditedLayer, ...]
    findings: tuple[Finding, ...]
    advice: str = ""
    masked: tuple[AuditedLayer, ...] = ()

    @property
    def activation_bytes(self) -> float:
        """Moved for one image by all layers."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def fp16_bytes(self) -> float:
        """Estimate of what the same network moves for one image in pure fp16, with its epilogues fused."""
        return sum(layer.fp16_bytes for layer in self.layers)

    @property
    def weight_bytes(self) -> float:
        """Constants of all layers."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def untold(self) -> int:
        """Activations whose bytes are unknown, so that all sums of bytes are without them."""
        return sum(layer.untold for layer in self.layers if layer.role != "host")

    @property
    def kernels(self) -> int:
        """Layers that run on the GPU."""
        return sum(layer.role != "host" for layer in self.layers)

    @property
    def weighted(self) -> tuple[AuditedLayer, ...]:
        """Convolutions and products."""
        return tuple(layer for layer in self.layers if layer.role == "weighted")

    def sparse_kernels(self) -> str:
        """How many of `masked` run a sparse kernel, in words."""
        told = [layer.sparse for layer in self.masked]
        return sparse_kernels_text(len(told), told.count(True), told.count(None))

    def share(self, *types: str) -> float:
        """Share of the known macs that are computed in one of `types`, 0 to 1."""
        total = sum(layer.macs or 0 for layer in self.weighted)
        return sum(layer.macs or 0 for layer in self.weighted if layer.precision in types) / total if total else 0.0


def audit_engine(
    listing: EngineListing, *, onnx: Path | str | None = None, sparse_nodes: Collection[str] = ()
) -> EngineAudit:
    """Judge an engine.

    Args:
        listing: its layers, from `parse_build_log` or `parse_inspector`.
        onnx: the file that it was built from, which tells how many rows of a flattened tensor belong to one image.
        sparse_nodes: ONNX nodes whose weights are 2:4 (`audit_sparsity`), for engines that do not tell.
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
    layers = tuple(judge_layer(layer, from_weighted, per, border) for layer in listing.layers)
    findings = tuple(find(layers, listing, per=per, sparse_nodes=sparse_nodes))
    masked = tuple(masked_layers(layers, listing, sparse_nodes))
    audit = EngineAudit(source=listing.source, fixed_batch=batch, layers=layers, findings=findings, masked=masked)
    return replace(audit, advice=_advice(audit))


def _fixed_batch(listing: EngineListing) -> int | None:
    """First dimension of the network's input; None where it is open or where nothing tells."""
    written = {t.name for layer in listing.layers for t in layer.outputs}
    open_inputs = [t for layer in listing.layers for t in activations(layer)[0] if t.name not in written]
    named = [t for t in open_inputs if t.name in listing.inputs] or [t for t in open_inputs if len(t.shape) > 1]
    size = named[0].shape[0] if named and named[0].shape else -1
    return size if size > 0 else None


def _advice(audit: EngineAudit) -> str:
    """What to do about the bytes."""
    moved, half = audit.activation_bytes, audit.fp16_bytes
    if not audit.share(*EIGHT_BITS):
        if audit.share("fp32", "tf32") <= 0.5:
            return ""
        if audit.untold:
            return "The engine computes in FP32; fp16 would move about half of its bytes."
        return f"The engine computes in FP32; fp16 would move {megabytes(half)} an image instead of {megabytes(moved)}."
    if moved <= 1.02 * half or audit.untold:
        return ""
    text = (
        f"INT8 moves {megabytes(moved)} of activations an image here, and the same network in fp16 would move about "
        f"{megabytes(half)}: its convolutions do not write 8 bits, and other kernels quantize what they wrote. Where "
        "memory is the bound (small layers, small batches), build fp16: quantization null, export.precision fp16. INT8 "
        "pays where the products are the bound; `inspect --engine FILE --device NAME` says in which layers."
    )
    wide = any("fp32" in layer.output_types for layer in audit.weighted if layer.precision in EIGHT_BITS)
    narrower = (
        " export.precision fp16 with export.channel_scales output lets its convolutions write FP16 instead of FP32."
    )
    return text + (narrower if wide else "")
