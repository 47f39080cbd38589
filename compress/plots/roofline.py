"""Rooflines: layers under the roofs of a device, where the time goes; figures of docs about convolutions and blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from compress.plots.style import LIGHT, caption, distinct, plain_ticks, styled
from compress.roofline_model.counting import Operation, Workload, convolution
from compress.roofline_model.devices import SPARSE, Device, parse_precision
from compress.roofline_model.measure import CONV, Ceilings
from compress.roofline_model.model import Roofline, Row, roofline_of
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
    """Layers under the roofs, and the `top` that take longest."""
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
    """Measured roofs with the matrix products that found them."""
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
    """The caption of the figure of one roofline."""
    free = sum(row.least_time_ms or 0.0 for row in roofline.rows if not row.macs)
    text = (
        f"{roofline.precision}, batch {roofline.batch_size}, {_fused(roofline)}: at best "
        f"{roofline.least_time_ms:.3g} ms, {roofline.memory_bound_share:.0%} of it in layers that wait for memory "
        "(left of the dotted ridge). A marker's area is the share of the time. "
    )
    if roofline.measured_ms is None:
        text += "Without measurements each layer is drawn on the roof that bounds it. "
    elif roofline.least_time_ms:
        ratio = roofline.measured_ms / roofline.least_time_ms
        text += f"Measured {roofline.measured_ms:.3g} ms: the roofs allow {ratio:.1f} times that speed. "
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
    total = sum(map(_time, roofline.rows)) or 1.0
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
    _label_axes(axes, f"{'' if roofline.measured_ms is not None else 'attainable '}rate, {unit}/s", unit)


def _points(roofline: Roofline) -> dict[tuple[float, float, str], float]:
    """(intensity, rate, family) -> ms; rows within 3 % become one."""
    places: dict[tuple[int, int, str], tuple[float, float, str]] = {}
    points: dict[tuple[float, float, str], float] = {}
    for row in roofline.rows:
        rate = row.achieved_flops_per_s or row.attainable_flops_per_s
        if row.arithmetic_intensity and rate:
            name, intensity = family(row), row.arithmetic_intensity
            key = (round(math.log(intensity) * 30), round(math.log(rate) * 30), name)
            place = places.setdefault(key, (intensity, rate, name))
            points[place] = points.get(place, 0.0) + _time(row)
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
    """Bars of the longest layers; the least time stands inside the measured one."""
    rows = sorted(roofline.rows, key=lambda row: -_time(row))[:top]
    measured = roofline.measured_ms is not None
    for place, row in enumerate(rows):
        colour = LIGHT[KIND_COLOURS[family(row)]]
        hatch = "////" if row.bound == "compute" else None
        if measured:
            axes.barh(place, _time(row), color=colour, alpha=0.35, height=0.7)
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
    axes.set_xlabel("measured (pale) and least ms of the batch" if measured else "least ms of the batch")
    axes.set_title(f"The {len(rows)} layers that take longest", fontsize=10)


def _time(row: Row) -> float:
    return row.measured_ms or row.least_time_ms or 0.0


def _operation(names: Sequence[str]) -> str:
    units = {parse_precision(name).operation for name in names}
    return "op" if "op" in units else "flop"


def _label_axes(axes: Axes, y_label: str, unit: str = "flop") -> None:
    axes.set_xlabel(f"arithmetic intensity, {unit} per byte")
    axes.set_ylabel(y_label)
    plain_ticks(axes.xaxis)
    rate_ticks(axes.yaxis)


def rate_ticks(axis: Axis) -> None:
    """Rates with decimal prefixes on a logarithmic axis."""
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


CHANNELS = (8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = (7, 14, 28, 56, 112)
KERNELS: dict[str, tuple[int, bool]] = {
    "1x1": (1, False),
    "3x3": (3, False),
    "5x5": (5, False),
    "3x3 depthwise": (3, True),
}
_COLOURS = {"1x1": "blue", "3x3": "alarm", "5x5": "green", "3x3 depthwise": "amber"}
_SERIES = ("blue", "alarm", "green", "purple", "amber", "sky")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a network, for one image.

    Attributes:
        least_time_ms: bound on a device.
        receptive_field: pixels; infinite for global.
        effective_field: pixels (`ErfMetrics.size`); NaN where units have no place.
    """

    name: str
    flops: float
    least_time_ms: float
    receptive_field: float
    effective_field: float = math.nan


