"""Random shift, rotation, zoom and mirror of images, vectorized over the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

DRAWS = 5
"""Random numbers for one movement."""


@dataclass(frozen=True, kw_only=True)
class Movement:
    """The largest movement of an image.

    Attributes:
        shift, zoom: as shares of the side.
        flip: mirror every second image left to right.
    """

    shift: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def matrices(self, draws: Tensor, image_size: int) -> Tensor:
        """Return (N, 2, 3) float64 maps from output to input coordinates, -1 to 1 (x, y), from (N, 5) draws of [0, 1).

        Without rotation and zoom the shift is a whole number of pixels.
        """
        signed = draws * 2 - 1
        shift = signed[:, :2] * (2 * self.shift)
        if not self.degrees and not self.zoom:
            shift = (shift * image_size / 2).round() * 2 / image_size
        angle = signed[:, 2] * math.radians(self.degrees)
        scale = 1 / (1 + signed[:, 3] * self.zoom)
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(scale)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        rows = torch.stack((cos * mirror, -sin, shift[:, 0], sin * mirror, cos, shift[:, 1]), dim=1)
        return rows.view(-1, 2, 3)


def affine_grid(matrices: Tensor, image_size: int) -> Tensor:
    """Return the input position of each output pixel, (N, S, S, 2), for (N, 2, 3) float32 maps.

    As torch's `affine_grid` with align_corners=False, without its matrix product in TF32.
    """
    at = (torch.arange(image_size, device=matrices.device, dtype=torch.float32) * 2 + 1) / image_size - 1
    by_row = at[None, :, None, None] * matrices[:, None, None, :, 1] + matrices[:, None, None, :, 2]
    return by_row + at[None, None, :, None] * matrices[:, None, None, :, 0]


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample (N, C, S, S) images bilinearly; pixels from outside are black."""
    grid = affine_grid(matrices.float().to(images.device), images.shape[-1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
