"""The pictures of the study: on the GPU for training, and in files for the processes that search and measure."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

import compress
from analysis.low_bits.step import SIDE
from compress.data.base import DataSet, Split
from compress.data.memory import MemorySplit

CALIBRATION = 256
_SHAPES = (50_000, 10_000)
_DRAWN_AT_ONCE = 2_000


@dataclass(frozen=True, kw_only=True)
class Files:
    """Arrays on disk, the pictures normalized, as float32.

    Attributes:
        calibration: (256, 3, 32, 32) of the training split.
        images, targets: of the test split.
    """

    calibration: Path
    images: Path
    targets: Path


def load(name: str, root: str, *, train: int | None, val: int | None, device: torch.device) -> DataSet:
    """Return CIFAR-10, or as many pictures of `shapes`, which are drawn once and without augmentation."""
    if name == "cifar10":
        spec = compress.DataSpec(name=name, root=root, image_size=SIDE, train_images=train, val_images=val)
        return compress.load_data(spec)
    spec = compress.DataSpec(
        name=name, image_size=SIDE, num_classes=10, train_images=train or _SHAPES[0], val_images=val or _SHAPES[1]
    )
    drawn = compress.load_data(spec)
    return DataSet(train=_kept(drawn.train, device), val=_kept(drawn.val, device))


def _kept(split: Split, device: torch.device) -> MemorySplit:
    """Draw all pictures of a split as bytes."""
    pixels, targets = [], []
    for part in torch.arange(len(split)).split(_DRAWN_AT_ONCE):
        images, classes = split.load(part.tolist(), epoch=None, device=device)
        pixels.append(split.preprocessing.pixels(images).cpu())
        targets.append(classes.cpu())
    return MemorySplit(
        torch.cat(pixels), torch.cat(targets), labels=split.labels, preprocessing=split.preprocessing, seed=split.seed
    )


def files(name: str, o: Namespace, folder: Path) -> Files:
    """Return what other processes need, written into a folder where it is not there yet."""
    found = Files(**{part: folder / f"{name}.{part}.npy" for part in ("calibration", "images", "targets")})
    if not found.targets.is_file():
        split = load(name, o.data, train=CALIBRATION, val=o.val_images, device=torch.device("cpu"))
        np.save(found.calibration, _normalized(cast(MemorySplit, split.train)))
        np.save(found.images, _normalized(cast(MemorySplit, split.val)))
        np.save(found.targets, cast(MemorySplit, split.val).targets.numpy())
    return found


def _normalized(split: MemorySplit) -> NDArray[np.float32]:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (split.preprocessing.mean, split.preprocessing.std))
    return cast("NDArray[np.float32]", ((split.images / 255 - mean) / std).numpy())
