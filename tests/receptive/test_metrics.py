import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from analysis.erf_paper.run import gaussian_size, uniform_profile, uniform_sigma
from compress.receptive.effective import (
    above_threshold,
    contribution_area,
    distances,
    gaussian_fit,
    mass_radius,
    radial_distance,
    radial_profile,
    second_moment,
)

maps = st.builds(
    lambda seed, h, w: torch.rand(h, w, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    st.integers(0, 999),
    st.integers(3, 12),
    st.integers(3, 12),
)


def gaussian(height, width, centre, sigma):
    rows = torch.arange(height, dtype=torch.float64) - centre[0]
    columns = torch.arange(width, dtype=torch.float64) - centre[1]
    return torch.exp(-0.5 * ((rows / sigma[0]) ** 2)[:, None] - 0.5 * ((columns / sigma[1]) ** 2)[None])


@given(st.floats(8, 30), st.floats(8, 30), st.floats(2, 12), st.floats(2, 12), st.floats(0.1, 1e6))
@settings(max_examples=25)
def test_fit_recovers_a_gaussian(row, column, sigma_row, sigma_column, height):
    fit = gaussian_fit(height * gaussian(40, 37, (row, column), (sigma_row, sigma_column)))
    assert fit.sigma == pytest.approx((sigma_row, sigma_column), rel=1e-3)
    assert fit.centre == pytest.approx((row, column), abs=1e-2)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


def test_fit_recovers_a_gaussian_wider_than_the_image():
    fit = gaussian_fit(gaussian(64, 64, (31, 31), (90.0, 60.0)))
    assert fit.sigma == pytest.approx((90, 60), rel=1e-2)


def test_fit_says_that_noise_is_no_gaussian():
    noise = torch.rand(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert gaussian_fit(noise).r_squared < 0.2


@given(maps, st.floats(0.05, 0.99))
def test_mass_radius_against_brute_force(heat, share):
    centre = (heat.shape[0] / 2, heat.shape[1] / 2)
    distance = distances(heat.shape, centre)
    radii = sorted(set(distance.flatten().tolist()))
    expected = next(r for r in radii if heat[distance <= r].sum() >= share * heat.sum() * (1 - 1e-12))
    assert mass_radius(heat, share, centre) == pytest.approx(expected)


@given(maps, st.floats(0.05, 0.99))
def test_contribution_area_against_brute_force(heat, share):
    height, width = heat.shape
    row, column = height // 2, width // 2
    for reach in range(max(height, width)):
        part = heat[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1]
        if part.sum() >= share * heat.sum() * (1 - 1e-12):
            break
    assert contribution_area(heat, share) == pytest.approx(part.numel() / heat.numel())


@given(maps, maps)
def test_radial_distance_against_scipy(left, right):
    height, width = min(left.shape[0], right.shape[0]), min(left.shape[1], right.shape[1])
    left, right = (m[:height, :width] / m[:height, :width].sum() for m in (left, right))
    radius = distances((height, width), (height / 2, width / 2))
    expected = wasserstein_distance(
        radius.flatten().numpy(), radius.flatten().numpy(), left.flatten().numpy(), right.flatten().numpy()
    )
    assert radial_distance(left, right, radius) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("layers", [5, 10, 20, 40])
def test_uniform_networks_tend_to_the_gaussian(kernel, layers):
    profile = uniform_profile(layers, kernel)
    heat = profile[:, None] * profile[None]
    assert second_moment(heat) == pytest.approx((uniform_sigma(layers, kernel),) * 2, rel=1e-9)
    limit = gaussian_size(uniform_sigma(layers, kernel))
    assert math.sqrt(above_threshold(heat)) == pytest.approx(limit, rel=0.04 if layers == 5 else 0.03)


@given(maps)
def test_radial_profile_holds_all_influence(heat):
    radius, mass = radial_profile(heat, (1.0, 2.0))
    assert len(radius) == len(mass)
    assert float(mass.sum()) == pytest.approx(1)
