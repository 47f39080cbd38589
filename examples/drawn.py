"""Shared by the examples that draw their data: splits in memory, a block of convolutions, and a base class of metrics.

The metrics keep what each image contributes, from which a run computes paired 95 % intervals (intervals.json).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

AT_ONCE = 256
"""Examples that are drawn together."""

Pairs = list[tuple[Tensor, Tensor]]


def splits(draw: Callable[[int, int], tuple[Tensor, Tensor]], train: int, val: int) -> tuple[Pairs, Pairs]:
    """Return training and evaluation examples; `draw` makes a number of inputs and targets from a seed."""

    def split(count: int, seed: int) -> Pairs:
        parts = [draw(min(AT_ONCE, count - first), seed + first) for first in range(0, count, AT_ONCE)]
        return [pair for part in parts for pair in zip(*part, strict=True)]

    return split(train, 0), split(val, 1_000_000)


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return two convolutions with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        layers += [nn.Conv2d(channels, outputs, 3, step, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Ratios:
    """Mean of K ratios of sums over images, such as right over all, or intersection over union of each class."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    @abstractmethod
    def parts(self, outputs: Any, targets: Any) -> Tensor:
        """Return (N, 2, K): each image's numerators and denominators."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        self._parts.append(self.parts(outputs, targets).double().cpu())

    def compute(self) -> float:
        """Return the metric of all images."""
        return float(self.values(np.ones((1, len(self))))[0])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def values(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        """Return the metric (R,) of images that count as often as `weights` (R, images) say."""
        sums = np.tensordot(weights.astype(np.float64), torch.cat(self._parts).numpy(), 1)
        return (sums[:, 0] / np.maximum(sums[:, 1], 1e-12)).mean(1)
