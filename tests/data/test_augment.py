import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from compress.data.memory import Movement, affine_grid, move

MIDDLE = torch.full((1, 5), 0.5, dtype=torch.float64)


def draws(**values):
    row = MIDDLE.clone()
    for name, value in values.items():
        row[0, ["x", "y", "angle", "zoom", "flip"].index(name)] = value
    return row


@pytest.mark.parametrize("size", [8, 33])
def test_the_grid_is_torchs(size):
    matrices = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        affine_grid(matrices, size), F.affine_grid(matrices, [4, 1, size, size], align_corners=False)
    )


def test_draws_in_the_middle_move_nothing():
    images = torch.rand(1, 3, 16, 16)
    still = Movement(shift=0.2, degrees=20, zoom=0.2).matrices(MIDDLE, 16)
    torch.testing.assert_close(move(images, still), images)


def test_a_flip_mirrors_left_to_right():
    images = torch.rand(2, 3, 16, 16)
    matrices = Movement(flip=True).matrices(torch.cat((draws(flip=0.49), draws(flip=0.5))), 16)
    torch.testing.assert_close(move(images, matrices), torch.stack((images[0].flip(-1), images[1])))


def test_a_bare_shift_moves_whole_pixels_and_leaves_black():
    images = torch.rand(1, 1, 16, 16)
    moved = move(images, Movement(shift=0.13).matrices(draws(x=0.0, y=1 - 1e-9), 16))  # 2.08 pixels either way
    expected = torch.zeros_like(images)
    expected[..., :-2, 2:] = images[..., 2:, :-2]
    torch.testing.assert_close(moved, expected)


def test_a_quarter_turn_is_rot90():
    images = torch.rand(1, 1, 16, 16)
    moved = move(images, Movement(degrees=90).matrices(draws(angle=0.0), 16))
    torch.testing.assert_close(moved, images.rot90(-1, (2, 3)), atol=1e-5, rtol=0)


def test_a_zoom_above_one_shows_the_middle_larger():
    images = torch.zeros(1, 1, 64, 64)
    images[..., 24:40, 24:40] = 1
    larger = move(images, Movement(zoom=0.5).matrices(draws(zoom=1 - 1e-9), 64))
    assert float(larger.sum()) == pytest.approx(16**2 * 1.5**2, rel=0.02)


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=5, max_size=5))
@settings(max_examples=50, deadline=None)
def test_movements_stay_within_their_limits(row):
    limits = Movement(shift=0.1, degrees=15, zoom=0.2)
    matrix = limits.matrices(torch.tensor([row], dtype=torch.float64), 32)[0]
    scale = torch.linalg.det(matrix[:, :2]).sqrt()
    angle = torch.atan2(matrix[1, 0], matrix[0, 0]).rad2deg()
    assert 1 / 1.2 - 1e-9 <= scale <= 1 / 0.8 + 1e-9
    assert abs(angle) <= 15 + 1e-9
    assert matrix[:, 2].abs().max() <= 0.2 + 1e-9  # 0.1 of a side that is 2 long
