"""A split of files that worker processes read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from compress.data.base import Batch, BatchPlan, Split, seed_of_changes
from compress.data.folder import MEAN, STD, worker_count
from compress.data.memory import to_device
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DataSpec
from compress.data.workers import Workers
from compress.errors import DataError

Item = tuple[Tensor | None, Any, str, str]
"""Pixels (3, H, W) uint8 or None, target, file name, and the error."""


class ItemSplit(Split):
    """A split of the user's files.

    Args:
        augment: change training images at random.
    """

    def __init__(self, labels: Sequence[str], spec: DataSpec, *, augment: bool) -> None:
        preprocessing = Preprocessing.of(spec, mean=MEAN, std=STD)
        super().__init__(labels=tuple(labels), preprocessing=preprocessing, seed=spec.seed)
        self.augment, self.on_error, self.max_pixels = augment, spec.on_error, spec.max_pixels
        self._workers = Workers(worker_count() if spec.workers is None else spec.workers)

    @abstractmethod
    def reader(self) -> Dataset[Item]:
        """Items in the stored order, by their `Place`."""

    @abstractmethod
    def targets_of(self, found: list[Any], device: torch.device) -> Any:  # a tensor, or a list with one for each image
        """Targets of a batch in the task's form."""

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, H, W) and targets, read here.

        Raises:
            DataError: names the unreadable or wrong file, unless `on_error` is skip.
        """
        reader, seed = self.reader(), seed_of_changes(self.seed, epoch, augment=self.augment)
        return self._finish([reader[index, seed] for index in indices], device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield batches, read ahead by worker processes."""
        seed = seed_of_changes(self.seed, plan.epoch, augment=self.augment)
        for items in self._workers.read(self.reader(), list, self.batch_indices(plan), seed):
            images, targets = self._finish(items, torch.device(device))
            if len(targets):
                yield images, targets

    def _finish(self, items: list[Any], device: torch.device) -> Batch:
        good = []
        for pixels, target, file, problem in items:
            if not problem:
                good.append((pixels, target))
            elif self.on_error == "raise":
                raise DataError(f"{problem}; data.on_error: skip leaves it out")
            elif file not in self.skipped:
                self.skipped.append(file)
        height, width = self.preprocessing.height_width
        pixels = torch.stack([p for p, _ in good]) if good else torch.empty(0, 3, height, width, dtype=torch.uint8)
        images = self.preprocessing.normalize(to_device(pixels, device).float().div_(255))
        return images, self.targets_of([target for _, target in good], device)
