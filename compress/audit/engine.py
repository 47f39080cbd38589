"""Audits a built engine: the type of every layer, the bytes that it moves, findings, and what the recipe requires."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from compress.audit.layers import EIGHT_BITS, AuditedLayer, EngineListing, activations, audit_layer, operation
from compress.audit.rows import onnx_shapes, with_rows
from compress.engines.base import RuntimeLayer
from compress.engines.onnx_file import load_onnx
from compress.export.names import is_node
from compress.onnx_graph import WEIGHTED_OPS, OnnxGraph

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


Require = Literal["int8", "fp16"]

_RUNTIME_WEIGHTED = frozenset(
    {"Convolution", "Deconvolution", "GroupConvolution", "FullyConnected", "MatMul", "Linear", "Attention", "Subgraph"}
    | {"QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulInteger", "ConvInteger"}
)
"""Kinds of OpenVINO and the engine cuda, and of ONNX Runtime's optimized graph."""
_FOLDED = frozenset({"Add", "Mul", "Sub", "Div"})
_SHOWN = 3


def unmet_by_audit(audit: EngineAudit, require: Require, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Describe how an audited engine violates a requirement; () if it does not.

    `int8`: every operation of `int8_nodes` computes in 8 bits, and there is one; `fp16`: none computes in FP32.
    """
    if require == "fp16":
        wide = [layer.name for layer in audit.weighted if layer.precision in {"fp32", "tf32"}]
        return (f"{len(wide)} of {len(audit.weighted)} layers compute in FP32: {_some(wide)}",) if wide else ()
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
    results, fixed = {value.name for value in view.graph.output}, _fixed(view)
    found: dict[str, tuple[str, ...]] = {}
    for first in (node for node in view.graph.node if node.op_type in WEIGHTED_OPS):
        names, tensor = [], first.output[0]
        after = view.consumers.get(tensor, [])
        while len(after) == 1 and after[0].op_type in _FOLDED and fixed.issuperset({*after[0].input} - {tensor}):
            names.append(after[0].name)
            tensor = after[0].output[0]
            after = view.consumers.get(tensor, [])
        found[first.name] = (*names, tensor) if tensor in results else tuple(names)
    return found


def _fixed(view: OnnxGraph) -> set[str]:
    """Return the tensors that the file gives, or computes from those and from sizes."""
    found = set(view.constants)
    for node in view.graph.node:
        if node.op_type == "Shape" or found.issuperset(name for name in node.input if name):
            found.update(node.output)
    return found


def _missing(lost: Sequence[str], int8_nodes: Collection[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    return (f"{len(lost)} of {len(int8_nodes)} INT8 operations of the ONNX file are not INT8 here: {_some(lost)}",)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


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
