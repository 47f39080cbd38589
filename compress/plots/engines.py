"""The activations that engines move for one image."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from compress.plots.style import LIGHT, Format, byte_ticks, label, name_rows, new_figure, tip
from compress.records.rows import EngineRow
from compress.support.text import in_bytes

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
