"""Detection: the detector's losses, COCO's mean average precision.

COCO's average precision of any resample of images, and precision by recall.

Boxes are matched once, as COCOeval does (Lin et al., arXiv 1405.0312): by falling score, each to the free box of its
class with the largest overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from compress.errors import DataError, ModelError
from compress.graph.inputs import flat_tensors
from compress.support.meters import Figures, TaskMetric
from compress.tasks.base import Floats, Loss, Task, Weights, everything, squared_distance
from compress.tasks.segmentation import figure_name, palette

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST_FOUND = 100  # boxes of a class that count in an image, those of the highest scores


@dataclass(frozen=True)
class Matched:
    """Found boxes of a class, by falling score.

    Attributes:
        image: (D,) index of the image.
        right: (overlaps, D) matched to a true box.
        ignored: (overlaps, D) neither right nor wrong.
        truths: (images,) true boxes that count.
    """

    image: NDArray[np.int64]
    right: NDArray[np.bool_]
    ignored: NDArray[np.bool_]
    truths: NDArray[np.int64]


class Detections:
    """COCO's average precision over IoU 0.5 to 0.95, 101 recalls and at most 100 boxes an image (arXiv 1405.0312).

    "ignored" boxes are crowds: neither found nor missed. Boxes are in pixels of the input, as overlaps do not depend on
    resizing. It is the metric of a whole split (`compute`) and of any resample of its images (`values`).
    """

    def __init__(self, labels: Sequence[str], decode: Callable[[Any], Any]) -> None:
        self.labels, self.decode = tuple(labels), decode
        self._images: list[tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]] = []
        self._matched: dict[int, Matched] = {}

    def update(self, outputs: Any, targets: Sequence[Mapping[str, Any]]) -> None:
        for found, truth in zip(checked(self.decode(outputs), len(targets)), targets, strict=True):
            self._images.append((_arrays(found), _arrays(truth)))
        self._matched.clear()

    def __len__(self) -> int:
        return len(self._images)

    def values(self, weights: Weights) -> Floats:
        """Mean over overlaps and occurring classes; see `Evidence.values`."""
        totals, classes = np.zeros(len(weights)), np.zeros(len(weights))
        for label in range(len(self.labels)):
            seen = self.matched(label)
            occurs = weights @ seen.truths > 0
            mean = np.mean([precisions(seen, i, weights).mean(1) for i in range(len(OVERLAPS))], axis=0)
            totals += np.where(occurs, mean, 0)
            classes += occurs
        return totals / np.maximum(1, classes)

    def compute(self) -> Figures:
        """`map`, `map50`, `map75` and `ap_<class>` of occurring classes, 0 to 1."""
        matched = {label: self.matched(label) for label in range(len(self.labels))}
        occurs = {label: seen for label, seen in matched.items() if seen.truths.sum()}
        if not occurs:
            raise DataError("mAP: no image that was evaluated has a box that counts, so that nothing can be found")
        whole, overlaps = everything(self), range(len(OVERLAPS))
        table = np.array([[precisions(seen, i, whole).mean() for i in overlaps] for seen in occurs.values()])
        figures = {"map": table.mean(), "map50": table[:, 0].mean(), "map75": table[:, 5].mean()}
        figures |= {f"ap_{figure_name(self.labels[i])}": row.mean() for i, row in zip(occurs, table, strict=True)}
        return {name: float(value) for name, value in figures.items()}

    def merge_state(self, other: Detections) -> None:
        self._images += other._images
        self._matched.clear()

    def curves(self) -> Iterator[tuple[str, list[float]]]:
        """Yield occurring classes with their precision at 101 recalls, overlap 0.5."""
        for label, name in enumerate(self.labels):
            seen = self.matched(label)
            if seen.truths.sum():
                yield name, precisions(seen, 0, everything(self))[0].tolist()

    def matched(self, label: int) -> Matched:
        if label not in self._matched:
            self._matched[label] = match(self._images, label)
        return self._matched[label]


def precisions(seen: Matched, overlap: int, weights: Weights) -> Floats:
    """Precision at 101 recalls (R, 101): the largest at that recall or a higher one."""
    drawn = weights[:, seen.image]
    right = np.cumsum(drawn * (seen.right[overlap] & ~seen.ignored[overlap]), axis=1)
    wrong = np.cumsum(drawn * (~seen.right[overlap] & ~seen.ignored[overlap]), axis=1)
    found = np.zeros((len(weights), len(RECALLS)))
    if not seen.right.shape[1]:
        return found
    truths = np.maximum(1, weights @ seen.truths)[:, None]
    recall = right / truths
    precision = right / np.maximum(right + wrong, np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    for row in range(len(weights)):
        at = np.searchsorted(recall[row], RECALLS, side="left")
        reached = at < recall.shape[1]
        found[row, reached] = precision[row, at[reached]]
    return found


def match(images: Sequence[tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]], label: int) -> Matched:
    scores, places, rights, ignoreds, truths = [], [], [], [], []
    for index, (found, truth) in enumerate(images):
        mine, own = found["labels"] == label, truth["labels"] == label
        order = np.argsort(-found["scores"][mine], kind="stable")[:MOST_FOUND]
        crowd = truth["ignored"][own] if "ignored" in truth else np.zeros(int(own.sum()), bool)
        right, ignored = _match_image(found["boxes"][mine][order], truth["boxes"][own], crowd)
        scores.append(found["scores"][mine][order])
        places.append(np.full(len(order), index))
        rights.append(right)
        ignoreds.append(ignored)
        truths.append(int((~crowd).sum()))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return Matched(
        image=np.concatenate(places).astype(np.int64)[order],
        right=np.concatenate(rights, axis=1)[:, order],
        ignored=np.concatenate(ignoreds, axis=1)[:, order],
        truths=np.array(truths, dtype=np.int64),
    )


def _match_image(
    found: NDArray[Any], truth: NDArray[Any], crowd: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Match boxes by falling score to the true ones; return (overlaps, D) right and ignored."""
    count = len(OVERLAPS)
    right = np.zeros((count, len(found)), bool)
    ignored = np.zeros((count, len(found)), bool)
    if not len(truth) or not len(found):
        return right, ignored
    shared = _overlaps(found, truth, crowd)
    free = np.ones((count, len(truth)), bool)
    least = np.minimum(OVERLAPS, 1 - 1e-10)[:, None]
    for i, row in enumerate(shared):
        good = free & (row >= least)
        plain = np.where(good & ~crowd, row, -1.0)
        # Of equal overlaps COCO takes the last box.
        best = plain.shape[1] - 1 - plain[:, ::-1].argmax(1)
        hit = plain[np.arange(count), best] >= 0
        right[hit, i] = True
        free[np.flatnonzero(hit), best[hit]] = False
        ignored[:, i] = ~hit & (good & crowd).any(1)
    return right, ignored


