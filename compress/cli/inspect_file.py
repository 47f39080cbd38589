"""The commands `inspect onnx` and `inspect engine`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.audit.engine import EngineAudit, megabytes, unknown_part
from compress.audit.files import audit_engine
from compress.audit.onnx import OnnxAudit, audit_onnx
from compress.audit.roofline import choices_text, engine_roofline, int8_choices
from compress.cli.console import OUT, print_json, print_next, print_table
from compress.cli.options import JsonOption, SizeOption, sides_of
from compress.support.limits import COUNT
from compress.support.text import display

_ENGINES = {"tensorrt": "TensorRT 11", "openvino": "OpenVINO on a CPU", "onnxruntime": "ONNX Runtime on a CPU"}
_COLUMNS = ("layer", "kind", "role", "reads", "writes", "computes in", "MB an image", "macs", "kernel")


def inspect_engine(
    file: Annotated[
        Path,
        typer.Argument(
            help="A built engine, its log, the inspector's JSON, a phone's file; an ONNX file: the plan of engine cuda."
        ),
    ],
    onnx: Annotated[
        Path | None,
        typer.Option("--onnx", help="The file that it was built from: 2:4 weights, rows of flattened tensors."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device whose roofs bound the time, such as rtx4090.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=COUNT, help="With --device: images of one run.")] = 32,
    size: SizeOption = None,
    as_json: JsonOption = False,
) -> None:
    audit = audit_engine(file, onnx=onnx, sides=() if size is None else sides_of(size))
    if as_json:
        print_json(_document(audit, device, batch_size))
        return
    bound = engine_roofline(audit, device=device, batch_size=batch_size) if device is not None else None
    print_table(f"{file}: {audit.source}", _COLUMNS, _rows(audit), numbers=("MB an image", "macs"))
    OUT.print(summary_line(audit), highlight=False)
    for finding in audit.findings:
        OUT.print(f"- {finding.text}", highlight=False)
    if audit.advice:
        OUT.print(f"advice: {audit.advice}", highlight=False)
    if bound is not None and device is not None:
        choices = int8_choices(audit, device=device, batch_size=batch_size)
        OUT.print(
            f"{bound.device.title}, batch {batch_size}: at least {bound.least_time_ms:.3f} ms "
            f"({bound.images_per_s:,.0f} images/s), {bound.memory_bound_share:.0%} of it bound by memory. "
            + choices_text(choices, device=device, batch_size=batch_size),
            markup=False,
            highlight=False,
        )
    print_next(f"bench {file}" if file.suffix == ".onnx" else f"inspect engine {file} --device rtx4090")


def summary_line(audit: EngineAudit) -> str:
    shares = {name: audit.share(name) for name in dict.fromkeys(layer.precision for layer in audit.weighted)}
    types = ", ".join(f"{share:.0%} {name.upper()}" for name, share in shares.items()) or "none"
    moved = megabytes(audit.activation_bytes, unknown=audit.unknown_sizes)
    masked = f"; layers with 2:4 weights: {audit.sparse_kernels()}" if audit.masked else ""
    return (
        f"{audit.kernels} kernels; {moved} of activations an image, "
        f"{megabytes(audit.weight_bytes)} of weights; macs: {types}{masked}"
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
            f"{layer.activation_bytes / 1e6:.2f}{unknown_part(layer.unknown_sizes)}",
            "unknown" if layer.macs is None else f"{layer.macs:,}" if layer.macs else "",
            "sparse" if layer.sparse else layer.tactic[:40] if layer.tactic else "chosen when run",
        )
        for layer in audit.layers
        if layer.role != "host"
    ]


def _document(audit: EngineAudit, device: str | None, batch_size: int) -> dict[str, Any]:
    document = asdict(audit)
    document["masked"] = [layer.name for layer in audit.masked]
    document["totals"] = {
        "kernels": audit.kernels,
        "activation_bytes": audit.activation_bytes,
        "unknown_sizes": audit.unknown_sizes,
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


def inspect_onnx(
    file: Annotated[Path, typer.Argument(help="An ONNX file.")],
    rows: Annotated[bool, typer.Option("--rows", metavar="", help="A row for each operation with weights.")] = False,
    as_json: JsonOption = False,
) -> None:
    audit = audit_onnx(file)
    if as_json:
        products = {engine: audit.products_on(engine) for engine in _ENGINES}
        print_json({**asdict(audit), "refused": audit.refused, "products": products, "mending": audit.mending})
        return
    if rows:
        lines = [(r.name, r.op_type, r.input_type, r.weight_type, "INT8" if r.int8 else r.reason) for r in audit.rows]
        print_table(f"{file}", ("operation", "type", "input", "weight", "verdict"), lines)
    _summary(audit)


def _summary(audit: OnnxAudit) -> None:
    count, total = sum(row.int8 for row in audit.rows), len(audit.rows)
    lines = [("file", f"opset {audit.opset}, {audit.producer or 'no producer named'}, {sum(audit.ops.values())} nodes")]
    for engine, name in _ENGINES.items():
        found = audit.products_on(engine)
        counts = ", ".join(f"{number} of {total} products {kind}" for kind, number in found.items()) or "none"
        why = audit.refusals.get(engine) if "not computed" in found else ""
        lines.append((name, f"{counts}: {why}" if why else counts))
    reasons = Counter(row.reason for row in audit.rows if row.reason)
    examples = {row.reason: row.name for row in reversed(audit.rows)}
    for reason, number in reasons.most_common(4):
        lines.append(("not INT8", f"{number}, such as {examples[reason]}: {reason}"))
    for engine in ("tensorrt", "tensorrt-rtx"):
        why_float = {row.name: row.float_on[engine] for row in audit.rows if engine in row.float_on and row.int8}
        examples = {why: name for name, why in reversed(why_float.items())}
        for why, number in Counter(why_float.values()).most_common(2):
            lines.append((f"float on {display(engine)}", f"{number}, such as {examples[why]}: {why}"))
    float32 = [row.name for row in audit.rows if row.type_on("tensorrt") == "FP32"]
    if float32 and audit.float_type != "float32":
        lines.append(("FP32", f"{len(float32)}, such as {float32[0]}: the file has its tensors in float32"))
    if audit.others:
        lines.append(
            (
                "plugins",
                f"{', '.join(audit.others[:4])}: TensorRT needs a plugin of that name, ONNX Runtime a library (--ops)",
            )
        )
    print_table(str(audit.path), ("", ""), lines)
    OUT.print(
        f"{count} of {total} weighted operations are INT8 ({audit.int8_share:.1%} of the weights); the "
        f"remainder is {audit.float_type}; opset {audit.opset}"
    )
    lacks, command = audit.mending
    if command:
        OUT.print(f"for TensorRT 11: {lacks}; what to do:\n{command}", highlight=False, soft_wrap=True)
    print_next(f"bench {audit.path}", f"inspect onnx {audit.path} --rows")
