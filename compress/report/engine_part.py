"""The report's part on engines: what each made of its file, as a figure and as tables.

Bytes tell more than types here: an engine whose layers are all INT8 can move more than one in fp16, when its
convolutions leave it to other kernels to quantize what they wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from compress.engines.engine_findings import unknown_part
from compress.report.blocks import Block, Bullets, Details, Table, Text, code, number, table
from compress.report.style import LIGHT, Format, bare, display, label, new_figure, plain
from compress.report.tables import in_bytes


@dataclass(frozen=True, kw_only=True)
class EngineLayerRow:
    """A layer of an engine; bytes are of one image."""

    name: str
    kind: str = ""
    role: str = ""
    precision: str = ""
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    tactic: str = ""
    sparse: bool | None = None
    untold: int = 0
    onnx_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineFinding:
    """A finding in words."""

    text: str


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One entry of engine_audit.json. Without layers it is an engine of which only the requirement was checked."""

    variant: str
    engine: str
    source: str = ""
    kernels: int = 0
    activation_bytes: float = 0.0
    untold: int = 0
    weight_bytes: float = 0.0
    fp16_bytes: float = 0.0
    int8_share: float = 0.0
    sparse_kernels: str = ""
    advice: str = ""
    findings: tuple[EngineFinding, ...] = ()
    layers: tuple[EngineLayerRow, ...] = ()
    unmet: tuple[str, ...] = ()


_ROLES = {
    "weighted": ("convolutions and products", "blue"),
    "pool": ("pools", "sky"),
    "add": ("sums that did not fuse", "alarm"),
    "requantize": ("requantizing", "amber"),
    "quantize": ("quantizing the input", "purple"),
    "reformat": ("changing layout or type", "green"),
    "float": ("other kernels", "grey"),
}


def role_bytes(engine: EngineRow) -> dict[str, float]:
    """Activation bytes an image by role, in the figure's order; roles that move none are left out."""
    sums = dict.fromkeys(_ROLES, 0.0)
    for layer in engine.layers:
        sums[layer.role if layer.role in sums else "float"] += layer.read_bytes + layer.written_bytes
    return {role: moved for role, moved in sums.items() if moved}


def draw_engines(engines: Sequence[EngineRow], form: Format) -> Figure:
    """Stacked bars of the bytes that each engine moves for one image, by role, with the estimate for fp16.

    Args:
        engines: with layers; not empty.
        form: what it is drawn for.
    """
    figure = new_figure(form, 0.5 * len(engines) + (2.2 if form.narrow else 1.5))
    axes = figure.subplots()
    longest = max(max(e.activation_bytes, e.fp16_bytes) for e in engines)
    seen: set[str] = set()
    for y, engine in enumerate(engines):
        left = 0.0
        for role, moved in role_bytes(engine).items():
            title, colour = _ROLES[role]
            axes.barh(y, moved, left=left, height=0.55, color=LIGHT[colour], label=None if role in seen else title)
            seen.add(role)
            left += moved
        axes.text(
            left + longest * 0.015, y, in_bytes(left) + (" and more" if engine.untold else ""), va="center", fontsize=8
        )
        axes.plot(
            [engine.fp16_bytes] * 2,
            [y - 0.36, y + 0.36],
            color=LIGHT["ink"],
            linewidth=1.6,
            label=None if y else "the same network in fp16 (estimate)",
        )
    axes.set_yticks(
        range(len(engines)),
        ["\n".join(label(part, 34) for part in (display(e.variant), display(e.engine))) for e in engines],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value).replace(".0 ", " ")))
    axes.set_xlabel("activations moved for one image")
    axes.tick_params(axis="y", length=0)
    bare(axes, grid="x")
    figure.legend(loc="outside lower left", ncols=1 if form.narrow else 3, handlelength=1.0)
    return figure


def engines_told(engines: Sequence[EngineRow]) -> str:
    """The figure in words."""
    return "; ".join(
        f"{plain(display(e.variant))} on {plain(display(e.engine))} {_moved(e)}, {e.kernels} kernels" for e in engines
    )


def engine_blocks(engines: Sequence[EngineRow]) -> Iterator[Block]:
    """Table, findings, advice, unmet requirements, and every layer folded away."""
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


def _moved(engine: EngineRow) -> str:
    return in_bytes(engine.activation_bytes) + unknown_part(engine.untold)


def _summary(engine: EngineRow) -> tuple[str, ...]:
    return (
        display(engine.variant),
        display(engine.engine),
        str(engine.kernels),
        _moved(engine),
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
                f"{layer.read_bytes + layer.written_bytes:,.0f}{unknown_part(layer.untold)}",
                "sparse" if layer.sparse else layer.tactic or "chosen when it runs",
            )
            for layer in engine.layers
        ],
    )
