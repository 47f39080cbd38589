"""Teaching figures: which convolutions can use a device fully, and how far blocks of networks look for their time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torchvision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from analysis.common.study import option, study_options
from compress.graph.trace import trace
from compress.plots.roofline import rate_ticks
from compress.plots.style import LIGHT, caption, plain_ticks, save_figure, styled
from compress.receptive import receptive_field
from compress.receptive.effective import effective_receptive_fields, grids, photograph_crops
from compress.roofline_model import find_device
from compress.roofline_model.counting import Workload, convolution, count
from compress.roofline_model.devices import Device, parse_precision
from compress.roofline_model.model import Roofline, Row, roofline_of
from compress.roofline_model.tables import quantity

# torchvision name -> number of parts of a module's path that name a block.
NETWORKS = {"resnet50": 2, "vgg16": 2, "mobilenet_v2": 2, "convnext_tiny": 3, "vit_b_16": 3}


CHANNELS = (8, 16, 32, 64, 128, 256, 512, 1024)


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
    return ".".join(path.split(".")[:depth])


def convolution_rows(
    kernel: str, *, device: Device, precision: str, batch_size: int, size: int, channels: Sequence[int] = CHANNELS
) -> tuple[Row, ...]:
    side, depthwise = KERNELS[kernel]
    operations = tuple(
        convolution(channels=c, size=size, kernel=side, groups=c if depthwise else 1, batch_size=batch_size)
        for c in channels
    )
    shapes = ((batch_size,),)
    work = Workload(model="convolutions", input_shapes=shapes, batch_size=batch_size, fused=True, operations=operations)
    return roofline_of(work, device=device, precision=precision).rows


def draw_convolutions(device: Device, *, precision: str = "int8", batch_size: int = 32, size: int = 28) -> Figure:
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
        roof.annotate(
            f"{precision}\n{quantity(peak, unit + '/s')}",
            (1.0, peak),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
            weight="bold",
        )
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


def blocks(
    network: str, depth: int, *, device: str, precision: str, batch_size: int, image: int, images: int
) -> tuple[Block, ...]:
    torch.manual_seed(0)
    model, x = getattr(torchvision.models, network)(weights=None).eval(), torch.randn(1, 3, image, image)
    effective = effective_fields(model, photograph_crops(images, (image, image)), depth)
    fields = {row.name: float(row.size[0]) for row in receptive_field(model, x) if row.size and row.size[0] is not None}
    work = replace(count(trace(model, x), x, fused=True).with_batch(batch_size), model=network)
    return network_blocks(roofline_of(work, device=device, precision=precision), fields, effective, depth=depth)


def effective_fields(model: nn.Module, images: Tensor, depth: int) -> dict[str, float]:
    last = {}
    for row in grids(receptive_field(model, images[:1]), images[:1]):
        scope = max(row.scopes, key=len, default="")
        if scope:
            last[block_of(scope, depth)] = row.name
    found = effective_receptive_fields(model, images, layers=list(last.values()))
    return {block: field.metrics.size for block, field in zip(last, found, strict=True)}


def main() -> None:
    a = study_options(
        __doc__,
        option("--device", default="h200"),
        option("--precision", default="int8"),
        option("--batch", type=int, default=32),
        option("--image", type=int, default=224),
        option("--images", type=int, default=2, help="number of images of the effective fields"),
        out="results/roofline",
    )
    device = find_device(a.device)
    figure = draw_convolutions(device, precision=a.precision, batch_size=a.batch)
    save_figure(figure, a.out / f"convolutions_{a.device}.png")
    networks = {
        name: blocks(
            name, depth, device=a.device, precision=a.precision, batch_size=a.batch, image=a.image, images=a.images
        )
        for name, depth in NETWORKS.items()
    }
    note = (
        f"Effective fields are of fresh weights, on {a.images} crops of photographs: blocks of ConvNeXt and ViT begin "
        "near the identity and look at their own patch until they are trained."
    )
    figure = draw_blocks(networks, input_size=a.image, device_title=device.title, precision=a.precision, note=note)
    save_figure(figure, a.out / f"blocks_{a.device}.png")


if __name__ == "__main__":
    main()
