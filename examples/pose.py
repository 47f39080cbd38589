"""A pose by heatmaps as a task of one's own (recipes/pose.yaml): shoulder, elbow and hand of drawn arms.

The network returns a heatmap for each joint at a quarter of the image's resolution (Xiao et al., arXiv 1804.06208); a
joint is the centre of mass around the highest value. Targets are the joints (N, 3, 2), x and y in pixels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.drawn import Pairs, Ratios, splits

SIDE, STRIDE, JOINTS = 64, 4, ("shoulder", "elbow", "hand")


def arms(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 64, 64), 0 to 1, of an arm in noise, and its joints (count, 3, 2)."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, 12, generator=generator)
    angles, lengths = draws[:, :2] * 2 * torch.pi, 10 + 8 * draws[:, 2:4]
    steps = lengths[..., None] * torch.stack([angles.cos(), angles.sin()], -1)
    joints = torch.cat([16 + 32 * draws[:, None, 4:6], steps], 1).cumsum(1).clamp(2, SIDE - 3)
    images = 0.4 + 0.25 * torch.rand(count, 3, SIDE, SIDE, generator=generator)
    for number, (start, end) in enumerate(pairwise(joints.unbind(1))):
        cover = (4.0 - number - distances(start, end)).clamp(0, 1)[:, None]
        colours = draws[:, 6 + 3 * number : 9 + 3 * number, None, None]
        images = torch.lerp(images, colours.expand_as(images), cover)
    return images, joints


def distances(start: Tensor, end: Tensor) -> Tensor:
    """Return the distance (N, SIDE, SIDE) of each pixel to the segments between points (N, 2)."""
    y, x = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    along, from_start = (end - start)[:, None, None], torch.stack([x, y], -1) - start[:, None, None]
    share = (from_start * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp_min(1e-6)
    return (from_start - share.clamp(0, 1) * along).norm(dim=-1)


def data(spec: Any) -> tuple[Pairs, Pairs]:
    """Return training and evaluation examples; `spec` is the recipe's section `data`."""
    return splits(arms, spec.train_images or 1024, spec.val_images or 256)


class Pose(nn.Module):
    """Three strided blocks, then transposed convolutions back to a quarter of the resolution.

    Args:
        width: channels of the first block.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sides = [3, width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sides):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        for inputs, outputs in ((8 * width, 4 * width), (4 * width, 4 * width)):
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features, self.heatmaps = nn.Sequential(*layers), nn.Conv2d(4 * width, len(JOINTS), 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return heatmaps (N, 3, H / 4, W / 4)."""
        return self.heatmaps(self.features(images))


def wanted(joints: Tensor, height: int, width: int) -> Tensor:
    """Return heatmaps (N, 3, height, width) of joints (N, 3, 2): Gaussians of one cell around them."""
    y, x = torch.arange(height, device=joints.device), torch.arange(width, device=joints.device)
    across, down = ((joints / STRIDE).unsqueeze(-1) - 0.375).unbind(2)  # of 4 pixels the mean is 1.5
    return torch.exp(-((x - across) ** 2) / 2)[:, :, None] * torch.exp(-((y - down) ** 2) / 2)[..., None]


def loss(heatmaps: Tensor, joints: Tensor) -> Tensor:
    """Return the mean squared difference to the heatmaps that are wanted, in hundredths of their mean square."""
    return 100 * F.mse_loss(heatmaps.float(), wanted(joints.to(heatmaps.device), *heatmaps.shape[2:]))


def located(heatmaps: Tensor) -> Tensor:
    """Return joints (N, 3, 2): the centre of mass of the 3 x 3 cells around the highest value of each heatmap."""
    height, width = heatmaps.shape[2:]
    flat = heatmaps.float().clamp_min(0)
    best = flat.flatten(2).argmax(2)
    y, x = torch.arange(height, device=flat.device), torch.arange(width, device=flat.device)
    near = (y[:, None] - (best // width)[..., None, None]).abs().maximum(
        (x - (best % width)[..., None, None]).abs()
    ) <= 1
    mass = (flat * near).clamp_min(0) + 1e-9 * near
    centre = torch.stack([(mass.sum(2) * x).sum(2), (mass.sum(3) * y).sum(2)], 2) / mass.sum((2, 3))[..., None]
    return (centre + 0.375) * STRIDE


class Pck(Ratios):
    """Share of the joints that are found within 3 pixels."""

    name, unit, direction = "pck", "%", "higher"

    def parts(self, heatmaps: Tensor, joints: Tensor) -> Tensor:
        """Return the joints that are found and all joints of each image."""
        found = (located(heatmaps) - joints.to(heatmaps.device)).norm(dim=-1) < 3
        return torch.stack([found.sum(1), torch.full_like(found.sum(1), len(JOINTS))], 1)[..., None]
