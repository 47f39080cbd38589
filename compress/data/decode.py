"""Image files to 8-bit pixels."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from compress.data.base import uniform
from compress.data.preprocessing import Preprocessing
from compress.data.workers import Place
from compress.errors import DataError
from compress.support.imports import any_failure, described
from compress.support.limits import IMAGE_PIXELS

Item = tuple[int, Tensor | None, str, str]
"""Index, image (3, S, S) uint8 or None, file name, and the error."""
Decoded = tuple[Tensor, Tensor, list[tuple[str, str]]]
"""Images (n, 3, S, S) uint8, their indices (n,), and the file and error of each failure."""

_AREA = (0.08, 1.0)
_LOG_RATIO = math.log(4 / 3)
_TRIES = 10
_METHODS = {"bilinear": Image.Resampling.BILINEAR.value, "bicubic": Image.Resampling.BICUBIC.value}
_LONGEST_STRIP = 4  # times what the crop needs
_PILLOW = threading.Lock()
if hasattr(os, "register_at_fork"):  # a worker process that is forked from another thread must not find it locked
    os.register_at_fork(before=_PILLOW.acquire, after_in_parent=_PILLOW.release, after_in_child=_PILLOW.release)


class Decoder(Dataset[Item]):
    """Decodes images one at a time; the item of an unreadable one holds the error.

    Args:
        files: (N,) names as the file system's bytes.
    """

    def __init__(
        self,
        folder: Path,
        files: np.ndarray,
        *,
        preprocessing: Preprocessing,
        max_pixels: int = IMAGE_PIXELS,
    ) -> None:
        self.folder, self.files, self.preprocessing = folder, files, preprocessing
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Place) -> Item:
        index = place[0]
        path, draws = self.path(index), self.draws(place)
        size = self.preprocessing.height_width
        try:
            with open_image(path, self.max_pixels) as file:
                image = rgb(file)
            if draws is None:
                pixels = preprocessed(image, self.preprocessing)
            else:
                pixels = random_crop(image, size, draws, interpolation=self.preprocessing.interpolation)
        except Exception as error:  # a damaged file can make its decoder fail in any way
            return index, None, str(path), f"{type(error).__name__}: {error}"
        return index, pixels, str(path), ""

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self.folder / os.fsdecode(bytes(self.files[index]))

    def draws(self, place: Place) -> list[float] | None:
        """Random numbers of `random_crop`; None for evaluation."""
        index, seed = place
        if seed is None:
            return None
        numbers: list[float] = uniform(seed, torch.tensor([index]), 4 * _TRIES + 1)[0].tolist()
        return numbers


@contextmanager
def open_image(source: Path | IO[bytes], max_pixels: int = IMAGE_PIXELS) -> Iterator[Image.Image]:
    """Yield an image of which only the header was read; `max_pixels` replaces Pillow's limit.

    Raises:
        OSError: unreadable, or of an unknown format.
        ValueError: it has more pixels.
    """
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise OSError("it is a pipe, a device or a folder, and only regular files are read")
    with _PILLOW:  # Pillow's limit is a global variable
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            file = Image.open(source)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    with file:
        if file.width * file.height > max_pixels:
            raise ValueError(
                f"it has {file.width:,} x {file.height:,} pixels, and at most {max_pixels:,} are decoded "
                "(data.max_pixels in a recipe)"
            )
        yield file


def read_image(
    source: Path | IO[bytes],
    *,
    name: str = "",
    max_pixels: int = IMAGE_PIXELS,
    convert: Callable[[Image.Image], Image.Image] | None = None,
) -> Image.Image:
    """Decode an image file.

    `name` is for messages, "" = the path; `convert` makes the image, None = `rgb`.

    Raises:
        DataError: names the file and the problem.
    """
    with (
        any_failure(lambda error: DataError(f"{name or source} is not a readable image ({described(error)})")),
        open_image(source, max_pixels) as file,
    ):
        return (convert or rgb)(file)


def rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, upright by EXIF; 16-bit values are scaled, not clipped.

    Raises:
        ValueError: 32-bit pixels, whose white is unknown.
    """
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError("its pixels have 32 bits and no fixed range; store it with 8 or 16 bits a channel")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def collate(items: list[Item]) -> Decoded:
    """Stack decoded images into a batch, and list the failures."""
    good = [(index, pixels) for index, pixels, _, _ in items if pixels is not None]
    failures = [(file, reason) for _, pixels, file, reason in items if pixels is None]
    images = torch.stack([pixels for _, pixels in good]) if good else torch.empty((0, 3, 1, 1), dtype=torch.uint8)
    return images, torch.tensor([index for index, _ in good], dtype=torch.int64), failures


