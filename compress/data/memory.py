"""A split in memory, which the device resizes, moves and normalizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data.base import Batch, DataSet, hash_seed
from compress.data.counter import bounded, uniform
from compress.data.drawn import DRAWS, Drawn, DrawnSplit, Movement, move
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DataSpec

_FINGERPRINT_BYTES = 1 << 28  # of images, read for the fingerprint at most
_MOST_SHARE = 4  # a GPU keeps images that take at most one part in so many of its free memory


class MemorySplit(DrawnSplit):
    """A split whose images were read once.

    Args:
        images: (N, 1 or 3, H, H) uint8.
        targets: (N,) int64.
        movement: augmentation, or None.
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
        self._kept: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def content(self) -> Iterator[bytes | str]:
        """Yield targets and images; of very many, evenly spread ones."""
        step = 1 + self.images.nbytes // _FINGERPRINT_BYTES
        for tensor in (self.targets, self.images[::step]):
            yield str(tuple(tensor.shape))
            yield tensor.cpu().numpy().tobytes()

    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Positions, and movements (n, 2, 3) if any."""
        chosen = to_device(indices, self._stored(device)[0].device)
        if epoch is None or self.movement is None:
            return (chosen,)
        draws = uniform(hash_seed(self.seed, epoch), indices, DRAWS)
        matrices = self.movement.matrices(draws, self.preprocessing.height_width[0]).float()
        return chosen, to_device(matrices, device)

    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,)."""
        chosen, *matrices = drawn
        images, targets = self._stored(device)
        pixels = to_device(images[chosen], device).float().div_(255)
        pixels = resize(pixels, self.preprocessing.height_width[0])
        if matrices:
            pixels = move(pixels, matrices[0])
        return self.preprocessing.normalize(pixels), to_device(targets[chosen], device)

    def _stored(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and targets on `device`, copied once if there is room."""
        if device not in self._kept:
            fits = self.images.device == device
            if device.type == "cuda" and not fits:
                fits = self.images.nbytes <= torch.cuda.mem_get_info(device)[0] // _MOST_SHARE
            place = device if fits else self.images.device
            self._kept[device] = self.images.to(place), self.targets.to(place)
        return self._kept[device]


def memory_data(
    spec: DataSpec,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    labels: tuple[str, ...],
    preprocessing: Preprocessing,
    movement: Movement,
) -> DataSet:
    """Return a data set of two (images, targets), as many of each as `spec` allows, every class in proportion."""

    def split(whole: tuple[Tensor, Tensor], limit: int | None, movement: Movement | None) -> MemorySplit:
        images, targets = whole
        kept = bounded(targets, limit)
        return MemorySplit(
            images[kept], targets[kept], labels=labels, preprocessing=preprocessing, seed=spec.seed, movement=movement
        )

    return DataSet(
        train=split(train, spec.train_images, movement if spec.augment else None),
        val=split(val, spec.val_images, None),
    )


def resize(images: Tensor, size: int) -> Tensor:
    """(N, C, H, W) floats bilinearly, antialiased where that shrinks."""
    if images.shape[-1] == size:
        return images
    smaller = size < images.shape[-1]
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=smaller)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
