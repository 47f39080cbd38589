"""Semantic segmentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import ModelError
from compress.support.meters import Figures, TaskMetric
from compress.tasks.base import Confusions, Loss, Task, first_tensor, soft_distance

IGNORED = 255  # class of pixels that neither the loss nor the metric counts


@dataclass
class ConfusionMatrix:
    """Pixels by true (rows) and predicted class (columns), without ignored ones.

    mIoU is the mean over occurring classes (Everingham et al., IJCV 2010, section 4.3), as torchmetrics'
    MulticlassJaccardIndex over the split.

    Attributes:
        counts: (classes, classes) int64.
    """

    labels: Sequence[str]
    counts: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        if not self.counts.numel():
            self.counts = torch.zeros(len(self.labels), len(self.labels), dtype=torch.int64)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Logits (N, classes, H, W) and classes (N, H, W), `IGNORED` where there is none."""
        from torchmetrics.functional.classification import multiclass_confusion_matrix  # lazy: it takes a second

        classes = len(self.labels)
        batch = multiclass_confusion_matrix(
            logits[:, :classes].argmax(1), targets, num_classes=classes, ignore_index=IGNORED, validate_args=False
        )
        self.counts = self.counts.to(batch.device) + batch

    def compute(self) -> Figures:
        """`miou`, `pixel_accuracy` and `iou_<class>` of occurring classes, 0 to 1."""
        counts = self.counts.double().cpu()
        hits, union = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
        occurs = union > 0
        iou = hits / union.clamp_min(1)
        figures = {
            "miou": (iou[occurs].mean()).item(),
            "pixel_accuracy": (hits.sum() / counts.sum()).item(),
        }
        names = [figure_name(label) for label in self.labels]
        return figures | {f"iou_{names[i]}": iou[i].item() for i in occurs.nonzero().flatten().tolist()}

    def merge_state(self, other: ConfusionMatrix) -> None:
        self.counts = self.counts + other.counts.to(self.counts.device)


def _counted(labels: Sequence[str], logits: Tensor, targets: Tensor) -> Tensor:
    meter = ConfusionMatrix(labels)
    meter.update(logits, targets)
    return meter.counts


def figure_name(label: str) -> str:
    """A class in a figure's name.

    >>> figure_name("Traffic sign")
    'traffic_sign'
    """
    return re.sub(r"\W+", "_", label.strip().lower())


def segmentation(labels: Sequence[str], *, loss: str = "cross_entropy") -> Task:
    metric = TaskMetric(
        name="miou",
        make=partial(ConfusionMatrix, tuple(labels)),
        select=first_tensor,
        classes=lambda logits: logits.argmax(1),
    )
    return Task(
        name="segmentation",
        metric=metric,
        loss=LOSSES[loss],
        distance=soft_distance,
        check=partial(check_maps, num_classes=len(labels)),
        draw=partial(draw_masks, len(labels)),
        evidence=partial(Confusions, partial(_counted, tuple(labels))),
    )


def cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over pixels with a class; zero if none has.

    Args:
        logits: (N, classes, H, W).
        targets: (N, H, W) int64, `IGNORED` = none.
        label_smoothing: spread over classes.
    """
    total = F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
    )
    return total / (targets != IGNORED).sum().clamp_min(1)


def dice(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """1 minus the mean soft Dice coefficient of occurring target classes.

    2 sum p t / (sum p^2 + sum t^2) (Milletari et al., arXiv 1606.04797, section 3). `label_smoothing` is not applied.
    """
    known = (targets != IGNORED).unsqueeze(1)
    share = logits.float().softmax(1) * known
    truth = F.one_hot(targets.where(known[:, 0], 0), logits.shape[1]).movedim(-1, 1) * known
    overlap = (share * truth).sum((0, 2, 3))
    size = share.square().sum((0, 2, 3)) + truth.sum((0, 2, 3))
    occurs = truth.sum((0, 2, 3)) > 0
    coefficient = 2 * overlap / size.clamp_min(1e-6)
    return 1 - (coefficient * occurs).sum() / occurs.sum().clamp_min(1)


def cross_entropy_and_dice(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    return (cross_entropy(logits, targets, label_smoothing=label_smoothing) + dice(logits, targets)) / 2


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "dice": dice,
    "cross_entropy+dice": cross_entropy_and_dice,
}


def check_maps(logits: Tensor, images: Tensor, *, num_classes: int) -> None:
    height, width = images.shape[-2:]
    right = (len(images), height, width) == (*logits.shape[:1], *logits.shape[2:]) and logits.shape[1] >= num_classes
    if not right:
        raise ModelError(
            f"the model returned logits of shape {tuple(logits.shape)} for images of shape {tuple(images.shape)} and "
            f"{num_classes} classes: it must be ({len(images)}, {num_classes}, {height}, {width}); resize the logits "
            "to the image in the model's forward, or set model.num_classes"
        )


def palette(count: int) -> Tensor:
    """PASCAL VOC's colours, (count, 3) uint8: bits of the class in turn."""
    index = torch.arange(1, count + 1)
    colours = torch.zeros(count, 3, dtype=torch.int64)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((index >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours.to(torch.uint8)


def draw_masks(num_classes: int, images: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
    classes = targets if outputs is None else outputs[:, :num_classes].argmax(1)
    if classes is None:
        return images
    ignored = torch.zeros_like(classes, dtype=torch.bool) if targets is None else targets == IGNORED
    colours = palette(num_classes)[classes.cpu().clamp(0, num_classes - 1)].movedim(-1, 1)
    painted = (0.4 * images.float() + 0.6 * colours.float()).round().to(torch.uint8)
    return torch.where(ignored.unsqueeze(1), images, painted)
