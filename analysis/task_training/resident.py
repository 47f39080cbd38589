"""Pictures with masks or boxes that are decoded once, kept on the device and augmented there, for short GPU leases.

The augmentation is that of `compress.data.masks` and `compress.data.boxes` (scale, position, mirror), in one resampling
of the batch; evaluation pictures are theirs to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data.base import Batch, DataSet, Split, hash_seed
from compress.data.boxes import targets_on
from compress.data.counter import uniform
from compress.data.load import load_data
from compress.data.masks import NO_CLASS
from compress.data.memory import to_device
from compress.data.spec import DataSpec

_DRAWS = 4
_LEAST_VISIBLE = 0.3
_GREY = 128.0


def masks(spec: DataSpec) -> DataSet:
    """Return the splits of `data.name: masks`, resident."""
    return _resident(spec, "masks", (0.5, 2.0))


def voc(spec: DataSpec) -> DataSet:
    """Return the splits of `data.name: voc`, resident."""
    return _resident(spec, "voc", (0.7, 1.4))


@lru_cache(maxsize=4)
def _resident(spec: DataSpec, name: str, scales: tuple[float, float]) -> DataSet:
    data = load_data(replace(spec, name=name))
    return DataSet(train=Resident(data.train, scales if spec.augment else None), val=Resident(data.val, None))


class Resident(Split):
    """A split whose pictures are on the device.

    Args:
        split: of masks or of boxes.
        scales: smallest and largest scale of training pictures; None = they are not augmented.
    """

    def __init__(self, split: Split, scales: tuple[float, float] | None) -> None:
        super().__init__(labels=split.labels, preprocessing=split.preprocessing, seed=split.seed)
        self.split, self.scales = split, scales
        self._kept: dict[str, tuple[Tensor, Any]] = {}

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.split)

    def content(self) -> Iterator[bytes | str]:
        """Yield what the split itself tells of its pictures."""
        yield from self.split.content()

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Return images and targets at `indices`; see `Split.load`."""
        all_pixels, all_targets = self._on(device)
        chosen = torch.tensor(indices)
        there = to_device(chosen, device)
        pixels = all_pixels[there].float()
        if isinstance(all_targets, Tensor):
            targets: Any = all_targets[there].long()
        else:
            targets = [all_targets[index] for index in indices]
        if epoch is not None and self.scales is not None:
            draws = uniform(hash_seed(self.seed, epoch), chosen, _DRAWS)
            pixels, targets = augmented(pixels, targets, draws, self.scales)
        if not isinstance(targets, Tensor):
            targets = targets_on([(row["boxes"], row["labels"], row["ignored"]) for row in targets], device)
        return self.preprocessing.normalize(pixels / 255), targets

    def _on(self, device: torch.device) -> tuple[Tensor, Any]:
        """Return the pixels and targets of all pictures on a device; they are decoded once, in threads."""
        if not self._kept:
            self._kept["cpu"] = self._decoded()
        if device.type not in self._kept:
            pixels, targets = self._kept["cpu"]
            kept = targets.to(device) if isinstance(targets, Tensor) else targets  # boxes are moved on the CPU
            self._kept[device.type] = (pixels.to(device), kept)
        return self._kept[device.type]

    def _decoded(self) -> tuple[Tensor, Any]:
        shares = [list(range(i, min(i + 16, len(self)))) for i in range(0, len(self), 16)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            batches = list(pool.map(lambda part: self.split.load(part, epoch=None, device=torch.device("cpu")), shares))
        pixels = torch.cat([self.preprocessing.pixels(images) for images, _ in batches])
        if isinstance(batches[0][1], Tensor):
            return pixels, torch.cat([targets for _, targets in batches]).to(torch.uint8)
        return pixels, [row for _, targets in batches for row in targets]


def augmented(pixels: Tensor, targets: Any, draws: Tensor, scales: tuple[float, float]) -> tuple[Tensor, Any]:
    """Scale, move and mirror pictures (N, 3, H, W) of 0 to 255 together with their masks or boxes.

    Args:
        pixels: of the batch, on its device.
        targets: (N, H, W) int64 on that device, or boxes of each picture on the CPU.
        draws: (N, 4) of [0, 1): scale, vertical and horizontal position, mirror; on the CPU.
        scales: smallest and largest scale.
    """
    height, width = pixels.shape[-2:]
    scale = scales[0] * (scales[1] / scales[0]) ** draws[:, 0]
    top = draws[:, 1] * height * (1 - scale)  # of the scaled picture in the result, in pixels; negative if it is larger
    left = draws[:, 2] * width * (1 - scale)
    mirror = torch.where(draws[:, 3] < 0.5, -1.0, 1.0).double()
    # From the result's coordinates of -1 to 1 to the picture's: x_in = (x_out - centre) / scale.
    centre_x, centre_y = (2 * left / width + scale - 1), (2 * top / height + scale - 1)
    zero = torch.zeros_like(scale)
    rows = torch.stack((mirror / scale, zero, -centre_x / scale, zero, 1 / scale, -centre_y / scale), 1)
    matrices = to_device(rows.view(-1, 2, 3).float(), pixels.device)
    grid = F.affine_grid(matrices, list(pixels.shape), align_corners=False)
    if isinstance(targets, Tensor):
        image = F.grid_sample(pixels, grid, mode="bilinear", align_corners=False)
        moved = F.grid_sample(targets[:, None].float() - NO_CLASS, grid, mode="nearest", align_corners=False)
        return image.round().clamp_(0, 255), (moved[:, 0] + NO_CLASS).long()
    image = F.grid_sample(pixels - _GREY, grid, mode="bilinear", align_corners=False) + _GREY
    values = torch.stack([scale, left, top, mirror], 1).tolist()
    found = [_moved(row, value, (height, width)) for row, value in zip(targets, values, strict=True)]
    return image.round().clamp_(0, 255), found


def _moved(row: dict[str, Tensor], values: list[float], size: tuple[int, int]) -> dict[str, Tensor]:
    """Return the boxes of a picture after `augmented`, those left to at least 30 %."""
    scale, left, top, mirror = values
    height, width = size
    boxes = row["boxes"]
    whole = boxes * scale + boxes.new_tensor([left, top, left, top])
    cut = torch.minimum(whole.clamp(min=0), boxes.new_tensor([width, height, width, height]))
    kept = _areas(cut) >= _LEAST_VISIBLE * _areas(whole)
    if mirror < 0:
        cut = torch.stack([width - cut[:, 2], cut[:, 1], width - cut[:, 0], cut[:, 3]], 1)
    return {"boxes": cut[kept], "labels": row["labels"][kept], "ignored": row["ignored"][kept]}


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
