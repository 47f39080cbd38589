"""Receptive fields of networks side by side, layer by layer: theoretical beside effective."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from analysis.common.study import option, study_options
from compress.files import write_json
from compress.models import ModelSpec
from compress.models.by_name import build_model
from compress.plots.erf import HEAT, draw_box
from compress.plots.style import caption, save_figure, styled, to_png
from compress.receptive import (
    EffectiveReceptiveField,
    ErfOptions,
    effective_receptive_fields,
)
from compress.receptive.effective import SOURCES, layers_to_show, probe_images
from compress.report.receptive_field import numbers_of, write_animation
from compress.support.text import shorten

SETS = {
    "resnets": ("resnet18", "resnet34", "resnet50", "resnet101"),
    "vggs": ("vgg11_bn", "vgg16_bn", "vgg19_bn"),
    "families": ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "regnet_y_400mf"),
}
Rows = list[tuple[str, tuple[EffectiveReceptiveField, ...]]]


def draw_gallery(
    rows: Sequence[tuple[str, Sequence[EffectiveReceptiveField]]], *, columns_of: Sequence[str] = (), text: str = ""
) -> Figure:
    """Models below one another, layers from left to right, logarithmic.

    Args:
        rows: (label, fields), as many fields each.
        columns_of: names of columns.
        text: what to see.
    """
    columns = max(len(fields) for _, fields in rows)
    with styled():
        side = min(2.1, 11.5 / columns)
        figure = Figure(figsize=(side * columns + 0.9, (side + 0.42) * len(rows) + 1.35), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.09)  # type: ignore[union-attr, call-arg]
        grid = figure.subplots(nrows=len(rows), ncols=columns, squeeze=False)
        scale = None
        for axes_row, (name, fields) in zip(grid, rows, strict=True):
            for axes in axes_row:
                axes.set_axis_off()
            for axes, field, named in zip(axes_row, fields, columns_of or [""] * columns, strict=False):
                scale = axes.imshow(field.normalized.clamp_min(1e-5).log10(), cmap=HEAT, vmin=-5, vmax=0)
                draw_box(axes, field, "white")
                side_of = f"side {field.metrics.size:.0f} px{_of_theory(field)}"
                axes.set_title(
                    "\n".join(filter(None, (shorten(named, 19), _layer(field.layer), side_of))),
                    fontsize=7.5,
                    weight="normal",
                    loc="left",
                )
            axes_row[0].text(
                -0.1,
                0.5,
                shorten(name, 24),
                rotation=90,
                transform=axes_row[0].transAxes,
                ha="right",
                va="center",
                fontsize=9,
                weight="bold",
            )
        if scale is not None:
            figure.colorbar(
                scale, ax=grid, location="bottom", shrink=0.4, aspect=40, label="log10 of the influence, largest = 0"
            )
        if text:
            caption(figure, text)
        return figure


def _layer(path: str) -> str:
    return shorten(".".join(path.split(".")[-2:]), 24)


def _of_theory(field: EffectiveReceptiveField) -> str:
    row = field.theoretical
    if row is None or row.status == "unknown":
        return ""
    if row.status == "global":
        return " of all"
    return f" of {row.local_size[0]}" if row.local_size and row.local_size[0] is not None else f" of {row.seen[0]}"


def theory_side(field: EffectiveReceptiveField) -> float:
    known = [side for side in field.theoretical.local_size if side] if field.theoretical else []
    return math.sqrt(math.prod(known)) if len(known) == 2 else math.nan


def fields_of(
    name: str, weights: str | None, size: int, images: int, count: int, source: str
) -> tuple[EffectiveReceptiveField, ...]:
    torch.manual_seed(0)
    model = build_model(ModelSpec(name=name, weights=weights), num_classes=1000)
    batch = probe_images(source, images, (size, size))
    layers = layers_to_show(model, batch[:1], count=count)
    return effective_receptive_fields(model, batch, layers=layers, options=ErfOptions(batch_size=4))


def draw(name: str, rows: Rows, out: Path, how: str) -> None:
    used = sorted(fields[-1].metrics.size / theory_side(fields[-1]) for _, fields in rows)
    share = f"In the last layer the effective side is {100 * used[0]:.0f} to {100 * used[-1]:.0f} % of the theoretical"
    text = (
        f"Each row is a network, each picture the central unit of a layer, from early to late ({how}). The dashed box "
        f"is the theoretical field without global operations, cut at the image. {share} one."
    )
    print(save_figure(draw_gallery(rows, text=text), out / f"gallery_{name}.png"))
    write_json(out / f"gallery_{name}.json", {model: [numbers_of(f) for f in fields] for model, fields in rows})
    frames = []
    for step in range(max(len(fields) for _, fields in rows)):
        with styled():
            fields = [f[min(step, len(f) - 1)] for _, f in rows]
            frames.append(to_png(draw_gallery([("", fields)], columns_of=[model for model, _ in rows]), dpi=90))
    print(write_animation(out / f"gallery_{name}.gif", frames))


def main() -> None:
    a = study_options(
        __doc__,
        option("--set", choices=sorted(SETS), default=None),
        option("--models", nargs="+", default=None, help="networks of a set of your own"),
        option("--name", default="mine", help="name of the set that --models makes"),
        option("--weights", default=None, help="such as DEFAULT; fresh weights where it is not given"),
        option("--image-size", type=int, default=224),
        option("--images", type=int, default=8),
        option("--count", type=int, default=8, help="number of layers"),
        option("--source", choices=SOURCES, default="photographs"),
        out="results/receptive_field",
    )
    sets = {a.name: tuple(a.models)} if a.models else SETS if a.set is None else {a.set: SETS[a.set]}
    how = f"{a.images} {a.source} of {a.image_size} px, {'weights ' + a.weights if a.weights else 'fresh weights'}"
    for name, models in sets.items():
        rows = [(m, fields_of(m, a.weights, a.image_size, a.images, a.count, a.source)) for m in models]
        draw(name, rows, a.out, how)


if __name__ == "__main__":
    main()
