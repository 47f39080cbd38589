"""Patterns that fill outlines, 0 to 1, in several versions."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from compress.data.counter import uniform
from compress.data.shapes_outlines import bank_coordinates

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
