"""The pictures of the study: on the GPU for training, and in files for the processes that search and measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import compress
from analysis.low_bits.step import PAD, SIDE, Images
from compress.data.base import DataSet, Split
from compress.data.memory import MemorySplit

CALIBRATION = 256
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
        name=name, image_size=SIDE, num_classes=10, train_images=train or 50_000, val_images=val or 10_000
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


def write(images: Images, folder: Path, name: str) -> Files:
    """Write what the other processes need."""
    found = Files(**{part: folder / f"{name}.{part}.npy" for part in ("calibration", "images", "targets")})
    inner = images.pixels[:CALIBRATION, PAD:-PAD, PAD:-PAD].permute(0, 3, 1, 2)
    for path, pixels in ((found.calibration, inner), (found.images, images.val[0])):
        np.save(path, ((pixels.to(images.mean) - images.mean) / images.std).cpu().numpy())
    np.save(found.targets, images.val[1].cpu().numpy())
    return found
