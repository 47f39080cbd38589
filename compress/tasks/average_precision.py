"""COCO's average precision of any resample of images, and precision by recall.

Boxes are matched once, as COCOeval does (Lin et al., arXiv 1405.0312): by falling score, each to the free box of its
class with the largest overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.tasks.evidence import Floats, Weights, everything

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST_FOUND = 100
"""Boxes of a class that count in an image, those of the highest scores."""


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
    """mAP: found and true boxes by image."""

    def __init__(self, labels: Sequence[str], decode: Callable[[Any], Any]) -> None:
        self.labels, self._decode = tuple(labels), decode
        self._images: list[tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]] = []
        self._matched: dict[int, Matched] = {}

    def update(self, outputs: Any, targets: Sequence[Mapping[str, Any]]) -> None:
        """Add a batch of outputs and the boxes of its images."""
        for found, truth in zip(self._decode(outputs), targets, strict=True):
            self._images.append((_arrays(found), _arrays(truth)))
        self._matched.clear()

    def __len__(self) -> int:
        """Number of images."""
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

    def curves(self) -> Iterator[tuple[str, list[float]]]:
        """Yield occurring classes with their precision at 101 recalls, overlap 0.5."""
        for label, name in enumerate(self.labels):
            seen = self.matched(label)
            if seen.truths.sum():
                yield name, precisions(seen, 0, everything(self))[0].tolist()

    def matched(self, label: int) -> Matched:
        """Return the boxes of a class, matched."""
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
    """Match a class in all images."""
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
    shared: NDArray[np.float64] = inner / np.maximum(union, 1e-12)
    return shared


def _areas(boxes: NDArray[Any]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(1)
    return areas


def _arrays(row: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    names = [name for name in ("boxes", "scores", "labels", "ignored") if name in row]
    arrays = {name: row[name].detach().cpu().numpy() for name in names}
    return {name: array.astype(np.float64) if name in ("boxes", "scores") else array for name, array in arrays.items()}
