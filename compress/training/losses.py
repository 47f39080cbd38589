"""The loss of training: the task's, and with a teacher also the distance to the teacher's outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compress.tasks import Task
from compress.training.spec import TrainSpec


def training_loss(
    task: Task, outputs: Any, targets: Any, taught: Any, spec: TrainSpec, features: Tensor | None = None
) -> Tensor:
    """Return the mean loss of a batch: (1 - distill_weight) task loss + distill_weight distillation, in float32.

    Args:
        task: its loss and its distance.
        outputs: selected outputs of the model.
        targets: of the data.
        taught: outputs of the teacher in the same form, or None for the task's loss alone.
        spec: label smoothing, and weight and temperature of the distillation.
        features: distance of the features, which counts distill_feature_weight times beside that of the outputs.
    """
    loss = task.loss(outputs, targets, label_smoothing=spec.label_smoothing)
    if taught is None:
        return loss
    distance = task.distance(outputs, taught, spec.distill_temperature)
    if features is not None:
        distance = distance + spec.distill_feature_weight * features
    return (1 - spec.distill_weight) * loss + spec.distill_weight * distance
