import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from compress.data.base import hash_seed, random_bits, uniform

MASK = (1 << 64) - 1


def splitmix64(state):
    """The published generator in plain integers."""
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
@settings(max_examples=60, deadline=None)
def test_columns_are_the_outputs_of_a_splitmix64_of_the_index(seed, index, count):
    key = (hash_seed(seed) + (index - 1) * 0x9E3779B97F4A7C15) & MASK
    outputs = splitmix64(next(splitmix64(key)))
    expected = [next(outputs) for _ in range(count)]
    got = random_bits(seed, torch.tensor([index]), count)[0].tolist()
    assert [value & MASK for value in got] == expected


def test_an_index_has_the_same_numbers_in_any_company():
    alone = uniform(3, torch.tensor([41]), 6)
    among = uniform(3, torch.arange(100), 9)
    assert torch.equal(alone[0], among[41, :6])


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
