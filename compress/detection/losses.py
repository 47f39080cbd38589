"""Losses of torchvision's RetinaNet and SSD, for whole batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BELOW, _BETWEEN = -1, -2
"""Anchors that learn the background, and those that learn nothing: overlaps under and between the thresholds."""

_LARGEST = 2**25
"""Overlaps of boxes and anchors that are held at a time; they take about twenty bytes each."""


@dataclass(frozen=True)
class Truth:
    """True boxes, padded to the largest number M.

    Attributes:
        boxes: (N, M, 4) edges in pixels.
        labels: (N, M) int64, the detector's numbers.
        present: (N, M), False for padding and ignored boxes.
    """

    boxes: Tensor
    labels: Tensor
    present: Tensor


BatchLoss = Callable[[Mapping[str, Tensor], Truth, Tensor], Tensor]
"""From outputs by name, true boxes and anchors (A, 4) to the sum of the losses."""


def batch_loss(detector: nn.Module) -> BatchLoss | None:
    """A loss for whole batches; None if the detector computes another."""
    from torchvision.models.detection import RetinaNet, retinanet  # lazy: it takes seconds
    from torchvision.models.detection._utils import Matcher, SSDMatcher  # lazy: it takes seconds
    from torchvision.models.detection.ssd import SSD  # lazy: it takes seconds

    parts: Any = detector
    made, matcher = type(detector), type(getattr(detector, "proposal_matcher", None))
    if getattr(made, "compute_loss", None) is SSD.compute_loss and matcher is SSDMatcher:
        return lambda outputs, truth, anchors: _ssd_loss(parts, outputs, truth, anchors)
    if getattr(made, "compute_loss", None) is RetinaNet.compute_loss and matcher is Matcher:
        head = parts.head
        known = (type(head), type(head.classification_head), type(head.regression_head))
        own = (retinanet.RetinaNetHead, retinanet.RetinaNetClassificationHead, retinanet.RetinaNetRegressionHead)
        if known == own and head.regression_head._loss_type == "l1":
            return lambda outputs, truth, anchors: _retinanet_loss(parts, outputs, truth, anchors)
    return None


def padded(targets: list[dict[str, Tensor]]) -> Truth:
    """Boxes of all images together."""
    empty = {"boxes": targets[0]["boxes"].new_zeros(1, 4), "labels": targets[0]["labels"].new_zeros(1)}
    boxes, labels = (  # one more row, so that there is a box to look at where no image has any
        nn.utils.rnn.pad_sequence([*(target[name] for target in targets), empty[name]], batch_first=True)[:-1]
        for name in ("boxes", "labels")
    )
    counts = [len(target["labels"]) for target in targets]
    known = [
        ~target["ignored"] if "ignored" in target else target["labels"].new_ones(count, dtype=torch.bool)
        for target, count in zip(targets, counts, strict=True)
    ]
    known.append(labels.new_zeros(1, dtype=torch.bool))
    return Truth(boxes, labels, nn.utils.rnn.pad_sequence(known, batch_first=True)[:-1])


@torch.no_grad()
def matches(matcher: Any, truth: Truth, anchors: Tensor) -> Tensor:
    """The box (N, A) that each anchor learns, or negative, as `Matcher` and `SSDMatcher`."""
    count = max(1, _LARGEST // (truth.present.shape[1] * len(anchors)))
    parts = zip(truth.boxes.split(count), truth.present.split(count), strict=True)
    return torch.cat([_matches(matcher, boxes, present, anchors) for boxes, present in parts])


def _matches(matcher: Any, boxes: Tensor, present: Tensor, anchors: Tensor) -> Tensor:
    from torchvision.models.detection._utils import SSDMatcher  # lazy: it takes seconds
    from torchvision.ops import box_iou  # lazy: it takes seconds

    images, most = present.shape
    overlap = box_iou(boxes.flatten(0, 1), anchors).view(images, most, -1).masked_fill_(~present[..., None], -1.0)
    best, index = overlap.max(1)
    weak = torch.where(best < matcher.low_threshold, _BELOW, _BETWEEN)
    found = torch.where(best < matcher.high_threshold, weak, index)
    if matcher.allow_low_quality_matches:  # the nearest anchors of a box learn it, however far they are
        nearest = (overlap == overlap.amax(2, keepdim=True)) & present[..., None]
        found = torch.where(nearest.any(1), index, found)
    if isinstance(matcher, SSDMatcher):  # the nearest anchor of each box; where two share one, the last of them
        order = torch.where(present, torch.arange(most, device=boxes.device), -1)
        forced = torch.full_like(found, -1).scatter_reduce(1, overlap.argmax(2), order, "amax")
        found = torch.where(forced >= 0, forced, found)
    return found


def _learned(coder: Any, truth: Truth, found: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether anchors learn (N, A), classes (N, A), codes (N, A, 4)."""
    from torchvision.models.detection._utils import encode_boxes  # lazy: it takes seconds

    learns, chosen = found >= 0, found.clamp(min=0)
    all_anchors = anchors.expand(len(found), -1, -1)
    boxes = truth.boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    boxes = torch.where(learns[..., None], boxes, all_anchors)  # an anchor itself has a finite form
    weights = torch.stack([anchors.new_full((), weight) for weight in coder.weights])  # without a copy to the device
    forms = encode_boxes(boxes.flatten(0, 1), all_anchors.flatten(0, 1), weights).view_as(boxes)
    return learns, truth.labels.gather(1, chosen), forms


def _retinanet_loss(detector: Any, outputs: Mapping[str, Tensor], truth: Truth, anchors: Tensor) -> Tensor:
    """Focal loss and L1, over learning anchors of each image."""
    from torchvision.ops import sigmoid_focal_loss  # lazy: it takes seconds

    found = matches(detector.proposal_matcher, truth, anchors)
    learns, labels, forms = _learned(detector.head.regression_head.box_coder, truth, found, anchors)
    logits, counts = outputs["cls_logits"], learns.sum(1).clamp(min=1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    wanted = ((labels[..., None] == classes) & learns[..., None]).to(logits.dtype)
    focal = sigmoid_focal_loss(logits, wanted, reduction="none").sum(2)
    distance = F.l1_loss(outputs["bbox_regression"], forms, reduction="none").sum(2)
    both = torch.where(found == _BETWEEN, 0, focal) + torch.where(learns, distance, 0)
    return (both.sum(1) / counts).mean()


def _ssd_loss(detector: Any, outputs: Mapping[str, Tensor], truth: Truth, anchors: Tensor) -> Tensor:
    """Cross entropy with the hardest others, and smooth L1."""
    found = matches(detector.proposal_matcher, truth, anchors)
    learns, labels, forms = _learned(detector.box_coder, truth, found, anchors)
    wanted = torch.where(learns, labels, 0)
    entropy = F.cross_entropy(outputs["cls_logits"].flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    hardest = entropy.detach().masked_fill(learns, -torch.inf).argsort(1, descending=True).argsort(1)
    chosen = learns | (hardest < detector.neg_to_pos_ratio * learns.sum(1, keepdim=True))
    distance = F.smooth_l1_loss(outputs["bbox_regression"], forms, reduction="none").sum(2)
    both = torch.where(chosen, entropy, 0) + torch.where(learns, distance, 0)
    return both.sum() / learns.sum().clamp(min=1)
