"""A task: what is learned, judged and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import ModelError
from compress.graph.inputs import flat_tensors
from compress.support.meters import TaskMetric
from compress.tasks.evidence import Evidence


class Loss(Protocol):
    """Mean loss of a batch, a scalar in float32."""

    def __call__(self, outputs: Any, targets: Any, /, *, label_smoothing: float = 0.0) -> Tensor:
        """Compute the loss of selected outputs and the data's targets."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Loss, metric and decoding of a kind of network.

    Attributes:
        name: `classification`, `segmentation` or `detection`.
        metric: judges networks, with the selection of outputs.
        distance: (outputs, teacher's, temperature) -> mean distance.
        check: raises ModelError for wrong outputs (outputs, images).
        correct: (outputs, targets) -> correct images; None = not counted.
        draw: (images (N, 3, H, W) uint8, outputs or None, targets or None) -> pictures (N, 3, k H, k W) uint8, k whole;
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
        """Return what the task's parts take of a model's or an engine's outputs."""
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
    """The logits: `output`, its "logits" or "out", or its first element.

    Raises:
        ModelError: no tensor there.
    """
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
