"""Images and the same images made smaller or noisier, for restoration: super-resolution and denoising.

The truth is a part of a file of `scale` times the input's size: random in training, the centre in evaluation. The input
is that part scaled down by cubic convolution with antialiasing (as the benchmarks of super-resolution do: Timofte et
al., NTIRE 2017), plus Gaussian noise, rounded to 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from compress.data import DataSpec
from compress.data.base import DataSet, file_parts, hash_seed, uniform
from compress.data.decode import pixels_of, read_image
from compress.data.folder import every_fourth, pictures_in
from compress.data.memory import to_device
from compress.data.workers import Item, ItemSplit, Place
from compress.errors import DataError
from compress.files import expand_user

_DRAWS = 5


def degraded_data(spec: DataSpec) -> DataSet:
    """root/train and root/val to any depth; without them, every fourth image under root is for evaluation."""
    root = expand_user(str(spec.root))
    folders = [root / name for name in ("train", "val")]
    if all(folder.is_dir() for folder in folders):
        train, val = (pictures_in(folder) for folder in folders)
    else:
        train, val = every_fourth(root)
    return DataSet(
        train=DegradedSplit(root, train[: spec.train_images], spec, augment=spec.augment),
        val=DegradedSplit(root, val[: spec.val_images], spec, augment=False),
    )


class DegradedSplit(ItemSplit):
    """Targets are the images before they were changed, float32 (n, 3, scale H, scale W), 0 to 1."""

    def __init__(self, folder: Path, files: list[Path], spec: DataSpec, *, augment: bool) -> None:
        super().__init__((), spec, augment=augment)
        self.folder, self.files, self.scale, self.noise = folder, files, spec.scale, spec.noise

    def __len__(self) -> int:
        return len(self.files)

    def content(self) -> Iterator[bytes | str]:
        yield f"{self.scale} {self.noise}"
        yield from file_parts(self.folder, [os.path.relpath(file, self.folder) for file in self.files])

    def reader(self) -> Dataset[Item]:
        return _Reader(self)

    def targets_of(self, found: list[Any], device: torch.device) -> Tensor:
        height, width = (self.scale * side for side in self.preprocessing.height_width)
        pixels = torch.stack(found) if found else torch.empty(0, 3, height, width, dtype=torch.uint8)
        return to_device(pixels, device).float().div_(255)


class _Reader(Dataset[Item]):
    def __init__(self, split: DegradedSplit) -> None:
        self.files, self.max_pixels, self.seed = split.files, split.max_pixels, split.seed
        self.size, self.scale, self.noise = split.preprocessing.height_width, split.scale, split.noise

    def __getitem__(self, place: Place) -> Item:
        index, seed = place
        file = self.files[index]
        try:
            truth = self._part(file, index, seed)
        except DataError as error:
            return None, None, str(file), str(error)
        low = degraded(truth, self.scale, self.noise, hash_seed(self.seed if seed is None else seed, index))
        return pixels_of(low), pixels_of(truth), str(file), ""

    def _part(self, file: Path, index: int, seed: int | None) -> Image.Image:
        image = read_image(file, max_pixels=self.max_pixels)
        height, width = (self.scale * side for side in self.size)
        if image.height < height or image.width < width:
            raise DataError(
                f"{file} is {image.width} x {image.height} pixels: it must have {width} x {height}, data.scale "
                f"{self.scale} times data.image_size; choose a smaller image_size"
            )
        draws = [0.5, 0.5, 1.0, 1.0, 1.0] if seed is None else uniform(seed, torch.tensor([index]), _DRAWS)[0].tolist()
        left, top = int(draws[0] * (image.width - width + 1)), int(draws[1] * (image.height - height + 1))
        part = image.crop((left, top, left + width, top + height))
        turns = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.TRANSPOSE)
        for turn, draw in zip(turns[: 3 if height == width else 2], draws[2:], strict=False):
            part = part.transpose(turn) if draw < 0.5 else part
        return part


def degraded(truth: Image.Image, scale: int, noise: float, seed: int) -> Image.Image:
    """`truth` scaled down by `scale`, with Gaussian noise of a standard deviation of `noise` grey levels."""
    small = truth.resize((truth.width // scale, truth.height // scale), Image.Resampling.BICUBIC)
    if not noise:
        return small
    levels = np.asarray(small, dtype=np.float32)
    levels = levels + noise * np.random.default_rng(seed).standard_normal(levels.shape, dtype=np.float32)
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
