"""torchvision's detectors as a network and a head: outputs, losses for whole batches, decoding."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import ModelError
from compress.support.imports import any_failure, described


def _zoo() -> ModuleType:
    from torchvision.models import detection  # lazy: it takes seconds, and other tasks do not need it

    return detection


@dataclass(frozen=True, kw_only=True)
class Suppression:
    """Which boxes of an image remain.

    Attributes:
        least_score: exclusive.
        overlap: with a better box of the class above which one goes.
    """

    least_score: float
    overlap: float
    most: int


class BoxesAndScores(nn.Module):
    """From the outputs of a detector's network to boxes and scores, before non-maximum suppression.

    Args:
        detector: `has_plain_boxes`.
        anchors: (A, 4) edges in pixels.
        image_size: (height, width).
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
        self.names, self.levels, self.num_classes = tuple(names), tuple(levels), num_classes
        self.first_class = int(isinstance(detector, _zoo().ssd.SSD))
        self.candidates: int = detector.topk_candidates
        self.suppression = Suppression(
            least_score=detector.score_thresh, overlap=detector.nms_thresh, most=detector.detections_per_img
        )
        self.linear = isinstance(detector, _zoo().FCOS)
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
        scores = named["cls_logits"].softmax(-1)[..., self.first_class :].transpose(1, 2)
        return best_alone(scores, self.candidates)

    def _by_level(self, named: Mapping[str, Tensor]) -> Tensor:
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
    zoo = _zoo()

    def method(kind: Any) -> Callable[..., Any] | None:
        return getattr(kind, "postprocess_detections", None)

    coder = type(getattr(detector, "box_coder", None))
    plain, linear = zoo._utils.BoxCoder, zoo._utils.BoxLinearCoder
    known = {method(zoo.RetinaNet): plain, method(zoo.ssd.SSD): plain, method(zoo.FCOS): linear}
    return known.get(method(type(detector))) is coder


# Anchors that learn the background, and those that learn nothing: overlaps under and between the thresholds.
_BELOW, _BETWEEN = -1, -2

_LARGEST = 2**25  # overlaps of boxes and anchors that are held at a time; they take about twenty bytes each


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


# From outputs by name, true boxes and anchors (A, 4) to the sum of the losses.
BatchLoss = Callable[[Mapping[str, Tensor], Truth, Tensor], Tensor]


def batch_loss(detector: nn.Module) -> BatchLoss | None:
    parts: Any = detector
    zoo = _zoo()
    made, matcher = type(detector), type(getattr(detector, "proposal_matcher", None))
    if getattr(made, "compute_loss", None) is zoo.ssd.SSD.compute_loss and matcher is zoo._utils.SSDMatcher:
        return lambda outputs, truth, anchors: _ssd_loss(parts, outputs, truth, anchors)
    if getattr(made, "compute_loss", None) is zoo.RetinaNet.compute_loss and matcher is zoo._utils.Matcher:
        head = parts.head
        known = (type(head), type(head.classification_head), type(head.regression_head))
        retina = zoo.retinanet
        own = (retina.RetinaNetHead, retina.RetinaNetClassificationHead, retina.RetinaNetRegressionHead)
        if known == own and head.regression_head._loss_type == "l1":
            return lambda outputs, truth, anchors: _retinanet_loss(parts, outputs, truth, anchors)
    return None


def padded(targets: list[dict[str, Tensor]]) -> Truth:
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
    from torchvision.ops import box_iou  # lazy: it takes seconds

    images, most = present.shape
    overlap = box_iou(boxes.flatten(0, 1), anchors).view(images, most, -1).masked_fill_(~present[..., None], -1.0)
    best, index = overlap.max(1)
    weak = torch.where(best < matcher.low_threshold, _BELOW, _BETWEEN)
    found = torch.where(best < matcher.high_threshold, weak, index)
    if matcher.allow_low_quality_matches:  # the nearest anchors of a box learn it, however far they are
        nearest = (overlap == overlap.amax(2, keepdim=True)) & present[..., None]
        found = torch.where(nearest.any(1), index, found)
    if isinstance(
        matcher, _zoo()._utils.SSDMatcher
    ):  # the nearest anchor of each box; where two share one, the last of them
        order = torch.where(present, torch.arange(most, device=boxes.device), -1)
        forced = torch.full_like(found, -1).scatter_reduce(1, overlap.argmax(2), order, "amax")
        found = torch.where(forced >= 0, forced, found)
    return found


