"""Random numbers that are a pure function of (seed, image, column): a counter-based generator, without state.

Each image's numbers come from hashing its index (splitmix64: Steele, Lea and Flood, OOPSLA 2014), so they depend
neither on the batch nor on the process; the arithmetic is in integers, the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.data.base import hash_seed

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def random_bits(seed: int, indices: Tensor, count: int) -> Tensor:
    """Return 64 random bits for each of `count` columns of each index.

    Column j of an index is the j-th output of a splitmix64 whose initial state is hashed from (seed, index).

    Args:
        seed: any integer.
        indices: (N,) int64.
        count: number of columns.

    Returns:
        (N, count) int64 on the device of `indices`.
    """
    states = _mix(indices * _signed(_GOLDEN) + _signed(hash_seed(seed)))
    steps = torch.arange(1, count + 1, device=indices.device) * _signed(_GOLDEN)
    return _mix(states[:, None] + steps)


def uniform(seed: int, indices: Tensor, count: int) -> Tensor:
    """Return `random_bits` as numbers of [0, 1): multiples of 2^-53, thus the same on every device.

    Returns:
        (N, count) float64.
    """
    return ((random_bits(seed, indices, count) >> 11) & (1 << 53) - 1).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """Apply the splitmix64 finalizer, in place; the masks make torch's arithmetic shifts logical."""
    state ^= (state >> 30) & (1 << 34) - 1
    state *= _signed(_FIRST)
    state ^= (state >> 27) & (1 << 37) - 1
    state *= _signed(_SECOND)
    state ^= (state >> 31) & (1 << 33) - 1
    return state


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits as `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
