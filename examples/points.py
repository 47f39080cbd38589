"""Points of a lidar to a map from above (recipes/points.yaml), as PointPillars does (Lang et al., arXiv 1812.05784).

A linear layer sees each point, a scatter keeps the largest result of each cell of the ground, and convolutions make
classes of the map. The scatter stays in floating point. An example is an image of one channel, of which each row is a
point (x, y, z in metres, reflectance 0 to 1); rows of zeros are none. Data of one's own: points (1, POINTS, 4), cut or
filled up to one number, and classes (CELLS, CELLS).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.drawn import Pairs, Ratios, block, splits

POINTS, CELLS, METRES = 1024, 32, 16.0
"""Points of an example, cells of the map's side, and the map's half side in metres."""
CLASSES = ("ground", "car", "person", "wall")
_SIZES = {"car": (4.0, 1.8, 1.5), "person": (0.8, 0.8, 1.8), "wall": (8.0, 0.5, 2.5)}


def scans(count: int, seed: int, objects: int = 9, each: int = 72) -> tuple[Tensor, Tensor]:
    """Return points (count, 1, POINTS, 4) and the class of each cell (count, CELLS, CELLS)."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    kinds = torch.randint(1, len(CLASSES), (count, objects), generator=generator)
    sides = torch.tensor([_SIZES[name] for name in CLASSES[1:]])[kinds - 1] * drawn(objects, 1, low=0.8, high=1.2)
    centres, angles = drawn(objects, 2, low=-14, high=14), drawn(objects, high=6.3)
    turn = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(count, objects, 2, 2)
    # points on the four walls and the roof of each object: one coordinate of three is at a side
    places = drawn(objects, each, 3, low=-0.5, high=0.5)
    face = torch.randint(3, (count, objects, each, 1), generator=generator)
    places = torch.where(torch.arange(3) == face, places.sign() / 2, places) * sides[:, :, None]
    heights = places[..., 2:] + sides[:, :, None, 2:] / 2
    flat = places[..., :2] @ turn.mT + centres[:, :, None]
    shine = drawn(objects, 1, 1).expand(-1, -1, each, -1)
    rest = POINTS - objects * each
    ground = torch.cat([drawn(rest, 2, low=-METRES, high=METRES), drawn(rest, 1, high=0.1), drawn(rest, 1)], 2)
    points = torch.cat([torch.cat([flat, heights, shine], -1).flatten(1, 2), ground], 1)
    points[..., :3] += 0.03 * torch.randn(points[..., :3].shape, generator=generator)
    kept = drawn(POINTS, 1) > 0.3 * drawn(1, 1)  # a share of the points is lost
    at = (torch.arange(CELLS) + 0.5) / CELLS * 2 * METRES - METRES
    cells = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)[:, :, None]
    grid = torch.zeros(count, CELLS, CELLS, dtype=torch.int64)
    for i in range(objects):
        apart = (cells[..., 0, :] - centres[:, i, None, None]) @ turn[:, i, None]
        inside = (apart.abs() <= sides[:, i, None, None, :2] / 2 + METRES / CELLS).all(-1)  # half a cell more
        grid = torch.where(inside, kinds[:, i, None, None], grid)
    return (points * kept)[:, None], grid


def data(spec: Any) -> tuple[Pairs, Pairs]:
    """Return training and evaluation examples; `spec` is the recipe's section `data`."""
    return splits(scans, spec.train_images or 1024, spec.val_images or 256)


class Pillars(nn.Module):
    """Points to features, features to the cells of the ground, and convolutions at two resolutions.

    Args:
        width: channels of a point.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(6, width, 1, bias=False), nn.BatchNorm1d(width), nn.ReLU())
        self.near, self.far = block(width, 2 * width), block(2 * width, 4 * width, 2)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.head = nn.Sequential(block(4 * width, 2 * width), nn.Conv2d(2 * width, len(CLASSES), 1))

    def forward(self, scans: Tensor) -> Tensor:
        """Return logits (N, classes, CELLS, CELLS)."""
        points = scans[:, 0].transpose(1, 2)
        places = (points[:, :2] + METRES) * (CELLS / (2 * METRES))
        cells = places.floor().clamp(0, CELLS - 1)
        features = self.points(torch.cat([points / METRES, places - cells - 0.5], 1))
        features = features * (points.abs().amax(1, keepdim=True) > 0).to(features.dtype)  # none at rows of zeros
        index = (cells[:, :1] * CELLS + cells[:, 1:]).long().expand(-1, features.shape[1], -1)
        empty = features.new_zeros(features.shape[0], features.shape[1], CELLS * CELLS)
        ground = empty.scatter_reduce(2, index, features, "amax").unflatten(2, (CELLS, CELLS))
        near = self.near(ground)
        return self.head(torch.cat([near, self.up(self.far(near))], 1))


def loss(logits: Tensor, grid: Tensor) -> Tensor:
    """Return the cross entropy of the cells."""
    return F.cross_entropy(logits.float(), grid.to(logits.device))


class Miou(Ratios):
    """Mean of intersection over union of the classes without the ground, of all cells."""

    name, unit, direction = "miou", "%", "higher"

    def parts(self, logits: Tensor, grid: Tensor) -> Tensor:
        """Return intersections and unions of each image and class."""
        kinds = torch.arange(1, len(CLASSES))
        found, truth = (cells.cpu().flatten(1)[..., None] == kinds for cells in (logits.argmax(1), grid))
        return torch.stack([(found & truth).sum(1), (found | truth).sum(1)], 1)
