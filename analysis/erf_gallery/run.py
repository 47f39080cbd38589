"""Receptive fields of networks side by side, layer by layer: theoretical beside effective."""

from __future__ import annotations

from pathlib import Path

import torch

from analysis.common.study import study_parser
from compress.files import write_json
from compress.models.by_name import build_model
from compress.models.spec import ModelSpec
from compress.plots.erf import draw_gallery, draw_growth, theory_side
from compress.plots.style import save_figure, styled, to_png
from compress.receptive import EffectiveReceptiveField, ErfOptions, effective_receptive_fields
from compress.receptive.effective import SOURCES, probe_images
from compress.receptive.probe import layers_to_show
from compress.report.receptive_field import numbers_of, write_animation

SETS = {
    "resnets": ("resnet18", "resnet34", "resnet50", "resnet101"),
    "vggs": ("vgg11_bn", "vgg16_bn", "vgg19_bn"),
    "families": ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "regnet_y_400mf"),
}
Rows = list[tuple[str, tuple[EffectiveReceptiveField, ...]]]


def fields_of(
    name: str, weights: str | None, size: int, images: int, count: int, source: str
) -> tuple[EffectiveReceptiveField, ...]:
    """Return the effective receptive fields of `count` layers of a network, from the first to the last."""
    torch.manual_seed(0)
    model = build_model(ModelSpec(name=name, weights=weights), num_classes=1000)
    batch = probe_images(source, images, (size, size))
    layers = layers_to_show(model, batch[:1], count=count)
    return effective_receptive_fields(model, batch, layers=layers, options=ErfOptions(batch_size=4))


def draw(name: str, rows: Rows, out: Path, how: str) -> None:
    """Write the pictures, the numbers and the animation of one set; `how` describes images and weights."""
    image_side = rows[0][1][0].heat.shape[0]
    used = sorted(fields[-1].metrics.size / theory_side(fields[-1]) for _, fields in rows)
    share = f"In the last layer the effective side is {100 * used[0]:.0f} to {100 * used[-1]:.0f} % of the theoretical"
    text = (
        f"Each row is a network, each picture the central unit of a layer, from early to late ({how}). The dashed box "
        f"is the theoretical field without global operations, cut at the image. {share} one."
    )
    print(save_figure(draw_gallery(rows, text=text), out / f"gallery_{name}.png"))
    wider = sum(theory_side(fields[-1]) > image_side for _, fields in rows)
    text = (
        f"Side of the effective field (pixels above 4.55 % of the largest) of layers from first to last ({how}). "
        f"{share} one; {wider} of {len(rows)} theoretical fields outgrow the image, which cuts the effective ones off."
    )
    growth = draw_growth(rows, image_side=image_side, text=text)
    print(save_figure(growth, out / f"growth_{name}.png"))
    write_json(out / f"gallery_{name}.json", {model: [numbers_of(f) for f in fields] for model, fields in rows})
    frames = []
    for step in range(max(len(fields) for _, fields in rows)):
        with styled():
            fields = [f[min(step, len(f) - 1)] for _, f in rows]
            frames.append(to_png(draw_gallery([("", fields)], columns_of=[model for model, _ in rows]), dpi=90))
    print(write_animation(out / f"gallery_{name}.gif", frames))


def main() -> None:
    """Compute and draw every set, or the one that is asked for."""
    parser = study_parser(__doc__, out="results/receptive_field")
    parser.add_argument("--set", choices=sorted(SETS), default=None)
    parser.add_argument("--models", nargs="+", default=None, help="networks of a set of your own")
    parser.add_argument("--name", default="mine", help="name of the set that --models makes")
    parser.add_argument("--weights", default=None, help="such as DEFAULT; fresh weights where it is not given")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--count", type=int, default=8, help="number of layers")
    parser.add_argument("--source", choices=SOURCES, default="photographs")
    a = parser.parse_args()
    sets = {a.name: tuple(a.models)} if a.models else SETS if a.set is None else {a.set: SETS[a.set]}
    how = f"{a.images} {a.source} of {a.image_size} px, {'weights ' + a.weights if a.weights else 'fresh weights'}"
    for name, models in sets.items():
        rows = [(m, fields_of(m, a.weights, a.image_size, a.images, a.count, a.source)) for m in models]
        draw(name, rows, a.out, how)


if __name__ == "__main__":
    main()
