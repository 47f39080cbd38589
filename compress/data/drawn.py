"""Splits whose images the device makes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from compress.data.base import Batch, BatchPlan, Split

CHUNK_IMAGES = 8192

Drawn = tuple[Tensor, ...]
"""Tensors that images are made from; the first dimension counts images."""


class DrawnSplit(Split):
    """A split that makes its images on the device.

    Attributes:
        chunk_images: whose random numbers are drawn together; None = `CHUNK_IMAGES` on a GPU, a batch on the CPU.
    """

    chunk_images: int | None = None

    @abstractmethod
    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Return what the images at `indices` (n,) int64 are made of."""

    @abstractmethod
    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,) of a slice of that."""

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """See `Split.load`."""
        drawn = self.draw(torch.tensor(indices, dtype=torch.int64), epoch=epoch, device=device)
        return self.make(drawn, epoch=epoch, device=device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """See `Split.batches`."""
        device = torch.device(device)
        most = self.chunk_images or (CHUNK_IMAGES if device.type == "cuda" else 1)
        for shares in _chunks([share for share in self.batch_indices(plan) if share], most):
            together = torch.tensor([index for share in shares for index in share], dtype=torch.int64)
            drawn = self.draw(together, epoch=plan.epoch, device=device)
            sizes = [len(share) for share in shares]
            for parts in zip(*(tensor.split(sizes) for tensor in drawn), strict=True):
                yield self.make(parts, epoch=plan.epoch, device=device)


def _chunks(shares: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    count = 0
    for share in shares:
        group.append(share)
        count += len(share)
        if count >= most:
            yield group
            group, count = [], 0
    if group:
        yield group
