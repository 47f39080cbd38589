import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from compress import DataSpec, load_data
from compress.data.base import BatchPlan, hash_seed, random_bits, uniform
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
def test_movements_stay_within_their_limits(row):
    limits = Movement(shift=0.1, degrees=15, zoom=0.2)
    matrix = limits.matrices(torch.tensor([row], dtype=torch.float64), 32)[0]
    scale = torch.linalg.det(matrix[:, :2]).sqrt()
    angle = torch.atan2(matrix[1, 0], matrix[0, 0]).rad2deg()
    assert 1 / 1.2 - 1e-9 <= scale <= 1 / 0.8 + 1e-9
    assert abs(angle) <= 15 + 1e-9
    assert matrix[:, 2].abs().max() <= 0.2 + 1e-9  # 0.1 of a side that is 2 long


# Pictures made on the device: how many are drawn together changes none of them, nor do processes and devices.

SPECS = {
    "digits": DataSpec(name="digits", image_size=16, train_images=60),
    "shapes": DataSpec(name="shapes", image_size=24, num_classes=5, train_images=60, val_images=7),
}


def pictures(split, plan, device="cpu"):
    return [(images.cpu(), targets.cpu()) for images, targets in split.batches(plan, device=device)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunk", [8, 20, 1000])
def test_a_chunk_changes_no_picture(name, chunk):
    split = load_data(SPECS[name]).train
    plan = BatchPlan(batch_size=8, epoch=3, first=1)
    expected = [split.load(share, epoch=3, device=torch.device("cpu")) for share in split.batch_indices(plan)]
    split.chunk_images = chunk
    torch.testing.assert_close(pictures(split, plan), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("processes", [2, 3])
def test_shares_of_processes_are_the_pictures_of_one(name, processes):
    split = load_data(SPECS[name]).train
    split.chunk_images = 32
    whole = pictures(split, BatchPlan(batch_size=12, epoch=1))
    parts = [pictures(split, BatchPlan(batch_size=12, epoch=1, rank=r, world_size=processes)) for r in range(processes)]
    for (images, targets), *shares in zip(whole, *parts, strict=True):
        expected = [(images[rank::processes], targets[rank::processes]) for rank in range(processes)]
        torch.testing.assert_close(shares, expected, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_makes_the_same_pictures(name):
    split = load_data(SPECS[name]).train
    plan = BatchPlan(batch_size=30, epoch=2)
    for (images, targets), (own, own_targets) in zip(pictures(split, plan), pictures(split, plan, "cuda"), strict=True):
        assert torch.equal(targets, own_targets)
        assert (images - own).abs().mean() < 1e-3


MASK = (1 << 64) - 1


def splitmix64(state):
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def test_the_reference_is_the_published_generator():
    outputs = splitmix64(1234567)
    assert [next(outputs) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(-(2**70), 2**70), st.integers(-(2**62), 2**62), st.integers(1, 5))
def test_columns_are_the_outputs_of_a_splitmix64_of_the_index(seed, index, count):
    key = (hash_seed(seed) + (index - 1) * 0x9E3779B97F4A7C15) & MASK
    outputs = splitmix64(next(splitmix64(key)))
    expected = [next(outputs) for _ in range(count)]
    got = random_bits(seed, torch.tensor([index]), count)[0].tolist()
    assert [value & MASK for value in got] == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_numbers_are_uniform_and_unrelated(seed):
    draws = uniform(seed, torch.arange(4000), 4).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-4
    related = np.corrcoef(np.concatenate([draws[:-1], draws[1:]], axis=1), rowvar=False) - np.eye(8)
    assert np.abs(related).max() < 0.08


def test_seeds_give_unrelated_numbers():
    one, other = (uniform(seed, torch.arange(4000), 1)[:, 0].numpy() for seed in (0, 1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.08
