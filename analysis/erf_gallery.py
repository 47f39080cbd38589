"""Networks side by side: how their fields grow layer by layer, theoretical beside effective.

    python analysis/erf_gallery.py                       # all sets
    python analysis/erf_gallery.py --set resnets --images 8
    python analysis/erf_gallery.py --models resnet50 timm:convnext_tiny --name mine

Writes gallery_SET.png (maps), growth_SET.png (sizes), gallery_SET.json (numbers) and gallery_SET.gif (as the layers go
deeper) into --out. Networks are fresh unless --weights DEFAULT is given and the weights are at hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from compress.files import replacing, write_json
from compress.models import ModelSpec, build_model
from compress.receptive_field import EffectiveReceptiveField, ErfOptions, effective_receptive_fields
from compress.receptive_field.images import SOURCES, probe_images
from compress.receptive_field.layers import layers_to_show
from compress.report.erf import numbers_of, write_animation
from compress.report.erf_figures import draw_gallery, draw_growth
from compress.report.style import styled, to_png

SETS = {
    "resnets": ("resnet18", "resnet34", "resnet50", "resnet101"),
    "vggs": ("vgg11_bn", "vgg16_bn", "vgg19_bn"),
    "families": ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "regnet_y_400mf"),
    "transformers": ("resnet50", "convnext_tiny", "vit_b_16", "swin_t"),
}


def fields_of(
    name: str, weights: str | None, size: int, images: int, count: int, source: str
) -> tuple[EffectiveReceptiveField, ...]:
    """The fields of `count` layers of a network, from first to last."""
    torch.manual_seed(0)
    model = build_model(ModelSpec(name=name, weights=weights), num_classes=1000)
    batch = probe_images(source, images, (size, size))
    layers = layers_to_show(model, batch[:1], count=count)
    return effective_receptive_fields(model, batch, layers=layers, options=ErfOptions(batch_size=4))


def draw(name: str, rows: list[tuple[str, tuple[EffectiveReceptiveField, ...]]], out: Path, how: str) -> None:
    """Write the pictures and numbers of one set."""
    text = (
        f"Each row is a network, each picture the central unit of a layer, from early to late ({how}). The dashed box "
        "is the theoretical field without global operations, cut at the image: see how little of it is bright, and in "
        "which networks it stays a square of one patch."
    )
    _png(out / f"gallery_{name}.png", draw_gallery(rows, text=text))
    text = (
        f"Side of the effective field (pixels above 4.55 % of the largest) of layers from first to last ({how}). The "
        "theoretical field outgrows the image early; the effective one is cut off by the image where it nears its side."
    )
    _png(out / f"growth_{name}.png", draw_growth(rows, image_side=rows[0][1][0].heat.shape[0], text=text))
    write_json(out / f"gallery_{name}.json", {model: [numbers_of(f) for f in fields] for model, fields in rows})
    depth = max(len(fields) for _, fields in rows)
    frames = []
    for step in range(depth):
        shown = [(model, [fields[min(step, len(fields) - 1)]]) for model, fields in rows]
        with styled():
            frames.append(to_png(draw_gallery([(name, [f for _, (f,) in shown])]), dpi=90))
    print(write_animation(out / f"gallery_{name}.gif", frames))


def _png(path: Path, figure: object) -> None:
    with styled(), replacing(path) as temporary:
        temporary.write_bytes(to_png(figure, dpi=120))  # type: ignore[arg-type]
    print(path)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SETS), default=None)
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--name", default="mine", help="of the set that --models makes")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--source", choices=SOURCES, default="photographs")
    parser.add_argument("--out", type=Path, default=Path("results/receptive_field"))
    a = parser.parse_args()
    sets = {a.name: tuple(a.models)} if a.models else SETS if a.set is None else {a.set: SETS[a.set]}
    how = f"{a.images} {a.source} of {a.image_size} px, {'weights ' + a.weights if a.weights else 'fresh weights'}"
    for name, models in sets.items():
        rows = [(m, fields_of(m, a.weights, a.image_size, a.images, a.count, a.source)) for m in models]
        draw(name, rows, a.out, how)


if __name__ == "__main__":
    main()
