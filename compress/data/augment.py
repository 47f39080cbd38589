"""Random small movements of images, vectorized over the batch: shift, rotation, zoom and mirror in one resampling.

The movement of an image is a 2x3 matrix made from its own random numbers, so that it depends neither on the batch nor
on the device.
"""

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
        shift: shift along each axis, as a share of the side.
        zoom: enlargement or reduction, as a share.
        flip: mirror every second image left to right.
    """

    shift: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def matrices(self, draws: Tensor, image_size: int) -> Tensor:
        """Return the movements, from output to input coordinates, both from -1 to 1 (x, y).

        Without rotation and zoom the shift is a whole number of pixels, so that nothing is blurred.

        Args:
            draws: (N, 5) float64 of [0, 1).
            image_size: side in pixels.

        Returns:
            (N, 2, 3) float64.
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
    """Return the position in the input of each pixel of the output.

    As `torch.nn.functional.affine_grid` with align_corners=False, in plain multiplications: that one is a
    matrix product, which TF32 rounds to ten bits.

    Args:
        matrices: (N, 2, 3) float32.
        image_size: side of the output in pixels.

    Returns:
        (N, image_size, image_size, 2).
    """
    at = (torch.arange(image_size, device=matrices.device, dtype=torch.float32) * 2 + 1) / image_size - 1
    by_row = at[None, :, None, None] * matrices[:, None, None, :, 1] + matrices[:, None, None, :, 2]
    return by_row + at[None, None, :, None] * matrices[:, None, None, :, 0]


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample images (N, C, S, S), with values from 0 to 1, bilinearly; pixels from outside are black."""
    grid = affine_grid(matrices.float().to(images.device), images.shape[-1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
