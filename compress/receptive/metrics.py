"""Sizes of an effective receptive field: pure functions of a map (height, width) of any scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

THRESHOLD = 1 - 0.9545
"""Luo et al.: a pixel counts if its influence is above 4.55 % of the centre's (two sigma contain 95.45 %)."""

SHARES = (0.2, 0.3, 0.5, 0.99)
"""Shares of the influence for which RepLKNet (arXiv 2203.06717, table 7) gives areas."""

_FIT_SIDE = 192  # limit of the rows and columns that a fit samples


@dataclass(frozen=True, kw_only=True)
class GaussianFit:
    """The axis-aligned Gaussian nearest to a map, by least squares; pixels.

    Attributes:
        sigma: standard deviation along (rows, columns).
        centre: (row, column).
        amplitude: its maximum over the map's largest value.
        r_squared: share of the map's variance that it explains.
    """

    sigma: tuple[float, float]
    centre: tuple[float, float]
    amplitude: float
    r_squared: float


@dataclass(frozen=True, kw_only=True)
class ErfMetrics:
    """Sizes of one effective receptive field, pixels.

    Attributes:
        count: pixels above `THRESHOLD` of the largest value.
        size: square root of the count (Luo et al.).
        radius_50, radius_95: radii around the unit's centre that contain half, and 95 %, of the influence.
        areas: for each of `SHARES`, the share of the image in the smallest square around the unit's centre that
            contains it (RepLKNet).
        theoretical_share: `size` over the theoretical side (geometric mean of the axes); None if that is not known.
    """

    count: int
    size: float
    gaussian: GaussianFit
    radius_50: float
    radius_95: float
    areas: tuple[float, ...]
    theoretical_share: float | None


def erf_metrics(
    heat: Tensor, centre: Sequence[float], *, theoretical: Sequence[int | None] | None = None
) -> ErfMetrics:
    """All sizes of a map with a positive sum; `centre` is the unit's (row, column)."""
    count = above_threshold(heat)
    known = [size for size in theoretical or () if size]
    share = math.sqrt(count) / math.sqrt(math.prod(known)) if len(known) == 2 else None
    return ErfMetrics(
        count=count,
        size=math.sqrt(count),
        gaussian=gaussian_fit(heat),
        radius_50=mass_radius(heat, 0.5, centre),
        radius_95=mass_radius(heat, 0.95, centre),
        areas=tuple(contribution_area(heat, share, centre) for share in SHARES),
        theoretical_share=share,
    )


def above_threshold(heat: Tensor, threshold: float = THRESHOLD) -> int:
    """The number of pixels above `threshold` times the largest value (Luo et al., section 3)."""
    return int((heat > threshold * heat.amax()).sum())


def second_moment(heat: Tensor) -> tuple[float, float]:
    """The standard deviation of the influence along (rows, columns), pixels, from its second moment."""
    found = []
    for axis in range(2):
        profile = heat.double().sum(1 - axis)
        position = torch.arange(len(profile), dtype=torch.float64, device=heat.device)
        mean = (profile * position).sum() / profile.sum()
        found.append(float(((profile * (position - mean) ** 2).sum() / profile.sum()).sqrt()))
    return found[0], found[1]


