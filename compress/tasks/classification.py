"""Classification: cross entropy, top-1 and top-5."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import ModelError
from compress.support.meters import Figures, MeanOf, TaskMetric
from compress.tasks.base import Hits, Task, first_tensor, soft_distance

_TOP = 5


@dataclass
class TopK:
    """Shares of images whose target is the highest, and among the 5 highest logits (or all, if fewer)."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Logits (N, classes) and targets (N,); sums stay on their device."""
        ranked = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices == targets[:, None]
        batch = torch.stack([ranked[:, 0].sum(), ranked.sum(), ranked.new_tensor(len(targets), dtype=torch.int64)])
        self.sums = self.sums.to(batch.device) + batch.double()

    def compute(self) -> Figures:
        top1, top5, count = self.sums.tolist()
        return {"top1": top1 / count, "top5": top5 / count}

    def merge_state(self, other: TopK) -> None:
        self.sums = self.sums + other.sums.to(self.sums.device)


# Top-1 accuracy.
TOP1 = TaskMetric(name="top1", make=TopK, select=first_tensor, classes=lambda logits: logits.argmax(1))

# Share of images of which a network says what the float network says.
SAME_CLASS = TaskMetric(
    name="same_class_as_float",
    make=lambda: MeanOf(lambda logits, targets: int(correct(logits, targets)) / len(targets)),
    select=first_tensor,
    classes=TOP1.classes,
)


def classification(num_classes: int) -> Task:
    return Task(
        name="classification",
        metric=TOP1,
        loss=cross_entropy,
        distance=soft_distance,
        check=partial(check_logits, num_classes=num_classes),
        correct=correct,
        evidence=Hits,
    )


def cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Images whose highest logit is the target's, or of its largest share."""
    classes = targets.argmax(1) if targets.is_floating_point() else targets
    return (logits.argmax(1) == classes).sum()


def check_logits(logits: Tensor, images: Tensor, *, num_classes: int) -> None:
    count = len(images)
    if logits.ndim != 2 or logits.shape[0] != count or logits.shape[1] < num_classes:
        raise ModelError(
            f"the model returned logits of shape {tuple(logits.shape)} for {count} images of {num_classes} classes: it "
            f"must be ({count}, {num_classes}) or wider; set model.num_classes, or add a pooling or flatten layer"
        )
