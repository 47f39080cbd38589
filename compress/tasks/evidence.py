"""Each image's contribution, so that a metric can be taken of any resample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Weights = NDArray[np.int64]
Floats = NDArray[np.float64]


class Evidence(Protocol):
    """A split as one network on one engine answered it."""

    def update(self, outputs: Any, targets: Any, /) -> None:
        """Add a batch of selected outputs."""

    def __len__(self) -> int:
        """Number of images."""

    def values(self, weights: Weights, /) -> Floats:
        """The metric of each resample (R,), a share, from weights (R, images)."""


class Hits:
    """Top-1 accuracy: whether each image's highest logit is its target's."""

    def __init__(self) -> None:
        self._hits: list[NDArray[np.bool_]] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits (N, classes) and classes (N,)."""
        self._hits.append((logits.argmax(1) == targets).cpu().numpy())

    def __len__(self) -> int:
        """Number of images."""
        return sum(map(len, self._hits))

    def right(self) -> NDArray[np.bool_]:
        """Return which images were answered rightly (N,)."""
        return np.concatenate(self._hits)

    def values(self, weights: Weights) -> Floats:
        """Share of right images; see `Evidence.values`."""
        shares: Floats = weights @ self.right().astype(np.float64) / weights.sum(1)
        return shares


class Confusions:
    """mIoU: a confusion matrix for each image.

    Args:
        count: (classes, classes) of a batch of one.
    """

    def __init__(self, count: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._count = count
        self._matrices: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits (N, classes, H, W) and classes (N, H, W)."""
        self._matrices += [self._count(outputs[i : i + 1], targets[i : i + 1]).cpu() for i in range(len(targets))]

    def __len__(self) -> int:
        """Number of images."""
        return len(self._matrices)

    def values(self, weights: Weights) -> Floats:
        """Mean IoU of occurring classes; see `Evidence.values`."""
        counts = torch.stack(self._matrices).double().numpy()
        sums = np.einsum("rn,nij->rij", weights.astype(np.float64), counts, optimize=True)
        hits = np.einsum("rii->ri", sums)
        union = sums.sum(1) + sums.sum(2) - hits
        occurs = union > 0
        iou: Floats = np.where(occurs, hits / np.maximum(union, 1), 0).sum(1) / np.maximum(1, occurs.sum(1))
        return iou


def everything(evidence: Sequence[Any] | Evidence) -> Weights:
    """Weights of the split itself."""
    return np.ones((1, len(evidence)), dtype=np.int64)