def _overlaps(found: NDArray[Any], truth: NDArray[Any], crowd: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(D, G) intersection over union; over the found box alone for crowds."""
    low, high = np.maximum(found[:, None, :2], truth[None, :, :2]), np.minimum(found[:, None, 2:], truth[None, :, 2:])
    inner = (high - low).clip(0).prod(2)
    own, other = _areas(found)[:, None], _areas(truth)[None]
    union = np.where(crowd[None], own, own + other - inner)
    return inner / np.maximum(union, 1e-12)


def _areas(boxes: NDArray[Any]) -> NDArray[np.float64]:
    return (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(1)


def _arrays(row: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    names = [name for name in ("boxes", "scores", "labels", "ignored") if name in row]
    arrays = {name: row[name].detach().cpu().numpy() for name in names}
    return {name: array.astype(np.float64) if name in ("boxes", "scores") else array for name, array in arrays.items()}


Outputs = tuple[Tensor, ...]
# Of each image "boxes" (n, 4), left, top, right and bottom edge in pixels, "scores" (n,) and "labels" (n,).
Found = Sequence[Mapping[str, Tensor]]
Decode = Callable[[Outputs], Found]

_DRAWN_SCORE = 0.4
_DRAWN_SIDE = 256  # pixels of the shorter side of an image in which names of about 10 pixels can be read
_MARGIN = 2
_BRIGHT = 140


def checked(found: Any, images: int) -> Found:
    if not isinstance(found, (list, tuple)) or len(found) != images:
        got = f"{len(found)} images" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise ModelError(f"decode returned {got} for {images} images: it must return a mapping for each")
    for one in found:
        shapes = {name: tuple(one[name].shape) for name in ("boxes", "scores", "labels") if name in one}
        count = shapes.get("scores", (0,))[0]
        if shapes != {"boxes": (count, 4), "scores": (count,), "labels": (count,)}:
            raise ModelError(f"decode returned {shapes}: it must return boxes (n, 4), scores (n,) and labels (n,)")
    return found


def output_tuple(outputs: Any) -> Outputs:
    tensors = tuple(flat_tensors(outputs))
    if not tensors:
        raise ModelError(f"the model returned {type(outputs).__name__}, which holds no tensor")
    return tensors


def detection(
    labels: Sequence[str],
    *,
    loss: Callable[[Outputs, Any], Tensor],
    decode: Decode,
    check: Callable[[Outputs, Tensor], None] | None = None,
) -> Task:
    """Detection of some classes.

    Args:
        labels: of classes.
        loss: of `compress.data.boxes` targets.
        decode: to boxes, scores and labels by image, after non-maximum suppression.
        check: raises ModelError for wrong outputs; None = a row of each is asked for.
    """
    metric = TaskMetric(name="map", make=partial(Detections, tuple(labels), decode), select=output_tuple)
    return Task(
        name="detection",
        metric=metric,
        loss=without_smoothing(loss),
        distance=squared_distance,
        check=check or check_rows,
        draw=partial(draw_boxes, tuple(labels), decode),
        evidence=partial(Detections, tuple(labels), decode),
    )


def without_smoothing(function: Callable[[Any, Any], Tensor]) -> Loss:
    def loss(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> Tensor:
        return function(outputs, targets)

    return loss


def check_rows(outputs: Outputs, images: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in outputs]
    if any(not shape or shape[0] != len(images) for shape in shapes):
        raise ModelError(f"the model returned outputs of shapes {shapes} for {len(images)} images: each needs a row")


def draw_boxes(labels: Sequence[str], decode: Decode, images: Tensor, outputs: Any, targets: Any) -> Tensor:
    """Boxes and names over images, (N, 3, k H, k W) uint8: of outputs, else of targets."""
    rows = targets if outputs is None else checked(decode(outputs), len(images))
    scale = -(-_DRAWN_SIDE // min(images.shape[-2:]))
    large = images.cpu().expand(-1, 3, -1, -1).repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    colours = [tuple(colour) for colour in palette(len(labels)).tolist()]
    drawn = []
    for pixels, row in zip(large.movedim(1, -1), rows, strict=True):
        canvas = Image.fromarray(pixels.contiguous().numpy())
        scores = row["scores"].tolist() if "scores" in row else [None] * len(row["labels"])
        for box, label, score in zip(scale * row["boxes"], row["labels"].tolist(), scores, strict=True):
            if (score is None or score >= _DRAWN_SCORE) and box.isfinite().all():
                name = labels[label] if score is None else f"{labels[label]} {score:.2f}"
                _draw_box(canvas, box.tolist(), name, colours[label])
        drawn.append(torch.from_numpy(np.array(canvas)).movedim(-1, 0))
    return torch.stack(drawn)


def _draw_box(canvas: Image.Image, box: Sequence[float], name: str, colour: tuple[int, ...]) -> None:
    brush = ImageDraw.Draw(canvas)
    x1, y1, x2, y2 = box
    corner = (min(x1, x2), min(y1, y2))
    brush.rectangle((*corner, max(x1, x2), max(y1, y2)), outline=colour, width=2)
    width, height = (end + 2 * _MARGIN for end in brush.textbbox((0, 0), name)[2:])
    left = max(0, min(corner[0], canvas.width - width))
    above = corner[1] - height
    top = above if above >= 0 else max(0, min(corner[1], canvas.height - height))
    brush.rectangle((left, top, left + width, top + height), fill=colour)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > _BRIGHT
    brush.text((left + _MARGIN, top + _MARGIN), name, fill="black" if bright else "white")
