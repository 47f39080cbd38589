"""What each engine made of its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.audit.engine import unknown_part
from compress.records.rows import EngineRow
from compress.report.blocks import Block, Bullets, Details, Table, Text, code, number, table
from compress.support.text import display, in_bytes


def engine_blocks(engines: Sequence[EngineRow]) -> Iterator[Block]:
    """Table, findings, advice, unmet requirements, layers."""
    unmet = [f"{display(e.variant)} on {display(e.engine)}: {text}" for e in engines for text in e.unmet]
    if unmet:
        yield Text("Not what export.require asks:")
        yield Bullets(tuple(unmet))
    audited = [e for e in engines if e.layers]
    if audited:
        masked = any(e.sparse_kernels for e in audited)
        yield table(
            "variant",
            "engine",
            number("kernels"),
            number("activations an image"),
            number("in fp16 (estimate)"),
            number("weights"),
            number("macs in INT8 %"),
            *(["layers with 2:4 weights"] if masked else []),
            rows=[(*_summary(e), *([e.sparse_kernels or "none"] if masked else [])) for e in audited],
        )
    for engine in audited:
        lines = tuple(f.text for f in engine.findings) + ((engine.advice,) if engine.advice else ())
        if lines:
            yield Text(f"{display(engine.variant)} on {display(engine.engine)}, from the {engine.source}:")
            yield Bullets(lines)
    for engine in audited:
        title = f"Layers of {display(engine.variant)} on {display(engine.engine)} ({len(engine.layers)} kernels)"
        yield Details(title, (_layers(engine),))


def moved(engine: EngineRow) -> str:
    """Bytes of activations for one image; tensors of unknown size are counted apart."""
    return in_bytes(engine.activation_bytes) + unknown_part(engine.unknown_sizes)


def _summary(engine: EngineRow) -> tuple[str, ...]:
    return (
        display(engine.variant),
        display(engine.engine),
        str(engine.kernels),
        moved(engine),
        in_bytes(engine.fp16_bytes),
        in_bytes(engine.weight_bytes),
        f"{100 * engine.int8_share:.1f}",
    )


def _layers(engine: EngineRow) -> Table:
    return table(
        code("layer"),
        "kind",
        "role",
        "reads",
        "writes",
        "computes in",
        number("bytes an image"),
        "kernel",
        rows=[
            (
                layer.onnx_nodes[0] if layer.onnx_nodes else layer.name,
                layer.kind,
                layer.role,
                " ".join(layer.input_types) or "none",
                " ".join(layer.output_types) or "none",
                layer.precision or "no product",
                f"{layer.activation_bytes:,.0f}{unknown_part(layer.unknown_sizes)}",
                "sparse" if layer.sparse else layer.tactic or "chosen when it runs",
            )
            for layer in engine.layers
        ],
    )