def gaussian_fit(heat: Tensor) -> GaussianFit:
    """Fit amplitude, centre and sigma by least squares, from the moments on, without an offset."""
    peak = float(heat.amax())
    image = (heat.detach().double().cpu() / peak).numpy()
    height, width = image.shape
    rows, columns = (torch.arange(0, n, max(1, n // _FIT_SIDE), dtype=torch.float64).numpy() for n in (height, width))
    sample = image[rows.astype(int)][:, columns.astype(int)]
    sigma = second_moment(heat)
    mass = image.sum()
    start = [
        1.0,
        float((image.sum(1) * range(height)).sum() / mass),
        float((image.sum(0) * range(width)).sum() / mass),
        max(sigma[0], 0.3),
        max(sigma[1], 0.3),
    ]

    def shape(p: Any) -> NDArray[np.float64]:
        vertical = (-0.5 * ((rows - p[1]) / p[3]) ** 2)[:, None]
        return p[0] * math.e ** (vertical + (-0.5 * ((columns - p[2]) / p[4]) ** 2)[None])

    limits = ([0.0, -height, -width, 0.05, 0.05], [10.0, 2.0 * height, 2.0 * width, 10.0 * height, 10.0 * width])
    found = least_squares(lambda p: (shape(p) - sample).ravel(), start, bounds=limits, max_nfev=60).x
    left = float(((shape(found) - sample) ** 2).sum())
    total = float(((sample - sample.mean()) ** 2).sum())
    return GaussianFit(
        sigma=(float(found[3]), float(found[4])),
        centre=(float(found[1]), float(found[2])),
        amplitude=float(found[0]),
        r_squared=1.0 - left / total if total > 0 else 1.0,
    )


def distances(shape: Sequence[int], centre: Sequence[float]) -> Tensor:
    """The distance of each pixel from `centre`, pixels, float64."""
    rows = torch.arange(shape[0], dtype=torch.float64) - centre[0]
    columns = torch.arange(shape[1], dtype=torch.float64) - centre[1]
    return (rows[:, None] ** 2 + columns[None] ** 2).sqrt()


def radial_profile(heat: Tensor, centre: Sequence[float], *, width: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return each ring's radius in pixels, and share of influence."""
    ring = (distances(heat.shape, centre) / width).long()
    mass = torch.zeros(int(ring.max()) + 1, dtype=torch.float64)
    mass.index_add_(0, ring.flatten(), heat.double().cpu().flatten())
    return (torch.arange(len(mass)) + 0.5) * width, mass / mass.sum()


def mass_radius(heat: Tensor, share: float, centre: Sequence[float]) -> float:
    """The radius of the smallest disc that contains `share`, pixels."""
    distance, order = distances(heat.shape, centre).flatten().sort()
    mass = heat.double().cpu().flatten()[order].cumsum(0)
    index = int(torch.searchsorted(mass, share * mass[-1] * (1 - 1e-12)))
    return float(distance[min(index, len(distance) - 1)])


def contribution_area(heat: Tensor, share: float, centre: Sequence[float] | None = None) -> float:
    """The share of the image in the smallest square that contains `share` (RepLKNet, table 7).

    Its side is odd, its centre the pixel nearest to `centre` (None: the image's middle).
    """
    height, width = heat.shape
    row, column = (height // 2, width // 2) if centre is None else (round(centre[0]), round(centre[1]))
    table = torch.zeros(height + 1, width + 1, dtype=torch.float64)
    table[1:, 1:] = heat.double().cpu().cumsum(0).cumsum(1)
    total = float(table[-1, -1])
    for reach in range(max(height, width)):
        top, bottom = max(0, row - reach), min(height, row + reach + 1)
        left, right = max(0, column - reach), min(width, column + reach + 1)
        inside = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
        if float(inside) >= share * total * (1 - 1e-12):
            return (bottom - top) * (right - left) / (height * width)
    return 1.0


def uniform_profile(layers: int, kernel: int) -> Tensor:
    """The influence, of sum 1, of equal linear convolutions along one axis (Luo et al., section 2.2)."""
    profile = torch.ones(1, dtype=torch.float64)
    for _ in range(layers):
        padded = torch.nn.functional.pad(profile, (kernel - 1, kernel - 1))
        profile = padded.unfold(0, kernel, 1).mean(1)
    return profile / profile.sum()


def uniform_sigma(layers: int, kernel: int) -> float:
    """The sigma of `uniform_profile`, sqrt(n (k^2 - 1) / 12) (Luo et al., section 2.2)."""
    return math.sqrt(layers * (kernel**2 - 1) / 12)


def gaussian_size(sigma: float) -> float:
    """A Gaussian's `size`: the root of its disc's area above `THRESHOLD`, pixels."""
    return sigma * math.sqrt(2 * math.pi * math.log(1 / THRESHOLD))