def network_blocks(
    roofline: Roofline, fields: Mapping[str, float], effective: Mapping[str, float], *, depth: int = 2
) -> tuple[Block, ...]:
    """Gather rows into blocks by the first `depth` parts of their paths.

    Args:
        roofline: costs are for one image of its batch.
        fields: pixels, by node name or module path; what is missing takes the field before it.
        effective: pixels, by block.
        depth: how many parts of a path name a block: 2 makes `layer2.0` of `layer2.0.conv1`.
    """
    blocks: list[Block] = []
    field = 1.0
    for row in roofline.rows:
        name = block_of(row.paths[0], depth) if row.paths else blocks[-1].name if blocks else row.name
        field = next((fields[key] for key in (*reversed(row.members), *reversed(row.paths)) if key in fields), field)
        flops, time_ms = (row.flops or 0) / roofline.batch_size, (row.least_time_ms or 0.0) / roofline.batch_size
        if blocks and blocks[-1].name == name:
            flops, time_ms = flops + blocks[-1].flops, time_ms + blocks.pop().least_time_ms
        sees = effective.get(name, math.nan)
        blocks.append(Block(name=name, flops=flops, least_time_ms=time_ms, receptive_field=field, effective_field=sees))
    return tuple(blocks)


def block_of(path: str, depth: int) -> str:
    """`layer2.0` of `layer2.0.conv1` at depth 2."""
    return ".".join(path.split(".")[:depth])


def convolution_rows(
    kernel: str, *, device: Device, precision: str, batch_size: int, size: int, channels: Sequence[int] = CHANNELS
) -> tuple[Row, ...]:
    """Rows of a key of `KERNELS`, as many channels out as in."""
    side, depthwise = KERNELS[kernel]
    operations = tuple(
        convolution(channels=c, size=size, kernel=side, groups=c if depthwise else 1, batch_size=batch_size)
        for c in channels
    )
    return roofline_of(_workload(operations, batch_size), device=device, precision=precision).rows


def draw_convolutions(device: Device, *, precision: str = "int8", batch_size: int = 32, size: int = 28) -> Figure:
    """The roof, and each kind's channels at their intensity."""
    bandwidth, ridge = device.bandwidth_bytes_per_s, device.ridge_point(precision)
    peak, unit = device.peak_flops_per_s(precision), parse_precision(precision).operation
    with styled():
        figure = Figure(figsize=(8.6, 5.6), layout="constrained")
        roof, lines = figure.subplots(nrows=2, sharex=True, height_ratios=(1.25, 1))
        series = {
            name: convolution_rows(name, device=device, precision=precision, batch_size=batch_size, size=size)
            for name in KERNELS
        }
        x_low, x_high = 1.0, 1.6 * max(row.arithmetic_intensity or 0.0 for rows in series.values() for row in rows)
        roof.plot([x_low, ridge, x_high], [x_low * bandwidth, peak, peak], color=LIGHT["ink"], linewidth=1.8)
        for place_, (name, rows) in enumerate(series.items()):
            x, colour = [row.arithmetic_intensity or 0.0 for row in rows], _COLOURS[name]
            roof.scatter(
                x, [row.attainable_flops_per_s or 0.0 for row in rows], s=26, color=LIGHT[colour], zorder=3, alpha=0.8
            )
            lines.plot(x, [place_] * len(x), color=LIGHT[colour], marker="o", markersize=5, linewidth=1)
            _label_channels(lines, x, place_)
        for axes in (roof, lines):
            axes.axvline(ridge, color=LIGHT["muted"], linestyle=":", linewidth=1.0)
        _name_roof(roof, peak, f"{precision}\n{quantity(peak, unit + '/s')}")
        roof.annotate(
            f"{quantity(bandwidth, 'B/s')}",
            (3, 3 * bandwidth),
            xytext=(-8, 4),
            textcoords="offset points",
            fontsize=8,
            ha="right",
        )
        roof.set_yscale("log")
        roof.set_xscale("log")
        roof.set_xlim(x_low, x_high)
        roof.set_ylim(x_low * bandwidth, peak * 2.5)
        roof.set_ylabel(f"attainable rate, {unit}/s")
        rate_ticks(roof.yaxis)
        roof.set_title(f"{device.title}, {precision}, batch {batch_size}, maps of {size}x{size}")
        lines.set_yticks(range(len(_COLOURS)), list(_COLOURS))
        lines.set_ylim(len(_COLOURS) - 0.5, -0.75)
        lines.grid(visible=False, axis="y")
        lines.set_xlabel(f"arithmetic intensity, {unit} per byte")
        plain_ticks(lines.xaxis)
        caption(
            figure,
            f"Figures above the dots: channels, as many out as in. Left of the dotted ridge ({ridge:.3g} {unit}/B) a "
            "convolution waits for memory. A wider kernel multiplies the work and not the bytes; more channels do the "
            "same, until the weights outweigh the maps. A depthwise convolution does 9 products a value whatever its "
            "width, and no width makes it use the machine.",
        )
    return figure


