"""The loss of training: cross entropy, and with a teacher also the distance to the teacher's logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from compress.training.spec import TrainSpec


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence of the student from the teacher at `temperature` T, times T squared, mean over images.

    With the factor, the size of the gradients does not depend on T (Hinton et al., arXiv 1503.02531, section 2).

    Args:
        logits: logits of the student, (N, classes).
        teacher_logits: (N, classes), without gradient.
        temperature: divisor of both before the softmax.
    """
    student = F.log_softmax(logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def training_loss(logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, spec: TrainSpec) -> Tensor:
    """Return the mean loss of a batch: (1 - distill_weight) cross entropy + distill_weight distillation, in float32.

    Args:
        logits: (N, classes), of any floating type.
        targets: (N,) int64.
        teacher_logits: (N, classes), or None for cross entropy alone.
        spec: label smoothing, and weight and temperature of the distillation.
    """
    loss = F.cross_entropy(logits.float(), targets, label_smoothing=spec.label_smoothing)
    if teacher_logits is None:
        return loss
    distance = distillation_loss(logits.float(), teacher_logits.float(), spec.distill_temperature)
    return (1 - spec.distill_weight) * loss + spec.distill_weight * distance
