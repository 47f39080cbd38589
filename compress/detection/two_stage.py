"""torchvision's Faster R-CNN: the network to quantize, and the float head."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.detection.boxes import BoxesAndScores
from compress.detection.detectors import DetectorHead, Unchanged, maps_and_outputs
from compress.errors import ModelError

TWO_STAGE = ("fasterrcnn",)
"""Beginnings of the names of torchvision's two-stage detectors whose answers are boxes alone."""


def is_two_stage(model: nn.Module) -> bool:
    """True for Faster R-CNN with any backbone, without masks or keypoints."""
    from torchvision.models.detection import FasterRCNN  # lazy: it takes seconds, and other tasks do not need it

    return isinstance(model, FasterRCNN) and not (model.roi_heads.has_mask() or model.roi_heads.has_keypoint())


class ProposalNetwork(nn.Module):
    """Backbone and head of proposals, shared with the detector.

    Args:
        detector: `is_two_stage`.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone = detector.get_submodule("backbone")
        self.rpn = nn.ModuleDict({"head": detector.get_submodule("rpn.head")})
        pool: Any = detector.get_submodule("roi_heads.box_roi_pool")
        self.pooled: tuple[str, ...] = tuple(pool.featmap_names)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps of images (N, 3, H, W) by name, (N, C, h, w), to pool regions from.

        Then objectness (N, A, h, w) and codes (N, 4 A, h, w) by map.
        """
        features = self.backbone(images)
        maps = {"0": features} if isinstance(features, Tensor) else features
        objectness, codes = self.rpn["head"](list(maps.values()))
        found = {f"features_{name}": maps[name] for name in self.pooled if name in maps}
        found |= {f"objectness_{i}": tensor for i, tensor in enumerate(objectness)}
        return found | {f"bbox_regression_{i}": tensor for i, tensor in enumerate(codes)}


class TwoStageHead(DetectorHead):
    """Losses, proposals, and the box head in float.

    Args:
        detector: `is_two_stage`, with trained box head; not changed.
        image_size: (height, width).
        num_classes: of the data.

    Raises:
        ModelError: this size fails, or too few classes.
    """

    def __init__(self, detector: nn.Module, image_size: tuple[int, int], num_classes: int) -> None:
        self.image_size, self.num_classes, self.first_class = image_size, num_classes, 1
        self._batch_loss = None
        network = ProposalNetwork(copy.deepcopy(detector)).to("meta").eval()
        maps, outputs = maps_and_outputs(network, type(detector).__name__, image_size)
        self.shapes = {name: tuple(tensor.shape[1:]) for name, tensor in outputs.items()}
        self._maps = {name: tuple(tensor.shape[2:]) for name, tensor in maps.items()}
        self._detector: Any = copy.deepcopy(detector)
        self._detector.requires_grad_(False)
        parts: Any = (self._detector, self._detector.rpn)
        parts[0].backbone, parts[1].head = _Given(), _Given()
        self._detector.transform = Unchanged()
        predictor = parts[0].roi_heads.box_predictor
        width = getattr(getattr(predictor, "cls_score", None), "out_features", None)
        if width is not None:
            self._check_classes(type(detector).__name__, width)

    def boxes_and_scores(self) -> BoxesAndScores:
        """Refuse: the box head is outside the file.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"the boxes of {type(self._detector).__name__} come from its box head, which stays outside the file, so "
            "that its non-maximum suppression cannot be put into it: set export.nms to false"
        )

    def _run(self, outputs: Sequence[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        """The detector's forward with these outputs of backbone and proposals."""
        images, device = len(outputs[0]), outputs[0].device
        named = {name: tensor.float() for name, tensor in zip(self.shapes, outputs, strict=True)}
        nothing = torch.zeros(1, device=device)
        features = {name: nothing.expand(images, 1, *size) for name, size in self._maps.items()}
        features |= {name.removeprefix("features_"): named[name] for name in named if name.startswith("features_")}
        detector = self._detector.to(device).train(targets is not None)
        detector.roi_heads.box_head.eval()  # its BatchNorm, where it has any, is not trained
        detector.backbone.value = OrderedDict((name, features[name]) for name in self._maps)
        kinds = ("objectness_", "bbox_regression_")
        detector.rpn.head.value = tuple([named[name] for name in named if name.startswith(kind)] for kind in kinds)
        try:
            with torch.autocast(device.type, enabled=False):
                return detector(list(nothing.expand(images, 3, *self.image_size)), targets)
        finally:
            detector.backbone.value = detector.rpn.head.value = None


class _Given(nn.Module):
    """A part that returns `value`."""

    value: Any = None

    def forward(self, _: object) -> object:
        return self.value
