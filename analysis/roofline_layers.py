"""Teaching pictures: which convolutions can use a machine, and which networks look far while they do.

    python analysis/roofline_layers.py --device h200 --precision int8

Writes convolutions_DEVICE.png (1x1, 3x3, 5x5 and depthwise by channels under the roof), shares_DEVICE.png (share of the
peak by channels and map size, batch 1 and 32) and blocks_DEVICE.png (receptive field against work and against time).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torchvision

from compress.graph.trace import trace
from compress.receptive_field import receptive_field
from compress.report.roofline_figures import save_figure
from compress.report.roofline_teaching import (
    Block,
    draw_blocks,
    draw_convolution_shares,
    draw_convolutions,
    network_blocks,
)
from compress.roofline import find_device, place
from compress.roofline.counting import count

NETWORKS = {"resnet50": 2, "vgg16": 2, "mobilenet_v2": 2, "convnext_tiny": 3, "vit_b_16": 3}
"""torchvision name -> parts of a module's path that name a block."""


def blocks(network: str, depth: int, device: str, precision: str, batch_size: int, image: int) -> tuple[Block, ...]:
    """A network's blocks: bounds at a batch, receptive fields at an image size."""
    model, x = getattr(torchvision.models, network)(weights=None).eval(), torch.randn(1, 3, image, image)
    fields = {row.name: float(row.size[0]) for row in receptive_field(model, x) if row.size and row.size[0] is not None}
    work = replace(count(trace(model, x), x, fused=True).with_batch(batch_size), model=network)
    return network_blocks(place(work, device=device, precision=precision), fields, depth=depth)


def main() -> None:
    """Draw the three pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--out", type=Path, default=Path("results/roofline"))
    a = parser.parse_args()
    device = find_device(a.device)
    figure = draw_convolutions(device, precision=a.precision, batch_size=a.batch)
    save_figure(figure, a.out / f"convolutions_{a.device}.png")
    save_figure(draw_convolution_shares(device, precision=a.precision), a.out / f"shares_{a.device}.png")
    networks = {name: blocks(name, depth, a.device, a.precision, a.batch, a.image) for name, depth in NETWORKS.items()}
    figure = draw_blocks(networks, input_size=a.image, device_title=device.title, precision=a.precision)
    save_figure(figure, a.out / f"blocks_{a.device}.png")


if __name__ == "__main__":
    main()