def draw_convolution_shares(device: Device, *, precision: str = "int8", batch_sizes: Sequence[int] = (1, 32)) -> Figure:
    """Share of the peak by channels and map size, a panel for each kind and batch."""
    peak, unit = device.peak_flops_per_s(precision), parse_precision(precision).operation
    colours = LinearSegmentedColormap.from_list("share", [LIGHT["paper"], LIGHT["sky"], LIGHT["blue"]])
    with styled():
        figure = Figure(figsize=(12.4, 2.5 * len(batch_sizes) + 1.0), layout="constrained")
        panels = figure.subplots(nrows=len(batch_sizes), ncols=len(KERNELS), squeeze=False, sharex=True, sharey=True)
        for line, batch_size in zip(panels, batch_sizes, strict=True):
            for axes, kernel in zip(line, KERNELS, strict=True):
                shares = [
                    [
                        (row.attainable_flops_per_s or 0.0) / peak
                        for row in convolution_rows(
                            kernel, device=device, precision=precision, batch_size=batch_size, size=size
                        )
                    ]
                    for size in SIZES
                ]
                _heat(axes, shares, colours)
                axes.set_title(f"{kernel}, batch {batch_size}", fontsize=9)
            line[0].set_ylabel("height and width of the map")
        for axes in panels[-1]:
            axes.set_xlabel("channels")
        caption(
            figure,
            f"Per cent of {device.title}'s {precision} peak ({quantity(peak, unit + '/s')}) that the roofs allow, for "
            "convolutions with as many channels out as in. 100 = bound by compute. At batch 1, small maps are weights "
            "that are read and hardly used; a batch amortizes them. Depthwise convolutions stay at a few per cent.",
        )
    return figure


def draw_blocks(
    networks: Mapping[str, Sequence[Block]], *, input_size: int, device_title: str, precision: str, note: str = ""
) -> Figure:
    """Receptive fields against the cost so far, block by block.

    Args:
        networks: blocks in order.
        input_size: pixels, where fields are cut.
        device_title: of the bound.
        precision: likewise.
        note: on what the effective fields were measured; ends the caption.
    """
    with styled():
        figure = Figure(figsize=(10.4, 4.9), layout="constrained")
        panels = figure.subplots(ncols=2, sharey=True)
        for colour, (name, blocks) in zip(_SERIES, networks.items(), strict=False):
            can_see = [min(b.receptive_field, float(input_size)) for b in blocks]
            sees = [b.effective_field for b in blocks]
            for axes, costs in zip(
                panels, ([b.flops / 1e9 for b in blocks], [b.least_time_ms * 1e3 for b in blocks]), strict=True
            ):
                spent = [sum(costs[: i + 1]) for i in range(len(costs))]
                axes.plot(spent, can_see, color=LIGHT[colour], linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.75)
                axes.plot(spent, sees, color=LIGHT[colour], marker="o", markersize=4.5, linewidth=1.3, label=name)
        for axes in panels:
            axes.axhline(input_size, color=LIGHT["muted"], linestyle=":", linewidth=1.0)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_yticks(_powers(input_size), [str(width) for width in _powers(input_size)])
            for axis in (axes.xaxis, axes.yaxis):
                plain_ticks(axis)
        panels[0].annotate(
            f"image, {input_size} px",
            (0.01, input_size),
            xycoords=("axes fraction", "data"),
            xytext=(2, 3),
            textcoords="offset points",
            fontsize=8,
            color=LIGHT["muted"],
        )
        panels[0].set_ylabel("receptive field within the image, px")
        panels[0].set_xlabel("work so far, Gflop an image")
        panels[1].set_xlabel(f"least time so far, µs an image ({device_title}, {precision})")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(networks), fontsize=8.5
        )
        caption(
            figure,
            "A dot is the end of a block: how much of the image a unit does see (the side of the square that holds its "
            "effective field), and what has been spent by then; dashed, what it could see at most. Up and to the left "
            "is better: far sight for little. Where the line of a trained network runs flat, blocks buy no wider "
            "sight: candidates for thinning out. A network that lies further right in the right panel than in the "
            f"left one, among the others, uses the machine badly.{f' {note}' if note else ''}",
        )
    return figure


def _powers(top: int) -> list[int]:
    return [2**power for power in range(2, top.bit_length()) if 2**power < top]


def _workload(operations: tuple[Operation, ...], batch_size: int) -> Workload:
    return Workload(
        model="convolutions", input_shapes=((batch_size,),), batch_size=batch_size, fused=True, operations=operations
    )


def _label_channels(axes: Axes, x: Sequence[float], level: int) -> None:
    groups: list[list[int]] = []
    for index, value in enumerate(x):
        if groups and value < x[groups[-1][0]] * 1.28:
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        first, last = CHANNELS[group[0]], CHANNELS[group[-1]]
        axes.annotate(
            str(first) if first == last else f"{first} to {last}",
            (x[group[0]], level),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=7.5,
            ha="center",
            bbox={"boxstyle": "square,pad=0.05", "facecolor": LIGHT["paper"], "edgecolor": "none"},
        )


def _name_roof(axes: Axes, y: float, text: str) -> None:
    axes.annotate(
        text,
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        va="center",
        weight="bold",
    )


def _heat(axes: Axes, shares: Sequence[Sequence[float]], colours: LinearSegmentedColormap) -> None:
    axes.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(CHANNELS)), [str(c) for c in CHANNELS], fontsize=7.5)
    axes.set_yticks(range(len(SIZES)), [str(s) for s in SIZES])
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            colour = LIGHT["paper"] if share > 0.6 else LIGHT["ink"]
            text = f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
