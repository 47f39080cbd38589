"""Where one network looks: pictures, a page to pick the layer in, an animation, and the theoretical table.

    python analysis/erf.py --model resnet50
    python analysis/erf.py --model timm:swin_tiny_patch4_window7_224 --image-size 224 --images 16
    python analysis/erf.py --model vgg16 --weights vgg16.pth --layers features.9 features.30 --source noise
    python analysis/erf.py --model resnet50 --cost       # ms of the field against plain forward and backward passes

Any torchvision or timm name works, fresh or with weights. Writes erf.{png,html,json,gif} and
receptive_field.{png,csv,json} into --out/MODEL.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.models import ModelSpec, build_model
from compress.receptive_field import ErfOptions, effective_receptive_field
from compress.receptive_field.images import SOURCES, probe_images
from compress.report.erf import erf_report, receptive_field_report


def plain_passes(model: nn.Module, images: Tensor, batch_size: int) -> None:
    """Forward and backward of the whole model to the image, the cost that a field is compared with."""
    for batch in images.split(batch_size):
        x = batch.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)


def cost(model: nn.Module, images: Tensor, options: ErfOptions, *, rounds: int) -> None:
    """Print the ratio of a field's time to that of plain passes, measured in turn."""
    model.eval().requires_grad_(False)
    ratios = []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        plain_passes(model, images, options.batch_size)
        middle = time.perf_counter()
        effective_receptive_field(model, images, options=options)
        end = time.perf_counter()
        if turn:  # the first round warms up
            ratios.append((end - middle) / (middle - start))
            print(f"plain {middle - start:.2f} s, field {end - middle:.2f} s, ratio {ratios[-1]:.3f}")
    print(f"median ratio over {rounds} rounds, {len(images)} images: {statistics.median(ratios):.3f}")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--source", choices=SOURCES, default="photographs")
    parser.add_argument("--layers", nargs="+", default=None)
    parser.add_argument("--count", type=int, default=8, help="layers to show where --layers names none")
    parser.add_argument("--upstream", choices=("random", "ones"), default="random")
    parser.add_argument("--average", choices=("absolute", "positive", "rms", "signed"), default="absolute")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default=None)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/receptive_field"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(ModelSpec(name=arguments.model, weights=arguments.weights), num_classes=1000)
    images = probe_images(arguments.source, arguments.images, (arguments.image_size,) * 2)
    options = ErfOptions(
        upstream=arguments.upstream,
        average=arguments.average,
        batch_size=arguments.batch_size,
        device=arguments.device,
    )
    if arguments.cost:
        cost(model, images, options, rounds=arguments.rounds)
        return
    folder = arguments.out / arguments.model.replace(":", "_").replace("/", "_")
    start = time.perf_counter()
    report = erf_report(
        model, images, out=folder, name=arguments.model, layers=arguments.layers, count=arguments.count, options=options
    )
    table = receptive_field_report(model, images[:1], out=folder, name=arguments.model)
    for field in report.fields:
        print(f"{field.layer:32s} side {field.metrics.size:7.1f} px, half within {field.metrics.radius_50:6.1f} px")
    for path in (report.picture, report.page, report.animation, report.numbers, *table.paths):
        print(path)
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
