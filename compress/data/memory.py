"""A split that fits in memory as 8-bit images: kept small, and resized, moved and normalized on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data.augment import DRAWS, Movement, move
from compress.data.base import Batch, Split, hash_seed
from compress.data.counter import uniform
from compress.data.preprocessing import Preprocessing


class MemorySplit(Split):
    """Images that were read once.

    Args:
        images: (N, 1 or 3, H, H) uint8.
        targets: (N,) int64.
        labels: name of each class.
        preprocessing: how images become a model's input.
        seed: of shuffling and augmentation.
        movement: augmentation of training images; None = none.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        labels: tuple[str, ...],
        preprocessing: Preprocessing,
        seed: int,
        movement: Movement | None = None,
    ) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=seed)
        self.images, self.targets, self.movement = images, targets, movement

    def __len__(self) -> int:
        """Number of images."""
        return len(self.targets)

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,) at `indices`; see `Split.load`."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        size = self.preprocessing.image_size
        images = resize(to_device(self.images[chosen], device).float().div_(255), size)
        if epoch is not None and self.movement is not None:
            draws = uniform(hash_seed(self.seed, epoch), chosen, DRAWS)
            images = move(images, to_device(self.movement.matrices(draws, size).float(), device))
        return self.preprocessing.normalize(images), to_device(self.targets[chosen], device)


def resize(images: Tensor, size: int) -> Tensor:
    """Resize (N, C, H, W) floats bilinearly to `size`, averaging where that makes them smaller."""
    if images.shape[-1] == size:
        return images
    smaller = size < images.shape[-1]
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=smaller)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for the work that is queued there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
