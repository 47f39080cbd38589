"""A task: what is learned from the data, how a network is judged, and how its outputs are shown."""

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
    """Returns the mean loss of a batch, a scalar in float32."""

    def __call__(self, outputs: Any, targets: Any, /, *, label_smoothing: float = 0.0) -> Tensor:
        """Compute the loss of selected outputs and the data's targets."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Loss, metric and decoding of a kind of network.

    Attributes:
        name: `classification`, `segmentation` or `detection`.
        metric: the metric by which a network is judged, with the selection of outputs that all parts take.
        loss: mean loss of a batch.
        distance: (outputs, outputs of the teacher, temperature) -> mean distance, for distillation.
        check: raises ModelError if the outputs (outputs, images) are not of the task's form.
        correct: (outputs, targets) -> number of correct images, counted during training; None = not counted.
        draw: (images (N, 3, H, W) uint8, outputs, targets or None) -> pictures (N, 3, k H, k W) uint8, k whole,
            of what the outputs or, without outputs, the targets say; None = nothing to draw.
        evidence: makes what collects the contribution of each image to the metric; None = the metric has none.
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
    """Return the KL divergence of the student from the teacher at `temperature` T, times T squared, mean over places.

    With the factor, the size of the gradients does not depend on T (Hinton et al., arXiv 1503.02531, section 2).

    Args:
        outputs: logits of the student, (N, classes) or (N, classes, H, W).
        teacher: of the same shape, without gradient.
        temperature: divisor of both before the softmax.
    """
    student = F.log_softmax(_single(outputs) / temperature, dim=1)
    target = F.log_softmax(_single(teacher) / temperature, dim=1)
    places = outputs.numel() // outputs.shape[1]
    return F.kl_div(student, target, reduction="sum", log_target=True) / places * temperature**2


def _single(tensor: Tensor) -> Tensor:
    """Return at least single precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def squared_distance(outputs: Any, teacher: Any, temperature: float) -> Tensor:
    """Return the mean squared difference of all output tensors, each in units of the teacher's mean square."""
    pairs = zip(flat_tensors(outputs), flat_tensors(teacher), strict=True)
    parts = [F.mse_loss(a.float(), b.float()) / b.float().square().mean().clamp_min(1e-12) for a, b in pairs]
    return sum(parts[1:], start=parts[0]) / len(parts)


def first_tensor(output: Any) -> Tensor:
    """Return the logits in `output`: itself, its "logits" or "out" (a key or an attribute), or its first element.

    Raises:
        ModelError: it holds no tensor in these places.
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
