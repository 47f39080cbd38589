"""A task: what is learned, judged and shown; the contribution of each image, for a metric of any resample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from compress.errors import ModelError
from compress.graph.inputs import flat_tensors
from compress.support.meters import TaskMetric

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
        self._hits.append((logits.argmax(1) == targets).cpu().numpy())

    def __len__(self) -> int:
        return sum(map(len, self._hits))

    def right(self) -> NDArray[np.bool_]:
        return np.concatenate(self._hits)

    def values(self, weights: Weights) -> Floats:
        return weights @ self.right().astype(np.float64) / weights.sum(1)


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
        return len(self._matrices)

    def values(self, weights: Weights) -> Floats:
        counts = torch.stack(self._matrices).double().numpy()
        sums = np.einsum("rn,nij->rij", weights.astype(np.float64), counts, optimize=True)
        hits = np.einsum("rii->ri", sums)
        union = sums.sum(1) + sums.sum(2) - hits
        occurs = union > 0
        return np.where(occurs, hits / np.maximum(union, 1), 0).sum(1) / np.maximum(1, occurs.sum(1))


def everything(evidence: Sequence[Any] | Evidence) -> Weights:
    return np.ones((1, len(evidence)), dtype=np.int64)


class Loss(Protocol):
    """Mean loss of a batch, a scalar in float32."""

    def __call__(self, outputs: Any, targets: Any, /, *, label_smoothing: float = 0.0) -> Tensor:
        """Compute the loss of selected outputs and the data's targets."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Loss, metric and decoding of a kind of network.

    Attributes:
        distance: (outputs, teacher's, temperature) -> mean distance.
        check: raises ModelError for wrong outputs (outputs, images).
        correct: (outputs, targets) -> correct images; None = not counted.
        draw: (images (N, 3, H, W) uint8, outputs or None, targets or None) -> images (N, 3, k H, k W) uint8, k whole;
            or None.
        evidence: makes what collects each image's contribution to the metric, or None.
    """

    name: str
    metric: TaskMetric
    loss: Loss
    distance: Callable[[Any, Any, float], Tensor]
    check: Callable[[Any, Tensor], None]
    correct: Callable[[Any, Any], Tensor] | None = None
    draw: Callable[[Tensor, Any, Any], Tensor] | None = None
    evidence: Callable[[], Evidence] | None = None

    def select(self, outputs: Any) -> Any:
        return self.metric.select(outputs)


def soft_distance(outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence from the teacher at `temperature` T, times T squared, mean over places.

    With the factor, gradients do not depend on T (Hinton et al., arXiv 1503.02531, section 2).

    Args:
        outputs: (N, classes) or (N, classes, H, W) logits.
        teacher: likewise.
        temperature: divisor of logits.
    """
    student = F.log_softmax(_single(outputs) / temperature, dim=1)
    target = F.log_softmax(_single(teacher) / temperature, dim=1)
    places = outputs.numel() // outputs.shape[1]
    return F.kl_div(student, target, reduction="sum", log_target=True) / places * temperature**2


def _single(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def squared_distance(outputs: Any, teacher: Any, temperature: float) -> Tensor:
    """Mean squared difference of all outputs in units of the teacher's mean square."""
    pairs = zip(flat_tensors(outputs), flat_tensors(teacher), strict=True)
    parts = [F.mse_loss(a.float(), b.float()) / b.float().square().mean().clamp_min(1e-12) for a, b in pairs]
    return sum(parts[1:], start=parts[0]) / len(parts)


def first_tensor(output: Any) -> Tensor:
    """The logits: `output`, its "logits" or "out", or its first element."""
    if isinstance(output, Tensor):
        return output
    value: Any = None
    if hasattr(output, "get") and hasattr(output, "keys"):
        value = next((output[key] for key in ("logits", "out", *output) if output.get(key) is not None), None)
    elif isinstance(output, (tuple, list)) and output:
        value = output[0]
    else:
        value = getattr(output, "logits", getattr(output, "out", None))
    if isinstance(value, Tensor):
        return value
    raise ModelError(
        f"the model returned {type(output).__name__}: it must return logits (N, classes), alone, first in a tuple, "
        'or as "logits" or "out" of a dict or an object'
    )