def fitted(
    image: Image.Image,
    size: tuple[int, int],
    *,
    resize: str = "crop",
    crop_ratio: float = 1.0,
    interpolation: str = "bilinear",
) -> Tensor:
    """An image as (3, height, width) uint8: the centre, resized to cover size / crop_ratio, or all of it."""
    transforms = _transforms()
    if resize != "crop":
        return transforms.pil_to_tensor(_whole(image, size, padded=resize == "pad", interpolation=interpolation))
    longest = longest_side(image.width, image.height, size)
    if max(image.size) > longest:
        height, width = min(image.height, longest), min(image.width, longest)
        image = _part(image, middle(image.height, height), middle(image.width, width), height, width)
    sides, method = covering(image.height, image.width, size, crop_ratio), _METHODS[interpolation]
    resized = transforms.resize(image, sides, interpolation=method, antialias=True)
    return transforms.pil_to_tensor(transforms.center_crop(resized, list(size)))


def _whole(image: Any, size: tuple[int, int], *, padded: bool, interpolation: str) -> Any:
    transforms, method = _transforms(), _METHODS[interpolation]
    if not padded:
        return transforms.resize(image, list(size), interpolation=method, antialias=True)
    height, width = transforms.get_size(image)
    scale = min(size[0] / height, size[1] / width)
    sides = [max(1, min(side, round(old * scale))) for side, old in zip(size, (height, width), strict=True)]
    image = transforms.resize(image, sides, interpolation=method, antialias=True)
    left, top = middle(size[1], sides[1]), middle(size[0], sides[0])
    return transforms.pad(image, [left, top, size[1] - sides[1] - left, size[0] - sides[0] - top])


def preprocessed(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """An image as evaluation takes it, (3, height, width) uint8."""
    p = preprocessing
    return fitted(image, p.height_width, resize=p.resize, crop_ratio=p.crop_ratio, interpolation=p.interpolation)


def resize_tensor(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """`preprocessed` of a (3, H, W) uint8 tensor, on its own device."""
    p, transforms = preprocessing, _transforms()
    if p.resize != "crop":
        whole: Tensor = _whole(pixels, p.height_width, padded=p.resize == "pad", interpolation=p.interpolation)
        return whole
    sides, method = (
        covering(pixels.shape[-2], pixels.shape[-1], p.height_width, p.crop_ratio),
        _METHODS[p.interpolation],
    )
    resized = transforms.resize(pixels, sides, interpolation=method, antialias=True)
    cropped: Tensor = transforms.center_crop(resized, list(p.height_width))
    return cropped


def longest_side(width: int, height: int, size: tuple[int, int]) -> int:
    """Return how many pixels of a longer side are resized."""
    return math.ceil(_LONGEST_STRIP * min(width, height) * max(size) / min(size))


def covering(height: int, width: int, size: tuple[int, int], crop_ratio: float) -> list[int]:
    """The size, for torchvision's `resize`, at which an image covers `size` / crop_ratio."""
    if size[0] == size[1]:
        return [round(size[0] / crop_ratio)]
    scale = max(size[0] / height, size[1] / width) / crop_ratio
    return [max(size[0], round(height * scale)), max(size[1], round(width * scale))]


def random_crop(
    image: Image.Image, size: tuple[int, int], draws: list[float], *, interpolation: str = "bilinear"
) -> Tensor:
    """A random part of an RGB image as (3, height, width) uint8, mirrored half of the time.

    `draws`: 41 numbers of [0, 1): 4 for each of ten attempts, and the mirror.
    """
    top, left, height, width = random_box(image.width, image.height, draws[:-1])
    transforms = _transforms()
    part, method = _part(image, top, left, height, width), _METHODS[interpolation]
    part = transforms.resize(part, list(size), interpolation=method, antialias=True)
    return transforms.pil_to_tensor(transforms.horizontal_flip(part) if draws[-1] < 0.5 else part)


def middle(outer: int, inner: int) -> int:
    """Return where the middle `inner` of `outer` pixels begin, rounded as torchvision's centre crop."""
    return round((outer - inner) / 2.0)


def _part(image: Image.Image, top: int, left: int, height: int, width: int) -> Image.Image:
    """A part, without the pixel limit of `Image.crop`."""
    part = Image.new(image.mode, (width, height))
    part.paste(image, (-left, -top))
    return part


def random_box(width: int, height: int, draws: list[float]) -> tuple[int, int, int, int]:
    """(top, left, height, width): 8 to 100 % of the area, 3:4 to 4:3 (Szegedy et al., arXiv 1409.4842, section 6).

    After ten misfits the largest centred part of an allowed shape.
    """
    for area, ratio, vertical, horizontal in zip(*(iter(draws),) * 4, strict=True):
        pixels = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        shape = math.exp((2 * ratio - 1) * _LOG_RATIO)
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(vertical * (height - h + 1)), int(horizontal * (width - w + 1)), h, w
    limit = math.exp(_LOG_RATIO)
    w, h = min(width, max(1, round(height * limit))), min(height, max(1, round(width * limit)))
    return (height - h) // 2, (width - w) // 2, h, w


def prepare() -> None:
    """Import before worker processes are forked."""
    _transforms()


@functools.cache
def _transforms() -> ModuleType:
    from torchvision.transforms.v2 import functional  # lazy: it takes seconds, and other data sets do not need it

    return functional
