"""Teaching pictures: which convolutions can use a device fully, and how far blocks of networks look for their time."""

from __future__ import annotations

from dataclasses import replace

import torch
import torchvision
from torch import Tensor, nn

from analysis.common.study import study_parser
from compress.graph.trace import trace
from compress.plots.roofline import (
    Block,
    block_of,
    draw_blocks,
    draw_convolution_shares,
    draw_convolutions,
    network_blocks,
)
from compress.plots.style import save_figure
from compress.receptive import receptive_field
from compress.receptive.effective import effective_receptive_fields, photograph_crops
from compress.receptive.probe import grids
from compress.roofline_model import find_device, roofline_of
from compress.roofline_model.counting import count

NETWORKS = {"resnet50": 2, "vgg16": 2, "mobilenet_v2": 2, "convnext_tiny": 3, "vit_b_16": 3}
"""torchvision name -> number of parts of a module's path that name a block."""


def blocks(
    network: str, depth: int, *, device: str, precision: str, batch_size: int, image: int, images: int
) -> tuple[Block, ...]:
    """Return the blocks of a network with their bounds, theoretical fields, and effective fields of fresh weights."""
    torch.manual_seed(0)
    model, x = getattr(torchvision.models, network)(weights=None).eval(), torch.randn(1, 3, image, image)
    effective = effective_fields(model, photograph_crops(images, (image, image)), depth)
    fields = {row.name: float(row.size[0]) for row in receptive_field(model, x) if row.size and row.size[0] is not None}
    work = replace(count(trace(model, x), x, fused=True).with_batch(batch_size), model=network)
    return network_blocks(roofline_of(work, device=device, precision=precision), fields, effective, depth=depth)


def effective_fields(model: nn.Module, images: Tensor, depth: int) -> dict[str, float]:
    """Return the side of the effective field, pixels, at the last tensor of each block whose units lie on a grid."""
    last = {}
    for row in grids(receptive_field(model, images[:1]), images[:1]):
        scope = max(row.scopes, key=len, default="")
        if scope:
            last[block_of(scope, depth)] = row.name
    found = effective_receptive_fields(model, images, layers=list(last.values()))
    return {block: field.metrics.size for block, field in zip(last, found, strict=True)}


def main() -> None:
    """Draw the three pictures."""
    parser = study_parser(__doc__, out="results/roofline")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--images", type=int, default=2, help="number of images of the effective fields")
    a = parser.parse_args()
    device = find_device(a.device)
    figure = draw_convolutions(device, precision=a.precision, batch_size=a.batch)
    save_figure(figure, a.out / f"convolutions_{a.device}.png")
    save_figure(draw_convolution_shares(device, precision=a.precision), a.out / f"shares_{a.device}.png")
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
