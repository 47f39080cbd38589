"""Folders of images and of masks, whose pixels hold the classes, for segmentation.

Three layouts; in each, a mask has the name of its image and the ending .png:

    root/train/ root/trainannot/ root/val/ root/valannot/             (SegNet's CamVid)
    root/images/train/ root/masks/train/ root/images/val/ ...
    root/train/images/ root/train/masks/ root/val/images/ ...

Training images are scaled by 0.5 to 2, cropped and mirrored at random (Chen et al., arXiv 1706.05587, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from compress.data import DataSpec
from compress.data.base import DataSet, file_parts, uniform
from compress.data.decode import pixels_of, read_image
from compress.data.folder import EXTENSIONS
from compress.data.memory import to_device
from compress.data.workers import Item, ItemSplit, Place
from compress.errors import DataError, first_few

NO_CLASS = 255  # class of pixels without one, in the targets

# Folders of images and masks below the root.
LAYOUTS = (("{split}", "{split}annot"), ("images/{split}", "masks/{split}"), ("{split}/images", "{split}/masks"))

_SCALES = (0.5, 2.0)
_DRAWS = 4


Pair = tuple[Path, Path]  # an image and its mask


def mask_data(spec: DataSpec) -> DataSet:
    root = Path(str(spec.root)).expanduser()
    layout = next((lay for lay in LAYOUTS if all((root / p.format(split="train")).is_dir() for p in lay)), None)
    if layout is None:
        known = "; ".join(f"{images}/ and {masks}/" for images, masks in LAYOUTS)
        raise DataError(
            f"data.root: {root.absolute()} holds no images and masks in a known layout ({known}, where split is train "
            "and val)"
        )

    def split(name: str, limit: int | None, augment: bool) -> MaskSplit:
        images, masks = (root / part.format(split=name) for part in layout)
        return MaskSplit(_pairs(images, masks)[:limit], spec, augment=augment)

    return DataSet(train=split("train", spec.train_images, spec.augment), val=split("val", spec.val_images, False))


def _pairs(images: Path, masks: Path) -> list[Pair]:
    for folder in (images, masks):
        if not folder.is_dir():
            raise DataError(f"data.root: there is no folder {folder.absolute()}")
    files = sorted(f for f in images.iterdir() if f.suffix.lower() in EXTENSIONS and f.name[0] != ".")
    if not files:
        raise DataError(f"{images} holds no images ({', '.join(EXTENSIONS)})")
    pairs = [(file, masks / f"{file.stem}.png") for file in files]
    without = [image.name for image, mask in pairs if not mask.is_file()]
    if without:
        raise DataError(f"{len(without)} images of {images} have no mask NAME.png in {masks}: {first_few(without)}")
    return pairs


class MaskSplit(ItemSplit):
    """Images with a class for each pixel: int64 (n, H, W), 255 = none."""

    def __init__(self, pairs: list[Pair], spec: DataSpec, *, augment: bool) -> None:
        super().__init__(spec.classes or (), spec, augment=augment)
        self.pairs, self.ignore_index = pairs, spec.ignore_index

    def __len__(self) -> int:
        return len(self.pairs)

    def content(self) -> Iterator[bytes | str]:
        yield str(self.ignore_index)
        for files in zip(*self.pairs, strict=True):
            yield from file_parts(files[0].parent, [file.name for file in files])

    def reader(self) -> Dataset[Item]:
        return _Reader(self)

    def targets_of(self, found: list[Any], device: torch.device) -> Tensor:
        height, width = self.preprocessing.height_width
        classes = torch.stack(found) if found else torch.empty(0, height, width, dtype=torch.uint8)
        return to_device(classes, device).long()


class _Reader(Dataset[Item]):
    def __init__(self, split: MaskSplit) -> None:
        self.pairs, self.size, self.labels = split.pairs, split.preprocessing.height_width, split.labels
        self.ignore_index, self.max_pixels = split.ignore_index, split.max_pixels

    def __getitem__(self, place: Place) -> Item:
        index, seed = place
        files = self.pairs[index]
        try:
            image, mask = self._read(*files)
        except DataError as error:
            return None, None, str(files[1]), str(error)
        draws = None if seed is None else uniform(seed, torch.tensor([index]), _DRAWS)[0].tolist()
        pixels, classes = fitted(image, mask, self.size) if draws is None else cropped(image, mask, self.size, draws)
        return pixels, classes, str(files[0]), ""

    def _read(self, file: Path, mask_file: Path) -> tuple[Image.Image, Image.Image]:
        image = read_image(file, max_pixels=self.max_pixels)
        mask = np.array(read_image(mask_file, max_pixels=self.max_pixels, convert=_single_channel))
        if mask.shape != (image.height, image.width):
            raise DataError(
                f"{mask_file} is {mask.shape[1]} x {mask.shape[0]} pixels and its image {image.width} x "
                f"{image.height}: a mask must have the size of its image"
            )
        return image, Image.fromarray(self._checked(mask, mask_file))

    def _checked(self, mask: np.ndarray, file: Path) -> np.ndarray:
        ignored = mask == self.ignore_index
        foreign = np.unique(mask[~ignored & ((mask < 0) | (mask >= len(self.labels)))])
        if len(foreign):
            raise DataError(
                f"{file} holds the classes {first_few(map(str, foreign.tolist()))}; data.classes names 0 to "
                f"{len(self.labels) - 1}, and data.ignore_index is {self.ignore_index}"
            )
        return np.where(ignored, NO_CLASS, mask).astype(np.uint8)


def _single_channel(file: Image.Image) -> Image.Image:
    """Palette indices or grey levels, also of RGB."""
    if file.mode in ("L", "P", "1", "I", "I;16"):
        return file.copy()
    if file.mode == "RGB":
        red, green, blue = file.split()
        if red.tobytes() == green.tobytes() == blue.tobytes():
            return red
    raise DataError(
        f"{getattr(file, 'filename', 'a mask')} is a colour image (mode {file.mode}): a mask holds one number for "
        "each pixel, the position of its class in data.classes; write that number in place of the colour"
    )


def fitted(image: Image.Image, mask: Image.Image, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    height, width = size
    if (image.height, image.width) != size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        mask = mask.resize((width, height), Image.Resampling.NEAREST)
    return pixels_of(image), torch.from_numpy(np.array(mask))


def cropped(image: Image.Image, mask: Image.Image, size: tuple[int, int], draws: list[float]) -> tuple[Tensor, Tensor]:
    """A random part, as `fitted`.

    `size` is (height, width); the image is fitted, then scaled by 0.5 to 2. `draws` of [0, 1): scale, vertical and
    horizontal position, mirror.
    """
    low, high = _SCALES
    scale = low * (high / low) ** draws[0]
    pixels, classes = fitted(image, mask, (max(1, round(size[0] * scale)), max(1, round(size[1] * scale))))
    rows, from_rows = _window(pixels.shape[1], size[0], draws[1])
    columns, from_columns = _window(pixels.shape[2], size[1], draws[2])
    part = torch.zeros(3, *size, dtype=torch.uint8)
    part_classes = torch.full(size, NO_CLASS, dtype=torch.uint8)
    part[:, rows, columns] = pixels[:, from_rows, from_columns]
    part_classes[rows, columns] = classes[from_rows, from_columns]
    if draws[3] < 0.5:
        part, part_classes = part.flip(-1), part_classes.flip(-1)
    return part, part_classes


def _window(length: int, size: int, draw: float) -> tuple[slice, slice]:
    """Target and source positions along one axis."""
    if length >= size:
        start = int(draw * (length - size + 1))
        return slice(0, size), slice(start, start + size)
    start = int(draw * (size - length + 1))
    return slice(start, start + length), slice(0, length)
