"""What `inspect --engine` prints: the audit of a built engine, and its layers under the roofs of a device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.cli.console import OUT, print_json, print_table
from compress.engines.engine_audit import EngineAudit, audit_engine
from compress.engines.engine_files import onnx_beside, read_engine_layers
from compress.engines.engine_findings import megabytes, unknown_part
from compress.engines.engine_roofline import choices_text, engine_roofline, int8_choices
from compress.export.audit import audit_sparsity

_COLUMNS = ("layer", "kind", "role", "reads", "writes", "computes in", "MB an image", "macs", "kernel")


def show_engine(path: Path, onnx: Path | None, device: str | None, batch_size: int, as_json: bool) -> None:
    """Print the audit of an engine: a table of layers, findings, advice.

    Args:
        path: engine, build log or inspector JSON.
        onnx: the file that it was built from, for what only that tells (2:4 weights, rows of flattened tensors); None =
            the one that stands beside it.
        device: puts the layers under its roofs.
        batch_size: of that.
        as_json: one JSON document instead.
    """
    listing, onnx = read_engine_layers(path), onnx or onnx_beside(path)
    sparse = () if onnx is None else tuple(r.name for r in audit_sparsity(onnx) if r.violations == 0 and r.zeros >= 0.5)
    audit = audit_engine(listing, onnx=onnx, sparse_nodes=sparse)
    if as_json:
        print_json(_document(audit, device, batch_size))
        return
    bound = engine_roofline(audit, device=device, batch_size=batch_size) if device is not None else None
    print_table(f"{path}: {audit.source}", _COLUMNS, _rows(audit), numbers=("MB an image", "macs"))
    OUT.print(summary_line(audit), highlight=False)
    for finding in audit.findings:
        OUT.print(f"- {finding.text}", markup=False, highlight=False)
    if audit.advice:
        OUT.print(f"advice: {audit.advice}", markup=False, highlight=False)
    if bound is not None and device is not None:
        OUT.print(
            f"{bound.device.title}, batch {batch_size}: at least {bound.least_time_ms:.3f} ms "
            f"({bound.images_per_s:,.0f} images/s), {bound.memory_bound_share:.0%} of it bound by memory. "
            + choices_text(
                int8_choices(audit, device=device, batch_size=batch_size), device=device, batch_size=batch_size
            ),
            markup=False,
            highlight=False,
        )


def summary_line(audit: EngineAudit) -> str:
    """The engine in one line."""
    shares = {name: audit.share(name) for name in dict.fromkeys(layer.precision for layer in audit.weighted)}
    told = ", ".join(f"{share:.0%} {name.upper()}" for name, share in shares.items()) or "none"
    masked = f"; layers with 2:4 weights: {audit.sparse_kernels()}" if audit.masked else ""
    return (
        f"{audit.kernels} kernels; {megabytes(audit.activation_bytes, untold=audit.untold)} of activations an image, "
        f"{megabytes(audit.weight_bytes)} of weights; macs: {told}{masked}"
    )


def _rows(audit: EngineAudit) -> list[tuple[str, ...]]:
    return [
        (
            layer.onnx_nodes[0] if layer.onnx_nodes and layer.name.startswith("__my") else layer.name,
            layer.kind,
            layer.role,
            " ".join(layer.input_types),
            " ".join(layer.output_types),
            layer.precision,
            f"{layer.activation_bytes / 1e6:.2f}{unknown_part(layer.untold)}",
            "unknown" if layer.macs is None else f"{layer.macs:,}" if layer.macs else "",
            _kernel(layer.sparse, layer.tactic),
        )
        for layer in audit.layers
        if layer.role != "host"
    ]


def _kernel(sparse: bool | None, tactic: str) -> str:
    return "sparse" if sparse else tactic[:40] if tactic else "chosen when run"


def _document(audit: EngineAudit, device: str | None, batch_size: int) -> dict[str, Any]:
    document = asdict(audit)
    document["masked"] = [layer.name for layer in audit.masked]
    document["totals"] = {
        "kernels": audit.kernels,
        "activation_bytes": audit.activation_bytes,
        "untold": audit.untold,
        "weight_bytes": audit.weight_bytes,
        "fp16_bytes": audit.fp16_bytes,
        "int8_share": audit.share("int8", "uint8"),
        "sparse_kernels": audit.sparse_kernels(),
    }
    if device is not None:
        document["roofline"] = engine_roofline(audit, device=device, batch_size=batch_size).as_dict()
        choices = int8_choices(audit, device=device, batch_size=batch_size)
        document["int8_choices"] = [{**asdict(choice), "int8_pays": choice.int8_pays} for choice in choices]
    return document
