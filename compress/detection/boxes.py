"""Boxes and scores of torchvision's one-stage detectors by plain operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Suppression:
    """Which boxes of an image remain.

    Attributes:
        least_score: exclusive.
        overlap: with a better box of the class above which one goes.
        most: in an image.
    """

    least_score: float
    overlap: float
    most: int


class BoxesAndScores(nn.Module):
    """From the outputs of a detector's network to boxes and scores, before non-maximum suppression.

    Args:
        detector: `has_plain_boxes`.
        names: of outputs, in order.
        anchors: (A, 4) edges in pixels.
        levels: anchors by map.
        image_size: (height, width).
        num_classes: of the data.
    """

    centres: Tensor
    sizes: Tensor
    weights: Tensor
    limits: Tensor

    def __init__(
        self,
        detector: Any,
        names: Sequence[str],
        anchors: Tensor,
        levels: Sequence[int],
        image_size: tuple[int, int],
        num_classes: int,
    ) -> None:
        super().__init__()
        from torchvision.models.detection import FCOS, ssd  # lazy: it takes seconds

        self.names, self.levels, self.num_classes = tuple(names), tuple(levels), num_classes
        self.first_class = int(isinstance(detector, ssd.SSD))
        self.candidates: int = detector.topk_candidates
        self.suppression = Suppression(
            least_score=detector.score_thresh, overlap=detector.nms_thresh, most=detector.detections_per_img
        )
        self.linear = isinstance(detector, FCOS)
        height, width = image_size
        coder = detector.box_coder
        sizes = anchors[:, 2:] - anchors[:, :2]
        self.register_buffer("centres", (anchors[:, :2] + anchors[:, 2:]) / 2)
        self.register_buffer("sizes", sizes if not self.linear or coder.normalize_by_size else torch.ones_like(sizes))
        self.register_buffer("weights", anchors.new_tensor((1.0,) * 4 if self.linear else coder.weights))
        self.register_buffer("limits", anchors.new_tensor([width, height] * 2))
        self.largest = 0.0 if self.linear else float(coder.bbox_xform_clip)

    def forward(self, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (N, A, 4) in pixels, scores (N, classes, A), 0 = not looked for.

        Args:
            outputs: (N, A, ...), in the order of `names`.
        """
        named = dict(zip(self.names, outputs, strict=True))
        corners = self._linear_boxes if self.linear else self._boxes
        boxes = torch.minimum(corners(named["bbox_regression"]).clamp(min=0), self.limits)
        scores = self._by_class(named) if self.first_class else self._by_level(named)
        return boxes, scores[:, : self.num_classes]

    def _boxes(self, codes: Tensor) -> Tensor:
        """Corners (Ren et al., arXiv 1506.01497, equation 2)."""
        codes = codes / self.weights
        centres = codes[..., :2] * self.sizes + self.centres
        half = 0.5 * (codes[..., 2:].clamp(max=self.largest).exp() * self.sizes)
        return torch.cat([centres - half, centres + half], -1)

    def _linear_boxes(self, codes: Tensor) -> Tensor:
        """Corners by distances from centres (Tian et al., arXiv 1904.01355, equation 1)."""
        first, last = codes[..., :2] * self.sizes, codes[..., 2:] * self.sizes
        return torch.cat([self.centres - first, self.centres + last], -1)

    def _by_class(self, named: Mapping[str, Tensor]) -> Tensor:
        """Best scores by class, without background."""
        scores = named["cls_logits"].softmax(-1)[..., self.first_class :].transpose(1, 2)
        return best_alone(scores, self.candidates)

    def _by_level(self, named: Mapping[str, Tensor]) -> Tensor:
        """Best scores by map, all classes."""
        scores = named["cls_logits"].sigmoid()
        if "bbox_ctrness" in named:
            scores = (scores * named["bbox_ctrness"].sigmoid()).sqrt()
        classes = scores.shape[-1]
        parts = [best_alone(part.flatten(1), self.candidates) for part in scores.split(self.levels, 1)]
        return torch.cat(parts, 1).unflatten(1, (-1, classes)).transpose(1, 2)


def best_alone(scores: Tensor, count: int) -> Tensor:
    """Scores (..., n) with all but the `count` best 0."""
    if scores.shape[-1] <= count:
        return scores
    best, places = scores.topk(count, -1)
    return torch.zeros_like(scores).scatter(-1, places, best)


def has_plain_boxes(detector: nn.Module) -> bool:
    """True if boxes are decoded and selected as in torchvision's RetinaNet, FCOS and SSD."""
    from torchvision.models.detection import FCOS, RetinaNet, _utils, ssd  # lazy: it takes seconds

    def method(kind: Any) -> Callable[..., Any] | None:
        return getattr(kind, "postprocess_detections", None)

    coder = type(getattr(detector, "box_coder", None))
    known = {method(RetinaNet): _utils.BoxCoder, method(ssd.SSD): _utils.BoxCoder, method(FCOS): _utils.BoxLinearCoder}
    return known.get(method(type(detector))) is coder
