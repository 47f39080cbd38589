"""A user's DataLoader as a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from compress.data.base import Batch, BatchPlan, DataSet, Split, hash_seed
from compress.data.preprocessing import Preprocessing
from compress.errors import DataError
from compress.graph.batches import split_batch


class LoaderSplit(Split):
    """A DataLoader's images, normalized and augmented by its data set, in an order of our own.

    With workers, augmentation draws from the epoch's seed: after a resume within it anew.

    Args:
        loader: over a data set with a length.
        seed: of the order.

    Raises:
        DataError: no such data set, or a sampler of its own.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int = 0) -> None:
        super().__init__(labels=(), preprocessing=_as_given(_example(loader)), seed=seed)
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Return images and targets at `indices`; see `Split.load`."""
        return _on(self.loader.collate_fn([self.dataset[index] for index in indices]), device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield batches, read ahead by the loader's processes."""
        if not self.loader.num_workers:
            yield from super().batches(plan, device=device)
            return
        passes = DataLoader(
            self.dataset,
            batch_sampler=[indices for indices in self.batch_indices(plan) if indices],
            num_workers=self.loader.num_workers,
            collate_fn=self.loader.collate_fn,
            worker_init_fn=self.loader.worker_init_fn,
            generator=torch.Generator().manual_seed(hash_seed(self.seed, plan.epoch or 0)),
        )
        for batch in passes:
            yield _on(batch, torch.device(device))


def loader_data(train: DataLoader[Any], val: DataLoader[Any] | None = None, *, seed: int = 0) -> DataSet:
    """Two loaders as data; without `val` the training images are evaluated."""
    split = LoaderSplit(train, seed=seed)
    return DataSet(train=split, val=split if val is None else LoaderSplit(val, seed=seed))


def _example(loader: DataLoader[Any]) -> Tensor:
    """Check the loader; return its first images."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the loader's data set is a {type(dataset).__name__} without a length: training needs images by number "
            "(__getitem__ and __len__), so that it can go on after a stop"
        )
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)) or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        raise DataError(
            f"the loader has a sampler of its own ({type(loader.sampler).__name__}): give one with shuffle=True or "
            "False, since the order of training follows from its seed; repeat images in the data set to weight them"
        )
    if not len(dataset):
        raise DataError("the loader's data set is empty")
    return _on(loader.collate_fn([dataset[0]]), torch.device("cpu"))[0]


def _on(batch: Any, device: torch.device) -> Batch:
    inputs, targets = split_batch(batch)
    given = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(tensors) != 1 or len(given) != 1:
        got = ", ".join(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise DataError(f"a batch holds the inputs {got}; training takes one tensor of images and its targets")
    return tensors[0].to(device), tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, targets)


def _as_given(images: Tensor) -> Preprocessing:
    """Return the preprocessing of images that are inputs already."""
    channels = images.shape[1] if images.ndim > 1 else 1
    size = (images.shape[-2], images.shape[-1]) if images.ndim == 4 else 1
    return Preprocessing(
        image_size=size,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        channels="RGB" if channels == 3 else "other",
    )
