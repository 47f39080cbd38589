"""Stratified subsets, the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.data.counter import random_bits

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
