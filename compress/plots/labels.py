"""Placement of labels so that none covers another or a point.

Greedy: each takes the cheapest place on rings around its point (overlap, then distance), the most crowded first; sweeps
undo early mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 with x0 <= x1 and y0 <= y1."""

_RINGS = (4.0, 9.0, 16.0, 26.0, 40.0, 60.0, 85.0)
_ANGLES = 16
_SWEEPS = 3
_CLEARLY = 3.0
"""By how much a label is nearer to its own point than to any other."""


def place_labels(
    anchors: Sequence[Point],
    sizes: Sequence[Point],
    *,
    bounds: Box,
    obstacles: Sequence[Box] = (),
    point_radius: float = 5.0,
    gap: float = 1.5,
) -> list[Box]:
    """A box for each label.

    Args:
        anchors: points that every label avoids.
        sizes: in the units of `anchors`.
        bounds: the area for labels.
        obstacles: boxes to avoid.
        point_radius: half the side of a point.
        gap: room kept around labels.
    """
    taken = [_around(a, point_radius) for a in anchors] + list(obstacles)
    crowding = [-sum(1.0 / (1.0 + math.dist(a, b)) for b in anchors) for a in anchors]
    order = sorted(range(len(anchors)), key=lambda i: (crowding[i], i))
    boxes: list[Box | None] = [None] * len(anchors)
    for _ in range(_SWEEPS):
        before = list(boxes)
        for i in order:
            others = taken + [_grown(box, gap) for j, box in enumerate(boxes) if box is not None and j != i]
            candidates = _candidates(anchors[i], sizes[i], point_radius)
            rivals = [anchor for j, anchor in enumerate(anchors) if j != i]
            boxes[i] = min(candidates, key=lambda box: _cost(box, anchors[i], others, bounds, rivals))
        if boxes == before:
            break
    return [box for box in boxes if box is not None]


def overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _candidates(anchor: Point, size: Point, radius: float) -> list[Box]:
    boxes = []
    for ring in _RINGS:
        reach = radius + ring
        for k in range(_ANGLES):
            dx, dy = math.cos(2 * math.pi * k / _ANGLES), math.sin(2 * math.pi * k / _ANGLES)
            x, y = anchor[0] + reach * dx + dx * size[0] / 2, anchor[1] + reach * dy + dy * size[1] / 2
            boxes.append((x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2))
    return boxes


def _cost(box: Box, anchor: Point, others: Sequence[Box], bounds: Box, rivals: Sequence[Point]) -> float:
    area = max((box[2] - box[0]) * (box[3] - box[1]), 1e-9)
    covered = sum(overlap(box, other) for other in others) / area
    outside = 1 - overlap(box, bounds) / area
    own = _distance(anchor, box)
    mistaken = any(_distance(rival, box) < own + _CLEARLY for rival in rivals)  # it would be read as another's
    return 1e4 * (covered + 2 * outside) + 300 * mistaken + own


def _distance(point: Point, box: Box) -> float:
    return math.dist(point, (min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])))


def _around(point: Point, radius: float) -> Box:
    return (point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius)


def _grown(box: Box, gap: float) -> Box:
    return (box[0] - gap, box[1] - gap, box[2] + gap, box[3] + gap)
