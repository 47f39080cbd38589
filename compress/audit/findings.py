"""Findings of an audit, each with its layers and its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from compress.audit.layer import AuditedLayer
from compress.audit.layers import EIGHT_BITS, EngineListing, activations

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
    found: list[Finding] = []
    if eight:
        loose = [layer for layer in weighted if layer.precision not in {*EIGHT_BITS, "unknown"}]
        _add(
            found,
            "float layer",
            loose,
            "convolutions and products that multiply in floating point: {n} of {all}",
            weighted,
        )
        wide = [layer for layer in eight if not set(layer.output_types) <= EIGHT_BITS]
        text = "8-bit convolutions and products that write {types}, not 8 bits: {n} of {all}"
        _add(found, "float output", wide, text, eight)
    quantizing = [x for x in layers if x.role == "requantize" or (x.role == "add" and set(x.output_types) & EIGHT_BITS)]
    _add(found, "requantize", quantizing, "kernels that quantize what a convolution wrote in {read}: {n}, {mb}")
    moved = [layer for layer in layers if layer.role == "reformat"]
    _add(found, "reformat", moved, "kernels that only change layout or type: {n}, {mb}")
    sums = [layer for layer in layers if layer.role == "add"]
    _add(found, "add", sums, "residual sums that did not fuse into a convolution: {n}, {mb}")
    found += _fp32(layers, listing, per)
    found += _sparsity(layers, listing, sparse_nodes)
    unknown = [layer for layer in layers if layer.unknown_sizes]
    text = (
        "layers with activations of unknown type or size, whose bytes are not counted: {n}. Give the ONNX file, or set "
        "a context's shapes and run the inspector again"
    )
    _add(found, "unknown", unknown, text)
    found += [Finding(kind="unknown", text=note, layers=()) for note in listing.notes]
    return found


def _add(
    found: list[Finding],
    kind: FindingKind,
    layers: list[AuditedLayer],
    text: str,
    among: list[AuditedLayer] | None = None,
) -> None:
    if not layers:
        return
    total = sum(layer.activation_bytes for layer in layers)
    filled = text.format(
        n=len(layers),
        all=len(among or layers),
        mb=f"{megabytes(total)} an image",
        types=_listed(t for layer in layers for t in layer.output_types if t not in EIGHT_BITS),
        read=_listed(t for layer in layers for t in layer.input_types if t not in EIGHT_BITS),
    )
    found.append(Finding(kind=kind, text=filled, layers=tuple(layer.name for layer in layers), bytes=total))


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


def _sparsity(layers: Sequence[AuditedLayer], listing: EngineListing, sparse_nodes: Collection[str]) -> list[Finding]:
    asked = layers_with_sparse_weights(layers, listing, sparse_nodes)
    found: list[Finding] = []
    dense = [layer for layer in asked if layer.sparse is False]
    _add(found, "dense tactic", dense, "layers with 2:4 weights that run a dense kernel: {n} of {all}", asked)
    unknown = [layer for layer in asked if layer.sparse is None]
    text = "layers with 2:4 weights whose kernel is chosen when the engine first runs, sparse or dense: {n}"
    _add(found, "unknown", unknown, text)
    return found
