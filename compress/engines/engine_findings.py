"""What the owner of an engine should know of it, in plain words, each with its layers and its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from compress.engines.audited_layer import AuditedLayer
from compress.engines.engine_layers import EIGHT_BITS, EngineListing, activations

FindingKind = Literal["float layer", "float output", "requantize", "reformat", "add", "fp32", "dense tactic", "untold"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something of an engine that its owner should know.

    Attributes:
        kind: of finding.
        text: in plain words, with counts.
        layers: names of the layers concerned.
        bytes: activation bytes an image that they move; 0 where the finding is not about bytes.
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
    """All findings of an engine, in the order: what computes in floating point, what is moved twice, the rest.

    Args:
        layers: judged, in the listing's order.
        listing: as the engine tells.
        per: images that the listing's shapes stand for.
        sparse_nodes: ONNX nodes with 2:4 weights.
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
        kept = "8-bit convolutions and products that write {types}, not 8 bits: {n} of {all}"
        _add(found, "float output", wide, kept, eight)
    again = [x for x in layers if x.role == "requantize" or (x.role == "add" and set(x.output_types) & EIGHT_BITS)]
    _add(found, "requantize", again, "kernels that quantize what a convolution wrote in {read}: {n}, {mb}")
    moved = [layer for layer in layers if layer.role == "reformat"]
    _add(found, "reformat", moved, "kernels that only change layout or type: {n}, {mb}")
    sums = [layer for layer in layers if layer.role == "add"]
    _add(found, "add", sums, "residual sums that did not fuse into a convolution: {n}, {mb}")
    found += _fp32(layers, listing, per)
    found += _sparsity(layers, listing, sparse_nodes)
    untold = [layer for layer in layers if layer.untold]
    text = (
        "layers with activations of a type or size that is not told, whose bytes are not counted: {n}. Give the ONNX "
    )
    _add(found, "untold", untold, text + "file, or set a context's shapes and ask the inspector again")
    found += [Finding(kind="untold", text=note, layers=()) for note in listing.notes]
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


def megabytes(count: float, *, untold: int = 0) -> str:
    """Bytes as people read them; `untold` is the number of tensors whose bytes are not among them.

    >>> megabytes(114_965_312), megabytes(4000), megabytes(4_600_000, untold=12)
    ('115.0 MB', '0.0 MB', '4.6 MB and 12 tensors of unknown size')
    """
    return f"{count / 1e6:.1f} MB{unknown_part(untold)}"


def unknown_part(untold: int) -> str:
    """What to say after a sum of bytes that is without `untold` tensors; "" where it is whole."""
    return f" and {untold} tensor{'s' * (untold > 1)} of unknown size" if untold else ""


def _fp32(layers: Sequence[AuditedLayer], listing: EngineListing, per: int) -> list[Finding]:
    """Layers that move FP32 inside the network, though the engine has narrower types."""
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


def masked_layers(
    layers: Sequence[AuditedLayer], listing: EngineListing, sparse_nodes: Collection[str]
) -> list[AuditedLayer]:
    """Convolutions and products with 2:4 weights, as the engine or the ONNX file tells."""
    return [
        audited
        for layer, audited in zip(listing.layers, layers, strict=True)
        if audited.role == "weighted" and (layer.sparse_weights or set(layer.onnx_nodes) & set(sparse_nodes))
    ]


def sparse_kernels_text(masked: int, sparse: int, untold: int) -> str:
    """How many layers with 2:4 weights run a sparse kernel, in words.

    >>> sparse_kernels_text(19, 0, 19), sparse_kernels_text(19, 12, 0), sparse_kernels_text(0, 0, 0)
    ('19, kernels chosen when it runs', '12 of 19 sparse', 'none')
    """
    if not masked:
        return "none"
    if untold == masked:
        return f"{masked}, kernels chosen when it runs"
    return f"{sparse} of {masked} sparse" + (f", {untold} not told" if untold else "")


def _sparsity(layers: Sequence[AuditedLayer], listing: EngineListing, sparse_nodes: Collection[str]) -> list[Finding]:
    """2:4 weights whose kernel is dense, and those of which nothing tells."""
    asked = masked_layers(layers, listing, sparse_nodes)
    found: list[Finding] = []
    dense = [layer for layer in asked if layer.sparse is False]
    _add(found, "dense tactic", dense, "layers with 2:4 weights that run a dense kernel: {n} of {all}", asked)
    silent = [layer for layer in asked if layer.sparse is None]
    text = "layers with 2:4 weights whose kernel is chosen when the engine first runs, so that whether it is sparse "
    _add(found, "untold", silent, text + "cannot be told from here: {n}")
    return found
