"""Figures of receptive fields.

A dashed box is the theoretical field, a cross the centre of the unit, ellipses one and two sigma of the fit. Axes are
in pixels of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle
from torch import Tensor

from compress.plots.style import LIGHT, caption, plain_ticks, styled
from compress.receptive import EffectiveReceptiveField, ErfDrift, ReceptiveFieldTable, unproductive_layers
from compress.receptive.effective import radial_profile
from compress.support.text import shorten

HEAT = "magma"
DECADES = 5
_WIDE = 10.6


def background(image: Tensor) -> Tensor:
    """A normalized image (3, h, w) as grey levels (h, w) from 0 to 1."""
    grey = image.detach().float().cpu().mean(0)
    low, high = grey.quantile(0.01), grey.quantile(0.99)
    return ((grey - low) / (high - low).clamp_min(1e-6)).clamp(0, 1)


def draw_field(field: EffectiveReceptiveField, image: Tensor | None = None, *, name: str = "") -> Figure:
    with styled():
        figure = Figure(figsize=(_WIDE, 5.0), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.1)  # type: ignore[union-attr, call-arg]
        left, middle, right = figure.subplots(ncols=3)
        heat = field.normalized
        _draw_on_image(left, field, image)
        scale = middle.imshow(heat, cmap=HEAT, vmin=0, vmax=1)
        figure.colorbar(scale, ax=middle, location="bottom", shrink=0.8, label="influence, largest = 1")
        floor = -float(DECADES)
        scale = right.imshow(heat.clamp_min(10**floor).log10(), cmap=HEAT, vmin=floor, vmax=0)
        figure.colorbar(scale, ax=right, location="bottom", shrink=0.8, label="log10 of the influence")
        for axes, title in ((left, "on the image"), (middle, "linear scale"), (right, "logarithmic scale")):
            _frame(axes, field, title)
        for axes, colour in ((middle, "white"), (right, "white"), (left, LIGHT["alarm"])):
            draw_box(axes, field, colour)
            _draw_sigmas(axes, field, colour)
        figure.suptitle(
            f"{name or field.model} · {shorten(field.layer, 44)}: where unit ({field.unit[0]}, {field.unit[1]}) of "
            f"{field.grid[0]} × {field.grid[1]} looks",
            fontsize=11,
            weight="bold",
            x=0.01,
            ha="left",
        )
        caption(figure, f"{sizes(field)} {_legend(field)}")
        return figure


def sizes(field: EffectiveReceptiveField) -> str:
    """The field's sizes in words.

    The side is that of a square of as many pixels as exceed 4.55 % of the largest influence.
    """
    metrics, row = field.metrics, field.theoretical
    vertical, horizontal = metrics.gaussian.sigma
    text = (
        f"Mean of {field.images} images. Side {metrics.size:.0f} px (pixels above 4.55 % of the largest); half of the "
        f"influence within {metrics.radius_50:.0f} px of the centre, 95 % within {metrics.radius_95:.0f} px; Gaussian "
        f"σ {vertical:.1f} × {horizontal:.1f} px (explains {100 * max(0.0, metrics.gaussian.r_squared):.0f} %)."
    )
    if metrics.count > 0.8 * field.heat.numel():
        text += " It fills the image, which cuts it off: a larger image shows its real size."
    if row is None:
        return f"{text} The theoretical field is not known: torch.fx cannot trace the model."
    if row.status == "unknown":
        return f"{text} The theoretical field is {row.reason}."
    local = " × ".join(str(s) for s in dict.fromkeys(row.local_size) if s is not None)
    if row.status == "global":
        without = f"; without global operations it is {local} px" if local else ""
        return f"{text} In theory the unit sees everything ({row.reason}){without}."
    share = f", of which the side is {100 * metrics.theoretical_share:.0f} %" if metrics.theoretical_share else ""
    return f"{text} In theory the unit sees {local or row.seen[0]} px{share}."


def _legend(field: EffectiveReceptiveField) -> str:
    box = _box(field)
    if box is None:
        return "Cross: the unit's centre; ellipses: 1 and 2 σ of the Gaussian."
    reaches = any(a < 0 or b >= n for (a, b), n in zip(box, field.heat.shape, strict=True))
    beyond = ", which reaches beyond the image" if reaches else ""
    return f"Cross: the unit's centre; ellipses: 1 and 2 σ; dashed: the theoretical field{beyond}."


def _box(field: EffectiveReceptiveField) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """((first row, last), (first column, last)), not clipped."""
    row = field.theoretical
    if row is None or not row.located:
        return None
    spans = [row.window(field.unit, axis) for axis in range(2)]
    return None if spans[0] is None or spans[1] is None else (spans[0], spans[1])


def _draw_on_image(axes: Axes, field: EffectiveReceptiveField, image: Tensor | None) -> None:
    if image is not None:
        axes.imshow(background(image), cmap="gray", vmin=0, vmax=1)
    heat = field.normalized.sqrt()  # the square root shows the flanks
    axes.imshow(heat, cmap=HEAT, vmin=0, vmax=1, alpha=(0.85 * heat).clamp(0, 1).numpy() if image is not None else None)


def draw_box(axes: Axes, field: EffectiveReceptiveField, colour: str) -> None:
    """Draw the theoretical field as a dashed box cut at the image."""
    box = _box(field)
    if box is None:
        return
    (top, bottom), (left, right) = (
        (max(a, 0) - 0.5, min(b, n - 1) + 0.5) for (a, b), n in zip(box, field.heat.shape, strict=True)
    )
    axes.add_patch(
        Rectangle(
            (left, top),
            right - left,
            bottom - top,
            fill=False,
            linestyle="--",
            linewidth=1.3,
            edgecolor=colour,
            clip_on=False,
        )
    )


def _draw_sigmas(axes: Axes, field: EffectiveReceptiveField, colour: str) -> None:
    fit = field.metrics.gaussian
    for reach in (1, 2):
        axes.add_patch(
            Ellipse(
                (fit.centre[1], fit.centre[0]),
                2 * reach * fit.sigma[1],
                2 * reach * fit.sigma[0],
                fill=False,
                edgecolor=colour,
                linewidth=0.9,
                alpha=0.9,
            )
        )
    axes.plot(field.centre[1], field.centre[0], "+", color=colour, markersize=8, markeredgewidth=1.2)


def _frame(axes: Axes, field: EffectiveReceptiveField, title: str) -> None:
    height, width = field.heat.shape
    axes.grid(visible=False)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xlabel="column, px", ylabel="row, px")
    axes.set_title(title, fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(True)


def draw_drift(drift: ErfDrift, *, before: str = "before", after: str = "after", text: str = "") -> Figure:
    with styled():
        figure = Figure(figsize=(_WIDE + 1.6, 4.1), layout="constrained")
        panels = figure.subplots(ncols=4, width_ratios=(1, 1, 1, 1.15))
        maps = [f.heat / f.heat.sum() for f in (drift.before, drift.after)]
        top = float(torch.stack(maps).amax())
        for axes, part, name, field in zip(panels, maps, (before, after), (drift.before, drift.after), strict=False):
            levels = (part / top).clamp_min(10**-DECADES).log10()
            scale = axes.imshow(levels, cmap=HEAT, vmin=-DECADES, vmax=0)
            _frame(axes, field, f"{name}: side {field.metrics.size:.0f} px")
        figure.colorbar(scale, ax=list(panels[:2]), location="bottom", shrink=0.6, label="log10 of the influence")
        change = (maps[1] - maps[0]) * 1e6
        limit = max(float(change.abs().quantile(0.999)), 1e-12)
        scale = panels[2].imshow(change, cmap="RdBu_r", vmin=-limit, vmax=limit)
        _frame(panels[2], drift.after, f"{after} minus {before}")
        figure.colorbar(
            scale, ax=panels[2], location="bottom", shrink=0.9, label="share of the influence, 1e-6 a pixel"
        )
        width = max(1.0, drift.before.heat.shape[0] / 64)
        for part, name, colour in zip(maps, (before, after), ("grey", "alarm"), strict=True):
            radius, mass = radial_profile(part, drift.before.centre, width=width)
            panels[3].plot(radius, mass.cumsum(0) * 100, color=LIGHT[colour], label=name)
        panels[3].set(xlabel="radius around the unit, px", ylabel="influence within, %", ylim=(0, 101))
        panels[3].legend(loc="lower right")
        panels[3].set_title("Influence by radius", fontsize=9.5)
        said = (
            f"{100 * drift.total_variation:.1f} % of the influence lies on other pixels (0 = the same map); it moved "
            f"by {drift.moved_px:.2f} px in radius on average, the mean radius changed by "
            f"{drift.radius_change_px:+.2f} px and the side by a factor of {drift.size_ratio:.3f}."
        )
        caption(figure, f"{said} {text}".strip())
        return figure


def draw_table(table: ReceptiveFieldTable, *, name: str = "") -> Figure:
    with styled():
        figure = Figure(figsize=(_WIDE, 4.6), layout="constrained")
        axes = figure.subplots()
        rows = [row for row in table if row.kind != "input"]
        wide = [_side(row.local_size) for row in rows]
        narrow = [_side(row.smallest) for row in rows]
        axes.step(range(len(rows)), wide, where="mid", color=LIGHT["blue"], label="widest path")
        if any(a != b for a, b in zip(wide, narrow, strict=True) if not math.isnan(a)):
            axes.step(range(len(rows)), narrow, where="mid", color=LIGHT["sky"], label="narrowest path (shortcuts)")
        side = min(table.image_size)
        axes.axhline(side, color=LIGHT["muted"], linewidth=0.9)
        axes.annotate(
            f"side of the image, {side} px",
            (0.01, side),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=7.5,
            color=LIGHT["muted"],
        )
        first = next((i for i, row in enumerate(rows) if row.status == "global"), None)
        if first is not None:
            axes.axvspan(first, len(rows), color=LIGHT["amber"], alpha=0.14, linewidth=0)
            axes.annotate(
                "global",
                (first, 0),
                xycoords=("data", "axes fraction"),
                xytext=(4, 6),
                textcoords="offset points",
                fontsize=8.5,
                color=LIGHT["ink"],
            )
        axes.set_yscale("log", base=2)
        plain_ticks(axes.yaxis)
        axes.set(xlabel="node, in the order of the graph", ylabel="side of the theoretical field, px")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
        axes.set_title(f"{name or table.model}: what a unit can see")
        caption(figure, table_caption(table))
        return figure


def _side(size: Sequence[int | None]) -> float:
    known = [s for s in size if s]
    return math.prod(known) ** (1 / len(known)) if len(known) == len(size) and known else math.nan


def table_caption(table: ReceptiveFieldTable) -> str:
    found = unproductive_layers(table)
    text = ""
    if found.layers:
        certain = f", {100 * found.certain_share:.0f} % along every path" if found.certain_share else ""
        text = (
            f"{len(found.layers)} convolutions, the first of them {found.layers[0].path}, already read the whole image "
            f"of {' × '.join(map(str, found.image_size))} px: {100 * found.share:.0f} % of the multiply-accumulates"
            f"{certain}. "
        )
    if table.unknown is not None:
        text += f"{table.unknown.reason[0].upper()}{table.unknown.reason[1:]}. "
    first = next((row for row in table if row.status == "global"), None)
    if first is not None:
        text += f"Shaded: global from {first.path or first.name} on ({first.reason}). "
    notes = dict.fromkeys(note for row in table for note in row.notes)
    text += f"{len(notes)} joins are misaligned, the first: {next(iter(notes))}. " if notes else ""
    return (
        text + "Sizes are without borders and, where a line goes on in the shaded part, without the global operations."
    ).strip()
