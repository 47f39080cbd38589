"""Depth from one image as a task of one's own (recipes/depth.yaml): balls on a plane that a tilted camera sees.

The network returns the logarithm of the distance in metres at each pixel. Every ball has the same radius, so that its
size tells how far it is, and a plane's distance follows from the horizon. Data of one's own: images (3, H, W) and
their distances (H, W).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.drawn import Pairs, Ratios, block, splits

SIDE, FARTHEST, RADIUS, BALLS = 64, 20.0, 0.5, 6
"""Pixels of a side; metres: the largest distance, and a ball's radius."""


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 64, 64) uint8 and distances (count, 64, 64) in metres along the ray of each pixel."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    at = 0.7 * ((torch.arange(SIDE) + 0.5) / SIDE * 2 - 1)
    down, right = torch.meshgrid(at, at, indexing="ij")
    tilt, height = 0.35 * drawn(1, 1), 1 + drawn(1, 1)
    rays = torch.stack([right.expand(count, -1, -1), down + tilt, torch.ones(count, SIDE, SIDE)], -1)
    rays = F.normalize(rays, dim=-1)
    distance = height / rays[..., 1].clamp_min(1e-3)  # of the plane, which is `height` below the camera
    tile = (rays * distance[..., None])[..., ::2].div(1 + drawn(1, 1, 1)).floor().sum(-1) % 2
    plane, sky, light = drawn(1, 1, 3), drawn(1, 1, 3), F.normalize(drawn(3) * torch.tensor([2.0, -2, -2]) - 0.5, dim=1)
    colour = plane * (0.6 + 0.4 * tile[..., None])
    for _ in range(BALLS):
        along = torch.cat([8 * drawn(1) - 4, height[:, 0] - RADIUS, 2 + 8 * drawn(1)], 1)[:, None, None]
        nearest = (rays * along).sum(-1)
        depth = RADIUS**2 - along.square().sum(-1) + nearest**2  # squared half of the chord
        entry = nearest - depth.clamp_min(0).sqrt()
        seen = (depth > 0) & (entry < distance)
        normal = (rays * entry[..., None] - along) / RADIUS
        bright = 0.3 + 0.7 * (normal * light[:, None, None]).sum(-1, keepdim=True).clamp_min(0)
        colour = torch.where(seen[..., None], drawn(1, 1, 3) * bright, colour)
        distance = torch.where(seen, entry, distance)
    far = (distance / FARTHEST).clamp(max=1)[..., None]
    colour = torch.lerp(colour, sky.expand_as(colour), far**2) + 0.03 * torch.randn(colour.shape, generator=generator)
    return (255 * colour.clamp(0, 1)).byte().movedim(-1, 1), distance.clamp(max=FARTHEST)


def data(spec: Any) -> tuple[Pairs, Pairs]:
    """Return training and evaluation examples; `spec` is the recipe's section `data`."""
    return splits(scenes, spec.train_images or 1024, spec.val_images or 256)


class Depth(nn.Module):
    """A U-Net: the decoder upsamples by two and concatenates the encoder's features (Ronneberger et al., 1505.04597).

    Args:
        width: channels of the first stage.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sides = [width, 2 * width, 4 * width, 8 * width]
        self.stem = block(3, width)
        self.down = nn.ModuleList(block(inputs, outputs, 2) for inputs, outputs in pairwise(sides))
        self.up = nn.ModuleList(block(inputs + outputs, outputs) for inputs, outputs in pairwise(sides[::-1]))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithm of the distances (N, 1, H, W)."""
        seen = [self.stem(images)]
        for stage in self.down:
            seen.append(stage(seen[-1]))
        x = seen.pop()
        for stage in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = stage(torch.cat([x, seen.pop()], 1))
        return self.last(x)


def loss(logs: Tensor, distances: Tensor) -> Tensor:
    """Return the mean absolute difference of logarithms."""
    return F.l1_loss(logs[:, 0].float(), distances.to(logs.device).log())


class Rmse(Ratios):
    """Root of the mean squared error in metres, of all pixels."""

    name, unit, direction = "rmse", "m", "lower"

    def parts(self, logs: Tensor, distances: Tensor) -> Tensor:
        """Return the sum of squared errors and the number of pixels of each image."""
        errors = (logs[:, 0].double().exp() - distances.to(logs.device)).square().flatten(1)
        return torch.stack([errors.sum(1), torch.full_like(errors[:, 0], errors.shape[1])], 1)[..., None]

    def values(self, weights: Any) -> Any:
        """Return the error (R,) of images that count as often as `weights` say."""
        return super().values(weights) ** 0.5
