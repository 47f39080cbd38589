"""Rooflines: layers under the roofs of a device, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from compress.plots.style import LIGHT, caption, distinct, plain_ticks, styled
from compress.roofline_model.devices import SPARSE, Device, parse_precision
from compress.roofline_model.measure import CONV, Ceilings
from compress.roofline_model.model import Roofline, Row
from compress.roofline_model.tables import quantity
from compress.support.text import shorten

KIND_COLOURS = {
    "1x1 convolution": "blue",
    "wider convolution": "alarm",
    "depthwise or grouped": "amber",
    "linear": "green",
    "attention, matmul": "purple",
    "no products": "grey",
}
_WIDTH = 8.6
_NAME_HEIGHT = 0.05  # of a level's name, as a share of the panel


def family(row: Row) -> str:
    """The colour group of a row: a key of `KIND_COLOURS`."""
    if row.kind in {"conv", "conv_transpose"}:
        if " " in row.detail:
            return "depthwise or grouped"
        return "1x1 convolution" if set(row.detail.split("x")) == {"1"} else "wider convolution"
    if row.kind == "linear":
        return "linear"
    return "attention, matmul" if row.macs else "no products"


def draw_roofline(roofline: Roofline, *, top: int = 12) -> Figure:
    with styled():
        figure = Figure(figsize=(_WIDTH + 2.4, 5.4), layout="constrained")
        left, right = figure.subplots(ncols=2, width_ratios=(1.75, 1))
        _draw_panel(left, roofline)
        left.set_title(f"{roofline.model} on {roofline.device.title}", fontsize=10)
        _draw_times(right, roofline, top)
        _finish(figure, [roofline], roofline_caption(roofline))
    return figure


def draw_rooflines(rooflines: Sequence[Roofline], *, columns: int = 2) -> Figure:
    """Several rooflines as panels of one figure, such as one network on four devices."""
    rows = math.ceil(len(rooflines) / columns)
    with styled():
        figure = Figure(figsize=(_WIDTH / 2 * columns + 1, 3.4 * rows + 0.9), layout="constrained")
        panels = figure.subplots(nrows=rows, ncols=columns, squeeze=False).ravel()
        for axes, roofline in zip(panels, rooflines, strict=False):
            _draw_panel(axes, roofline)
            share = roofline.memory_bound_share
            note = f"at most {roofline.images_per_s:,.0f} images/s, {share:.0%} of the time by memory"
            axes.set_title(f"{roofline.device.title}\n{note}", fontsize=9, weight="normal")
        for axes in panels[len(rooflines) :]:
            axes.set_visible(False)
        first = rooflines[0]
        text = (
            f"{first.model}, {first.precision}, batch {first.batch_size}, {_fused(first)}. Layers left of the dotted "
            "ridge wait for memory, layers right of it for arithmetic; a marker's area is the share of the time. A "
            "layer has the same intensity on every device; the ridge moves with the device."
        )
        _finish(figure, rooflines, text)
    return figure


def draw_ceilings(ceilings: Ceilings) -> Figure:
    device = ceilings.as_device()
    with styled():
        figure = Figure(figsize=(_WIDTH, 4.8), layout="constrained")
        axes = figure.subplots()
        low, levels = device.bandwidth_bytes_per_s, _levels(device)
        names = [*device.dense_flops_per_s, *(name + SPARSE for name in device.sparse_flops_per_s)]
        palette = ("blue", "alarm", "green", "purple", "amber", "sky", "grey", "ink", "muted")
        colours = dict(zip(names, palette, strict=False))
        points = [
            (s.arithmetic_intensity, s.rate, c.name.removesuffix(CONV), "^" if c.name.endswith(CONV) else "o")
            for c in ceilings.ceilings
            if c.unit == "flops/s" and c.rate is not None
            for s in c.samples
        ]
        for x, y, name, marker in points:
            axes.scatter(x, y, s=26, marker=marker, color=LIGHT[colours[name]], zorder=3)
        x_low, x_high = 1.0, 2 * max(*(x for x, *_ in points), max(levels) / low)
        _draw_roofs(axes, device, levels, (x_low, x_high, x_low * low / 2, 2.5 * max(levels)), colours=colours)
        axes.annotate(
            quantity(low, "B/s"), (3, 3 * low), xytext=(-9, 3), textcoords="offset points", fontsize=8, ha="right"
        )
        _label_axes(axes, f"rate, {_operation(names)}/s")
        axes.set_title(f"{device.title}{', ' + device.note if device.note else ''}")
        sizes = sorted({s.size for c in ceilings.ceilings if c.name in names for s in c.samples})
        triangles = "; triangles: 3x3 convolutions by channels" if any(m == "^" for *_, m in points) else ""
        text = (
            f"Measured roofs: slope = copies, levels = the fastest product; {device.source}. Dots: square products of "
            f"side {', '.join(map(str, sizes))}{triangles}. Intensity grows with size; where a point stops short of "
            "its level, the product is too small to fill the machine or its kernel is not the best."
        )
        _finish(figure, [], text)
    return figure


def roofline_caption(roofline: Roofline) -> str:
    free = sum(row.least_time_ms or 0.0 for row in roofline.rows if not row.macs)
    text = (
        f"{roofline.precision}, batch {roofline.batch_size}, {_fused(roofline)}: at best "
        f"{roofline.least_time_ms:.3g} ms, {roofline.memory_bound_share:.0%} of it in layers that wait for memory "
        "(left of the dotted ridge). A marker's area is the share of the time. "
        "Each layer is drawn on the roof that bounds it. "
    )
    if roofline.least_time_ms:
        share = free / roofline.least_time_ms
        text += f"Operations without products (not in the left panel) take {share:.0%} of the bound."
    return text + (f" Unknown and left out: {', '.join(roofline.unknown)}." if roofline.unknown else "")


def _fused(roofline: Roofline) -> str:
    return "fused as an engine does" if roofline.fused else "each operation alone"


def _draw_panel(axes: Axes, roofline: Roofline) -> None:
    device, ridge, points = roofline.device, roofline.ridge_point, _points(roofline)
    x_low = min([x for x, _, _ in points] + [ridge / 30]) / 2
    x_high = max([x for x, _, _ in points] + [ridge * 4]) * 2
    y_low = min([y for _, y, _ in points] + [x_low * device.bandwidth_bytes_per_s]) / 1.6
    levels = _levels(device, roofline.precision)
    _draw_roofs(axes, device, levels, (x_low, x_high, y_low, max(levels) * 2.2), chosen=roofline.precision)
    total = roofline.least_time_ms or 1.0
    for (x, y, name), time_ms in sorted(points.items(), key=lambda item: -item[1]):
        colour, area = LIGHT[KIND_COLOURS[name]], 12 + 1500 * time_ms / total
        axes.scatter(x, y, s=area, color=colour, alpha=0.75, linewidths=0.6, edgecolors=LIGHT["paper"], zorder=3)
    axes.axvline(ridge, color=LIGHT["muted"], linestyle=":", linewidth=1.0, zorder=1)
    unit = _operation([roofline.precision])
    axes.annotate(
        f"slope {quantity(device.bandwidth_bytes_per_s, 'B/s')}\nridge {ridge:.3g} {unit}/B",
        (ridge, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 4),
        textcoords="offset points",
        fontsize=8,
        color=LIGHT["muted"],
        ha="right",
    )
    _label_axes(axes, f"attainable rate, {unit}/s", unit)


def _points(roofline: Roofline) -> dict[tuple[float, float, str], float]:
    """(intensity, rate, family) -> ms; rows within 3 % become one."""
    places: dict[tuple[int, int, str], tuple[float, float, str]] = {}
    points: dict[tuple[float, float, str], float] = {}
    for row in roofline.rows:
        rate = row.attainable_flops_per_s
        if row.arithmetic_intensity and rate:
            name, intensity = family(row), row.arithmetic_intensity
            key = (round(math.log(intensity) * 30), round(math.log(rate) * 30), name)
            place = places.setdefault(key, (intensity, rate, name))
            points[place] = points.get(place, 0.0) + (row.least_time_ms or 0.0)
    return points


def _levels(device: Device, chosen: str = "") -> dict[float, list[str]]:
    """Peak -> precisions within 3 %: the dense ones, and the chosen one's 2:4."""
    wanted = parse_precision(chosen) if chosen else None
    names = [n for n in device.precisions if not n.endswith(SPARSE) or not wanted or n == wanted.base + SPARSE]
    levels: dict[float, list[str]] = {}
    for name in sorted(names, key=lambda n: n != chosen):
        peak = device.peak_flops_per_s(name)
        near = next((level for level in levels if abs(level / peak - 1) < 0.03), peak)
        levels.setdefault(near, []).append(name)
    return levels


