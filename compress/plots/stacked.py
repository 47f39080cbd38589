"""Stacked bars: the time from image to classes by stages, the activations that engines move by roles."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compress.measure.end_to_end import STAGES, EndToEnd, Stage
from compress.plots.style import LIGHT, Format, byte_ticks, label, name_rows, new_figure, tip
from compress.records.rows import EngineRow
from compress.support.text import display, in_bytes

_SHOWN: dict[Stage, tuple[str, str]] = {
    "decode": ("decoding", "purple"),
    "preprocess": ("resizing and normalizing", "amber"),
    "engine": ("the engine", "blue"),
    "postprocess": ("softmax and top 5", "green"),
}
_READABLE = 0.08
"""Share of the longest bar from which a stage has room for its share in words."""


def draw_end_to_end(results: Sequence[EndToEnd], form: Format) -> Figure:
    """Stacked milliseconds for one image, by variant and batch size."""
    figure = new_figure(form, 0.5 * len(results) + (2.1 if form.narrow else 1.5))
    axes = figure.subplots()
    longest = max(result.total_ms / result.batch_size for result in results)
    drawn: set[Stage] = set()
    for y, result in enumerate(results):
        left = 0.0
        for stage in (stage for stage in STAGES if stage in result.stage_ms):
            title, colour = _SHOWN[stage]
            width = result.stage_ms[stage] / result.batch_size
            named = None if stage in drawn else title
            bars = axes.barh(y, width, left=left, height=0.6, color=LIGHT[colour], label=named)
            tip(bars[0], f"{result.label}, {title}: {width:.3g} ms an image")
            if width >= _READABLE * longest * (2 if form.narrow else 1):
                shade = LIGHT["ink"] if stage == "preprocess" else LIGHT["paper"]
                text = f"{result.share(stage):.0%}"
                axes.text(left + width / 2, y, text, ha="center", va="center", fontsize=8, color=shade)
            drawn.add(stage)
            left += width
        axes.text(left + 0.015 * longest, y, f"{left:.3g} ms", va="center", fontsize=8)
    name_rows(axes, [_name(result, form) for result in results], end=(1.35 if form.narrow else 1.15) * longest)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("ms an image" if form.narrow else "ms an image, to its classes; median of each stage")
    figure.legend(loc="outside lower left", ncols=2 if form.narrow else 4, handlelength=1.0)
    return figure


def _name(result: EndToEnd, form: Format) -> str:
    variant, colon, engine = result.label.partition(": ")
    name = f"{display(variant)}, {display(engine)}" if colon else display(result.label)
    return f"{label(name, 20 if form.narrow else 34)}\nbatch {result.batch_size}"


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
    """Activation bytes by role, without those that move none."""
    sums: dict[str, float] = dict.fromkeys(_ROLES, 0.0)
    for layer in engine.layers:
        sums[layer.role if layer.role in sums else "float"] += layer.activation_bytes
    return {role: moved for role, moved in sums.items() if moved}


def draw_engines(engines: Sequence[EngineRow], form: Format) -> Figure:
    """Stacked bytes by role, with the estimate for fp16."""
    figure = new_figure(form, 0.5 * len(engines) + (2.2 if form.narrow else 1.5))
    axes = figure.subplots()
    longest = max(max(e.activation_bytes, e.fp16_bytes) for e in engines)
    seen: set[str] = set()
    for y, engine in enumerate(engines):
        left = 0.0
        for role, moved in role_bytes(engine).items():
            title, colour = _ROLES[role]
            named = None if role in seen else title
            bars = axes.barh(y, moved, left=left, height=0.55, color=LIGHT[colour], label=named)
            tip(bars[0], f"{label(engine.variant)}, {label(engine.engine)}, {title}: {in_bytes(moved)}")
            seen.add(role)
            left += moved
        axes.text(
            left + longest * 0.015,
            y,
            in_bytes(left) + (" and more" if engine.unknown_sizes else ""),
            va="center",
            fontsize=8,
        )
        axes.plot(
            [engine.fp16_bytes] * 2,
            [y - 0.36, y + 0.36],
            color=LIGHT["ink"],
            linewidth=1.6,
            label=None if y else "the same network in fp16 (estimate)",
        )
    name_rows(axes, [f"{label(e.variant, 34)}\n{label(e.engine, 34)}" for e in engines], end=longest * 1.2)
    byte_ticks(axes, 4)
    axes.set_xlabel("activations moved for one image")
    figure.legend(loc="outside lower left", ncols=1 if form.narrow else 3, handlelength=1.0)
    return figure
