"""Counter-based random numbers, the same on every device, and stratified subsets by them."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.data.base import hash_seed

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def random_bits(seed: int, indices: Tensor, count: int) -> Tensor:
    """64 random bits, (N, count) int64.

    Column j is the j-th output of a splitmix64 (Steele, Lea and Flood, OOPSLA 2014) that begins at a hash of (seed,
    index).
    """
    states = _mix(indices * _signed(_GOLDEN) + _signed(hash_seed(seed)))
    steps = torch.arange(1, count + 1, device=indices.device) * _signed(_GOLDEN)
    return _mix(states[:, None] + steps)


def uniform(seed: int, indices: Tensor, count: int) -> Tensor:
    """`random_bits` as multiples of 2^-53 in [0, 1), float64."""
    return ((random_bits(seed, indices, count) >> 11) & (1 << 53) - 1).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """The splitmix64 finalizer, in place; masks make arithmetic shifts logical."""
    state ^= (state >> 30) & (1 << 34) - 1
    state *= _signed(_FIRST)
    state ^= (state >> 27) & (1 << 37) - 1
    state *= _signed(_SECOND)
    state ^= (state >> 31) & (1 << 33) - 1
    return state


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_ORDER_SEED = 1797


def stratified_order(targets: Tensor) -> Tensor:
    """An order (N,) int64 whose every prefix has the classes in proportion."""
    count = len(targets)
    shuffled = random_bits(_ORDER_SEED, torch.arange(count), 1)[:, 0].argsort(stable=True)
    by_class = shuffled[targets[shuffled].argsort(stable=True)]
    sizes = torch.bincount(targets)
    starts = sizes.cumsum(0) - sizes
    classes = targets[by_class]
    rank = torch.arange(count) - starts[classes]
    share = torch.empty(count, dtype=torch.float64)
    share[by_class] = (rank + 0.5) / sizes[classes].double()
    return shuffled[share[shuffled].argsort(stable=True)]


def bounded(targets: Tensor, limit: int | None) -> Tensor:
    """Positions of at most `limit` images, stratified, in stored order."""
    if limit is None or limit >= len(targets):
        return torch.arange(len(targets))
    return stratified_order(targets)[:limit].sort().values