def _draw_roofs(
    axes: Axes,
    device: Device,
    levels: Mapping[float, Sequence[str]],
    limits: tuple[float, float, float, float],
    *,
    chosen: str = "",
    colours: Mapping[str, str] | None = None,
) -> None:
    x_low, x_high, y_low, y_high = limits
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    bandwidth, top = device.bandwidth_bytes_per_s, max(levels)
    axes.plot([x_low, top / bandwidth], [x_low * bandwidth, top], color=LIGHT["ink"], linewidth=1.6, zorder=2)
    lowest = 0.0
    for peak, names in sorted(levels.items()):
        strong = chosen in names or not chosen
        colour = LIGHT[(colours or {}).get(names[0], "ink" if strong else "muted")]
        axes.plot([peak / bandwidth, x_high], [peak, peak], color=colour, linewidth=1.6 if strong else 0.9, zorder=2)
        place = max(math.log(peak / y_low) / math.log(y_high / y_low), lowest)  # names of close levels are moved apart
        lowest = place + _NAME_HEIGHT
        axes.annotate(
            f"{', '.join(names)}: {quantity(peak, _operation(names) + '/s')}",
            (1.0, place),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            va="center",
            weight="bold" if chosen in names else "normal",
        )


def _draw_times(axes: Axes, roofline: Roofline, top: int) -> None:
    rows = sorted(roofline.rows, key=lambda row: -(row.least_time_ms or 0.0))[:top]
    for place, row in enumerate(rows):
        colour = LIGHT[KIND_COLOURS[family(row)]]
        hatch = "////" if row.bound == "compute" else None
        axes.barh(
            place,
            row.least_time_ms or 0.0,
            color=colour,
            hatch=hatch,
            edgecolor=LIGHT["paper"],
            linewidth=0,
            height=0.7,
        )
    names = [shorten(name, 26) for name in distinct([row.name for row in rows])]
    axes.set_yticks(range(len(rows)), names, fontsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("least ms of the batch")
    axes.set_title(f"The {len(rows)} layers that take longest", fontsize=10)


def _operation(names: Sequence[str]) -> str:
    return "op" if "op" in {parse_precision(name).operation for name in names} else "flop"


def _label_axes(axes: Axes, y_label: str, unit: str = "flop") -> None:
    axes.set(xlabel=f"arithmetic intensity, {unit} per byte", ylabel=y_label)
    plain_ticks(axes.xaxis)
    rate_ticks(axes.yaxis)


def rate_ticks(axis: Axis) -> None:
    plain_ticks(axis)
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value, "").strip()))


def _finish(figure: Figure, rooflines: Sequence[Roofline], text: str) -> None:
    single = len(rooflines) == 1
    used = {family(row) for roofline in rooflines for row in roofline.rows if single or row.macs}
    handles: list[Line2D | Patch] = [
        Line2D([], [], marker="o", linestyle="", color=LIGHT[colour], markersize=7, label=name)
        for name, colour in KIND_COLOURS.items()
        if name in used
    ]
    if single:
        handles.append(Patch(facecolor=LIGHT["grey"], hatch="////", edgecolor=LIGHT["paper"], label="bound by compute"))
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    caption(figure, text)
