"""The outlines of `shapes` as signed distances, and the patterns that fill them.

Distances are negative inside; x to the right, y down, from -EXTENT to EXTENT.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from compress.data.counter import uniform

EXTENT = 1.3
BANK_SIZE = 96
OUTLINES = ("circle", "triangle", "square", "star", "cross", "heart", "crescent", "ring", "arrow", "bow tie")
BLOBS = 8
"""Number of rounded lumps, which are clutter."""

_BLOB_SEED = 5

Point = tuple[float, float]


@functools.lru_cache(maxsize=1)
def outline_bank() -> Tensor:
    """Return the signed distances of all outlines, then of all blobs: (10 + 8, 96, 96) float32."""
    at = bank_coordinates()
    return torch.stack([*(_DISTANCES[name](at) for name in OUTLINES), *blobs(at)]).float()


def bank_coordinates() -> Tensor:
    """Pixel centres, (96, 96, 2) as (x, y), float64."""
    line = ((torch.arange(BANK_SIZE, dtype=torch.float64) * 2 + 1) / BANK_SIZE - 1) * EXTENT
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((x, y), dim=-1)


def polygon(at: Tensor, corners: list[Point]) -> Tensor:
    """Distance of points (..., 2) to the nearest edge, negative inside (even-odd rule)."""
    nearest = torch.full(at.shape[:-1], math.inf, dtype=at.dtype)
    inside = torch.zeros(at.shape[:-1], dtype=torch.bool)
    x, y = at.unbind(-1)
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        dx, dy = x1 - x0, y1 - y0
        along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(x - x0 - along * dx, y - y0 - along * dy))
        if dy:
            crosses = ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * dx / dy)
            inside ^= crosses
    return torch.where(inside, -nearest, nearest)


def disc(at: Tensor, centre: Point, radius: float) -> Tensor:
    """Return the signed distance to a disc."""
    return (at - at.new_tensor(centre)).norm(dim=-1) - radius


def blobs(at: Tensor) -> list[Tensor]:
    """Lumps whose radius varies in three random waves."""
    angle, radius = torch.atan2(at[..., 1], at[..., 0]), at.norm(dim=-1)
    lumps = []
    for draws in uniform(_BLOB_SEED, torch.arange(BLOBS), 6).tolist():
        edge = torch.full_like(angle, 0.78)
        for wave, (height, phase) in enumerate(zip(draws[::2], draws[1::2], strict=True), start=2):
            edge += (0.08 + 0.1 * height) * torch.cos(wave * angle + 2 * math.pi * phase)
        lumps.append(radius - edge)
    return lumps


def _around(radii: list[float], *, start: float = -90.0) -> list[Point]:
    """Corners at equal angles, from `start` degrees."""
    angles = [math.radians(start + 360 * i / len(radii)) for i in range(len(radii))]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _cross(at: Tensor) -> Tensor:
    a, b = 0.32, 1.0
    return polygon(
        at, [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
    )


def _heart(at: Tensor) -> Tensor:
    lobes = torch.minimum(disc(at, (-0.46, -0.32), 0.54), disc(at, (0.46, -0.32), 0.54))
    return torch.minimum(lobes, polygon(at, [(-0.87, 0.03), (0.0, -0.45), (0.87, 0.03), (0.0, 1.02)]))


def _crescent(at: Tensor) -> Tensor:
    return torch.maximum(disc(at, (0.12, 0.0), 1.0), -disc(at, (0.62, 0.0), 0.85))


def _arrow(at: Tensor) -> Tensor:
    return polygon(at, [(-1.05, -0.26), (0.0, -0.26), (0.0, -0.8), (1.05, 0.0), (0.0, 0.8), (0.0, 0.26), (-1.05, 0.26)])


_DISTANCES = {
    "circle": lambda at: disc(at, (0.0, 0.0), 0.9),
    "triangle": lambda at: polygon(at, _around([1.15] * 3)),
    "square": lambda at: polygon(at, _around([1.1] * 4, start=-45.0)),
    "star": lambda at: polygon(at, _around([1.15, 0.48] * 5)),
    "cross": _cross,
    "heart": _heart,
    "crescent": _crescent,
    "ring": lambda at: (disc(at, (0.0, 0.0), 0.72)).abs() - 0.27,
    "arrow": _arrow,
    "bow tie": lambda at: polygon(at, [(-1.0, -0.8), (0.0, -0.12), (1.0, -0.8), (1.0, 0.8), (0.0, 0.12), (-1.0, 0.8)]),
}


PATTERNS = ("stripes", "checks", "dots", "circles", "waves")
VERSIONS = 8

_SEED = 7
_SPACING = (0.42, 0.62)
_SHARPNESS = 3.0


@functools.lru_cache(maxsize=1)
def pattern_bank() -> Tensor:
    """Return every version of every pattern, grouped by pattern: (5 * 8, 96, 96) float32."""
    at = bank_coordinates()
    draws = uniform(_SEED, torch.arange(len(PATTERNS) * VERSIONS), 4).tolist()
    return torch.stack([_draw(PATTERNS[i // VERSIONS], at, *row) for i, row in enumerate(draws)]).float()


def _draw(pattern: str, at: Tensor, spacing: float, direction: float, phase_x: float, phase_y: float) -> Tensor:
    """The last four arguments are of [0, 1)."""
    wave = 2 * math.pi / (_SPACING[0] + spacing * (_SPACING[1] - _SPACING[0]))
    cos, sin = math.cos(2 * math.pi * direction), math.sin(2 * math.pi * direction)
    u = (at[..., 0] * cos + at[..., 1] * sin) * wave + 2 * math.pi * phase_x
    v = (at[..., 1] * cos - at[..., 0] * sin) * wave + 2 * math.pi * phase_y
    return _edge(_WAVES[pattern](u, v, at.norm(dim=-1) * wave + 2 * math.pi * phase_x))


def _edge(wave: Tensor) -> Tensor:
    """-1..1 to 0..1 with steep, smooth edges."""
    return torch.sigmoid(_SHARPNESS * 2 * wave)


_WAVES = {
    "stripes": lambda u, v, r: u.sin(),
    "checks": lambda u, v, r: 2 * (u / 2).sin() * (v / 2).sin(),
    "dots": lambda u, v, r: u.sin() + v.sin() - 0.7,
    "circles": lambda u, v, r: r.sin(),
    "waves": lambda u, v, r: (u + 1.8 * (v * 0.6).sin()).sin(),
}