def _learned(coder: Any, truth: Truth, found: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether anchors learn (N, A), classes (N, A), codes (N, A, 4)."""
    learns, chosen = found >= 0, found.clamp(min=0)
    all_anchors = anchors.expand(len(found), -1, -1)
    boxes = truth.boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    boxes = torch.where(learns[..., None], boxes, all_anchors)  # an anchor itself has a finite form
    weights = torch.stack([anchors.new_full((), weight) for weight in coder.weights])  # without a copy to the device
    forms = _zoo()._utils.encode_boxes(boxes.flatten(0, 1), all_anchors.flatten(0, 1), weights).view_as(boxes)
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


T = TypeVar("T")
# Boxes of an image: "boxes" (n, 4), left, top, right and bottom edge in pixels, and "labels" (n,) int64.
Target = Mapping[str, Tensor]

FAMILIES = ("retinanet", "fcos", "ssd")  # beginnings of the names of torchvision's one-stage detectors


def is_detector(model: nn.Module) -> bool:
    """True for RetinaNet, FCOS, SSD and SSDLite, with any backbone."""
    zoo = _zoo()
    return isinstance(model, (zoo.RetinaNet, zoo.FCOS, zoo.ssd.SSD))


def has_background(name_or_model: str | nn.Module) -> bool:
    """True if class 0 is background, as in SSD and SSDLite."""
    if isinstance(name_or_model, str):
        return name_or_model.startswith(("ssd", "fasterrcnn"))
    return isinstance(name_or_model, _zoo().ssd.SSD)


class DetectorNetwork(nn.Module):
    """Backbone and head, shared with the detector.

    Args:
        detector: `is_detector`.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone = detector.get_submodule("backbone")
        self.head = detector.get_submodule("head")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Outputs of images (N, 3, H, W) by name, (N, anchors, ...)."""
        features = self.backbone(images)
        return self.head([features] if isinstance(features, Tensor) else list(features.values()))


def maps_and_outputs(
    network: nn.Module, name: str, image_size: tuple[int, int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backbone's maps and outputs on the meta device, for one image.

    Args:
        network: with a `backbone`.
        name: for the error.
        image_size: (height, width).
    """
    images = torch.empty(1, 3, *image_size, device="meta")
    size = f"{image_size[0]} x {image_size[1]} pixels"
    with any_failure(
        lambda error: ModelError(
            f"{name} fails on images of {size} ({described(error)}); set data.image_size to a larger one"
        )
    ):
        features, outputs = network.get_submodule("backbone")(images), network(images)
    return {"0": features} if isinstance(features, Tensor) else features, outputs


class DetectorHead:
    """Losses, and decoding of outputs.

    Args:
        detector: `is_detector`; not changed.
    """

    def __init__(self, detector: nn.Module, image_size: tuple[int, int], num_classes: int) -> None:
        self.image_size, self.num_classes = image_size, num_classes
        network = self._network(copy.deepcopy(detector)).to("meta").eval()
        maps, outputs = maps_and_outputs(network, type(detector).__name__, image_size)
        self.shapes = {name: tuple(tensor.shape[1:]) for name, tensor in outputs.items()}
        self._maps = {name: tuple(tensor.shape[2:]) for name, tensor in maps.items()}
        self._anchors: dict[torch.device, Tensor] = {}
        self._detector: Any = copy.deepcopy(detector)
        self._detector.transform = Unchanged()
        self.first_class, width = self._prepare(self._detector)
        self._batch_loss = batch_loss(self._detector)
        if width is not None:
            self._check_classes(type(detector).__name__, width)

    def _network(self, detector: nn.Module) -> nn.Module:
        return DetectorNetwork(detector)

    def _prepare(self, detector: Any) -> tuple[int, int | None]:
        """Remove what the network computes; return the first class's number and the number of classes."""
        detector.backbone = _Features(list(self._maps.values()))
        detector.head.to("meta")
        return int(has_background(detector)), self.shapes["cls_logits"][-1]

    def _check_classes(self, name: str, width: int) -> None:
        needed = self.num_classes + self.first_class
        if width < needed:
            background = ", one of them for the background" if self.first_class else ""
            raise ModelError(f"{name} has {width} classes: the data need {needed}{background}; set model.num_classes")

    def check(self, outputs: Sequence[Tensor], images: Tensor) -> None:
        """Refuse outputs of other anchors."""
        got = [tuple(tensor.shape) for tensor in outputs]
        wanted = [(len(images), *shape) for shape in self.shapes.values()]
        if got != wanted:
            raise ModelError(
                f"the detector returned outputs of shapes {got} for images of {tuple(images.shape)}; its anchors are "
                f"made for {self.image_size[0]} x {self.image_size[1]} pixels, with outputs of {wanted}"
            )

    def loss(self, outputs: Sequence[Tensor], targets: Sequence[Target]) -> Tensor:
        device = outputs[0].device
        moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
        learned = [{**target, "labels": target["labels"] + self.first_class} for target in moved]
        if self._batch_loss is not None and device.type != "cpu":  # on the CPU there is nothing to wait for
            return self._batch_loss(self._named(outputs), padded(learned), self.anchors(device))
        known = []
        for target in learned:
            chosen = ~target["ignored"] if "ignored" in target else slice(None)
            known.append({"boxes": target["boxes"][chosen], "labels": target["labels"][chosen]})
        losses = self._run(outputs, known)
        return torch.stack([losses[name] for name in sorted(losses)]).sum()

    def anchors(self, device: torch.device) -> Tensor:
        if device not in self._anchors:
            image = torch.zeros(1, device=device).expand(1, 3, *self.image_size)
            maps = [torch.zeros(1, device=device).expand(1, 1, *size) for size in self._maps.values()]
            self._anchors[device] = self._detector.anchor_generator(
                _zoo().image_list.ImageList(image, [self.image_size]), maps
            )[0]
        return self._anchors[device]

    def boxes_and_scores(self) -> BoxesAndScores:
        """The decoding before non-maximum suppression, as a network."""
        if not has_plain_boxes(self._detector):
            raise ModelError(
                f"{type(self._detector).__name__} decodes its boxes in another way than torchvision's RetinaNet, FCOS "
                "and SSD, so that its non-maximum suppression cannot be put into a file: set export.nms to false"
            )
        anchors, names = self.anchors(torch.device("cpu")), tuple(self.shapes)
        places = [height * width for height, width in self._maps.values()]
        levels = [count * len(anchors) // sum(places) for count in places]
        return BoxesAndScores(self._detector, names, anchors, levels, self.image_size, self.num_classes)

    @torch.no_grad()
    def decode(self, outputs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Boxes (n, 4), scores (n,) and labels (n,) by image after NMS, by falling score."""
        found = self._run(outputs, None)
        rows = []
        for row in found:
            labels = row["labels"] - self.first_class
            known = labels < self.num_classes
            rows.append({"boxes": row["boxes"][known], "scores": row["scores"][known], "labels": labels[known]})
        return rows

    def _named(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.shapes, (tensor.float() for tensor in outputs), strict=True))

    def _run(self, outputs: Sequence[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        given = self._named(outputs)
        detector = self._detector.train(targets is not None)
        detector.backbone.like = outputs[0]
        detector.head.forward = lambda features: given
        images = outputs[0].new_zeros(1, dtype=torch.float32).expand(len(outputs[0]), 3, *self.image_size)
        return detector(list(images), targets)


class _Features(nn.Module):
    """A backbone that returns maps of the right sizes, for anchors."""

    def __init__(self, sizes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.sizes = sizes
        self.like = torch.zeros(1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        nothing = self.like.new_zeros(1, dtype=torch.float32)
        return {str(i): nothing.expand(len(images), 1, *size) for i, size in enumerate(self.sizes)}


class Unchanged(nn.Module):
    """A transform that leaves images to the data."""

    def forward(self, images: list[Tensor], targets: Any = None) -> tuple[Any, Any]:
        return _zoo().image_list.ImageList(torch.stack(images), [(x.shape[-2], x.shape[-1]) for x in images]), targets

    def postprocess(self, result: T, image_shapes: object, original_image_sizes: object) -> T:
        return result


# Beginnings of the names of torchvision's two-stage detectors whose answers are boxes alone.
TWO_STAGE = ("fasterrcnn",)


def is_two_stage(model: nn.Module) -> bool:
    """True for Faster R-CNN with any backbone, without masks or keypoints."""
    return isinstance(model, _zoo().FasterRCNN) and not (model.roi_heads.has_mask() or model.roi_heads.has_keypoint())


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
    """

    def _network(self, detector: nn.Module) -> nn.Module:
        return ProposalNetwork(detector)

    def _prepare(self, detector: Any) -> tuple[int, int | None]:
        detector.requires_grad_(False)
        detector.backbone, detector.rpn.head = _Given(), _Given()
        return 1, getattr(getattr(detector.roi_heads.box_predictor, "cls_score", None), "out_features", None)

    def boxes_and_scores(self) -> BoxesAndScores:
        """Refuse: the box head is outside the file."""
        raise ModelError(
            f"the boxes of {type(self._detector).__name__} come from its box head, which stays outside the file, so "
            "that its non-maximum suppression cannot be put into it: set export.nms to false"
        )

    def _run(self, outputs: Sequence[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
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
    value: Any = None

    def forward(self, _: object) -> object:
        return self.value
