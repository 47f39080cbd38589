"""Images with boxes, for detection.

Training images are scaled by 0.7 to 1.4, moved and mirrored; of a cut box, 30 % must be left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from compress.data.base import file_parts
from compress.data.counter import uniform
from compress.data.decode import read_image
from compress.data.memory import to_device
from compress.data.spec import DataSpec
from compress.data.workers import Item, ItemSplit, Place
from compress.errors import DataError

_SCALES = (0.7, 1.4)
_DRAWS = 4
_LEAST_VISIBLE = 0.3
_TOLERANCE = 1.0
"""Pixels by which a rounded box may exceed its image; the excess is cut off."""

AS_BACKGROUND = "; data.other_classes: background learns objects of other classes as background"
"""Advice for a class that a recipe does not name."""

Boxes = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """An image and its boxes.

    Attributes:
        source: name in messages.
        size: (width, height), if said.
        boxes: (n, 4) edges in pixels of the file.
        labels: (n,) positions of classes.
        ignored: (n,) boxes that count neither as found nor as missed.
    """

    image: Path
    source: str
    size: tuple[int, int] | None
    boxes: Boxes
    labels: NDArray[np.int64]
    ignored: NDArray[np.bool_]


def annotation(
    image: Path, source: str, size: tuple[int, int] | None, rows: Iterable[tuple[Sequence[float], int, bool]]
) -> Annotation:
    """The annotation of an image from (box, class, ignored) rows.

    Raises:
        DataError: a box that is empty, outside the image or not finite.
    """
    found = list(rows)
    boxes = np.array([box for box, _, _ in found], dtype=np.float32).reshape(-1, 4)
    check_boxes(boxes, size, source)
    return Annotation(
        image=image,
        source=source,
        size=size,
        boxes=boxes,
        labels=np.array([label for _, label, _ in found], dtype=np.int64),
        ignored=np.array([ignored for _, _, ignored in found], dtype=np.bool_),
    )


def check_boxes(boxes: Boxes, size: tuple[int, int] | None, source: str) -> None:
    """Refuse unlearnable boxes, and cut off what exceeds the image by a pixel; in place.

    Raises:
        DataError: names the box.
    """
    for box in boxes:
        text = "[" + ", ".join(f"{value:g}" for value in box) + "]"
        if not np.isfinite(box).all():
            raise DataError(f"{source}: the box {text} has a coordinate that is no finite number")
        if size is not None:
            width, height = size
            if box[:2].min() < -_TOLERANCE or box[2] > width + _TOLERANCE or box[3] > height + _TOLERANCE:
                raise DataError(f"{source}: the box {text} (left, top, right, bottom) is outside its image of {size}")
            box[0::2] = box[0::2].clip(0, width)
            box[1::2] = box[1::2].clip(0, height)
        if box[2] <= box[0] or box[3] <= box[1]:
            raise DataError(f"{source}: the box {text} (left, top, right, bottom) has no area")


class BoxSplit(ItemSplit):
    """Images with boxes, resized to `image_size` without regard to their shape.

    A target is {"boxes": (n, 4) float32 edges in pixels of the model's input; "labels": (n,) int64; "ignored": (n,)
    bool}.

    Raises:
        DataError: no image has a box that counts.
    """

    def __init__(
        self, annotations: Sequence[Annotation], labels: Sequence[str], spec: DataSpec, *, augment: bool
    ) -> None:
        super().__init__(labels, spec, augment=augment)
        if all(one.ignored.all() for one in annotations):
            where = annotations[0].source if annotations else spec.root
            kind = " that counts: all are crowds, or marked as difficult" if any(map(_has_box, annotations)) else ""
            raise DataError(
                f"none of {len(annotations)} images has a box{kind} (the first is {where}): nothing to detect"
            )
        self.annotations = list(annotations)

    def __len__(self) -> int:
        return len(self.annotations)

    def content(self) -> Iterator[bytes | str]:
        """Yield boxes, names, sizes, and the bytes of some files."""
        for one in self.annotations:
            yield from (one.boxes.tobytes(), one.labels.tobytes(), one.ignored.tobytes())
        yield from file_parts(Path(), [str(one.image) for one in self.annotations])

    def reader(self) -> Dataset[Item]:
        """See `ItemSplit.reader`."""
        return _Reader(self.annotations, self.preprocessing.height_width, self.max_pixels)

    def targets_of(
        self, found: list[tuple[Boxes, NDArray[np.int64], NDArray[np.bool_]]], device: torch.device
    ) -> list[dict[str, Tensor]]:
        """Return a target for each image; see `BoxSplit`."""
        return targets_on([tuple(map(torch.from_numpy, parts)) for parts in found], device)


def _has_box(one: Annotation) -> bool:
    return len(one.boxes) > 0


def targets_on(rows: Sequence[tuple[Tensor, ...]], device: torch.device) -> list[dict[str, Tensor]]:
    """Targets from (boxes, labels, ignored) on the CPU; three copies for a batch."""
    counts = [len(row[1]) for row in rows]
    parts = [to_device(torch.cat(part), device).split(counts) for part in zip(*rows, strict=True)]
    return [dict(zip(("boxes", "labels", "ignored"), row, strict=True)) for row in zip(*parts, strict=True)]


class _Reader(Dataset[Item]):
    def __init__(self, annotations: Sequence[Annotation], size: tuple[int, int], max_pixels: int) -> None:
        self.annotations, self.size, self.max_pixels = annotations, size, max_pixels

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, place: Place) -> Item:
        index, seed = place
        one = self.annotations[index]
        try:
            image = _opened(one, self.max_pixels)
        except DataError as error:
            return None, None, str(one.image), str(error)
        scale = np.array([self.size[1] / image.width, self.size[0] / image.height] * 2, dtype=np.float32)
        boxes = one.boxes * scale
        if seed is None:
            return _resized(image, self.size), (boxes, one.labels, one.ignored), str(one.image), ""
        draws = uniform(seed, torch.tensor([index]), _DRAWS)[0].tolist()
        pixels, boxes, kept = moved(image, boxes, self.size, draws)
        return pixels, (boxes[kept], one.labels[kept], one.ignored[kept]), str(one.image), ""


def _opened(one: Annotation, max_pixels: int) -> Image.Image:
    image = read_image(one.image, max_pixels=max_pixels)
    if one.size not in (None, image.size):
        raise DataError(f"{one.image} has {image.size} pixels (width, height), and {one.source} says {one.size}")
    if one.size is None:
        check_boxes(one.boxes, image.size, one.source)
    return image


def _resized(image: Image.Image, size: tuple[int, int]) -> Tensor:
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).movedim(-1, 0).contiguous()


def moved(
    image: Image.Image, boxes: Boxes, size: tuple[int, int], draws: Sequence[float]
) -> tuple[Tensor, Boxes, NDArray[np.bool_]]:
    """Return an image scaled, moved and mirrored, with its boxes.

    Returns:
        Pixels (3, H, W) uint8, boxes cut at the border, and which keep at least 30 % of their area. `size` is (H, W);
            `draws` are scale, vertical and horizontal position, and mirror, of [0, 1).
    """
    height, width = size
    scale = _SCALES[0] * (_SCALES[1] / _SCALES[0]) ** draws[0]
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    top, left = round(draws[1] * (height - inner[0])), round(draws[2] * (width - inner[1]))
    canvas = Image.new("RGB", (width, height), (128, 128, 128))
    canvas.paste(image.resize((inner[1], inner[0]), Image.Resampling.BILINEAR), (left, top))
    pixels = torch.from_numpy(np.array(canvas)).movedim(-1, 0).contiguous()
    factors = np.array([inner[1] / width, inner[0] / height] * 2, dtype=np.float32)
    whole = boxes * factors + np.array([left, top] * 2, dtype=np.float32)
    cut = whole.clip(0, np.array([width, height] * 2, dtype=np.float32))
    kept: NDArray[np.bool_] = _areas(cut) >= _LEAST_VISIBLE * _areas(whole)
    if draws[3] < 0.5:
        pixels = pixels.flip(-1)
        cut = np.stack([width - cut[:, 2], cut[:, 1], width - cut[:, 0], cut[:, 3]], axis=1)
    return pixels, cut, kept


def _areas(boxes: Boxes) -> Boxes:
    sides = (boxes[:, 2:] - boxes[:, :2]).clip(0)
    return sides[:, 0] * sides[:, 1]
