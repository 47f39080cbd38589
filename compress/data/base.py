"""Interface of the data sets, their content as fingerprints, counter-based random numbers, and preprocessing."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.data import Preprocessing as Preprocessing
from compress.errors import DataError, first_few

# Images (N, C, H, W) float32, normalized; N targets: classes (N,) int64, masks (N, H, W) int64, or a task's own.
Batch = tuple[Tensor, Any]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Assignment of images to batches.

    Attributes:
        batch_size: images of one step over all processes.
        epoch: None = stored order, no augmentation; a number = that epoch's shuffle and augmentation.
        rank, world_size: this process takes elements rank, rank + world_size, ... of every batch.
        first: index of the first batch; earlier ones are skipped.
        drop_last: leave out a smaller last batch.
    """

    batch_size: int
    epoch: int | None = None
    rank: int = 0
    world_size: int = 1
    first: int = 0
    limit: int | None = None
    drop_last: bool = False


class Split(ABC):
    """Labelled images in a fixed order; batches depend on (seed, epoch, step) alone.

    Attributes:
        skipped: unreadable files so far (`data.on_error: skip`).
    """

    def __init__(self, *, labels: tuple[str, ...], preprocessing: Preprocessing, seed: int) -> None:
        self.labels = labels
        self.preprocessing = preprocessing
        self.seed = seed
        self.skipped: list[str] = []

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(labels=self.labels, images=len(self), content=digest_of(self.content()))

    def content(self) -> Iterable[bytes | str]:
        return (type(self).__qualname__, str(self.seed))

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Images and targets at `indices` of the stored order; augmented if `epoch` is a number."""

    def order(self, plan: BatchPlan) -> list[int]:
        """Indices of the whole pass.

        `limit` without an epoch samples the whole split, the same on every call.
        """
        count = len(self)
        if plan.epoch is not None:
            generator = torch.Generator().manual_seed(hash_seed(self.seed, plan.epoch))
            indices = torch.randperm(count, generator=generator).tolist()
        elif plan.limit is not None and plan.limit < count:
            generator = torch.Generator().manual_seed(hash_seed(self.seed, 0))
            indices = sorted(torch.randperm(count, generator=generator)[: plan.limit].tolist())
        else:
            indices = list(range(count))
        return indices if plan.limit is None else indices[: plan.limit]

    def batch_indices(self, plan: BatchPlan) -> list[list[int]]:
        if plan.batch_size < plan.world_size:
            raise DataError(
                f"data.batch_size is {plan.batch_size} for {plan.world_size} processes: it is the batch of all of "
                f"them together and must be at least {plan.world_size}"
            )
        order = self.order(plan)
        batches = [order[i : i + plan.batch_size] for i in range(0, len(order), plan.batch_size)]
        if plan.drop_last and len(batches) > 1 and len(batches[-1]) < plan.batch_size:
            batches.pop()
        return [batch[plan.rank :: plan.world_size] for batch in batches[plan.first :]]

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield (images, targets); an empty share of a batch is left out."""
        device = torch.device(device)
        for indices in self.batch_indices(plan):
            if indices:
                yield self.load(indices, epoch=plan.epoch, device=device)

    def notes(self) -> list[str]:
        return []

    def steps(self, plan: BatchPlan) -> int:
        count = len(self) if plan.limit is None else min(len(self), plan.limit)
        whole, rest = divmod(count, plan.batch_size)
        return max(1, whole) if plan.drop_last else whole + (rest > 0)


@dataclass(frozen=True)
class DataSet:
    """Two splits; calibration draws from `train`."""

    train: Split
    val: Split

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {"train": self.train.fingerprint, "val": self.val.fingerprint}


def seed_of_changes(seed: int, epoch: int | None, *, augment: bool) -> int | None:
    return hash_seed(seed, epoch) if epoch is not None and augment else None


def hash_seed(*parts: int) -> int:
    state = 0
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


SAMPLE = 256  # files whose bytes are part of a fingerprint; of others name and size are

_READ_BYTES = 1 << 20  # of each of them, at most


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The content of a split.

    Attributes:
        labels: class names in order.
        content: SHA-256 of `Split.content`.
    """

    labels: tuple[str, ...]
    images: int
    content: str

    def digest(self) -> str:
        return digest_of([*self.labels, str(self.images), self.content])[:16]


def digest_of(parts: Iterable[bytes | str]) -> str:
    """SHA-256 of texts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def file_parts(folder: Path, names: list[str]) -> Iterator[bytes | str]:
    """Yield names and sizes, and the first bytes of `SAMPLE` files, evenly spread; a missing file is empty."""
    step = max(1, len(names) // SAMPLE)
    for number, name in enumerate(names):
        path = folder / name
        yield name
        try:
            yield str(path.stat().st_size)
            if number % step == 0 and path.is_file():
                with path.open("rb") as file:
                    yield file.read(_READ_BYTES)
        except OSError:
            yield "unreadable"


def changed_data(there: Mapping[str, Mapping[str, Any]], here: Mapping[str, Fingerprint]) -> list[str]:
    lines = []
    for name in here.keys() & there.keys():
        old, new = there[name], here[name]
        labels = tuple(old.get("labels", ()))
        if labels != new.labels:
            lines.append(f"the classes of {name} were {first_few(labels)}, and are {first_few(new.labels)}")
        elif old.get("images") != new.images:
            lines.append(f"{name} had {old.get('images')} images, and has {new.images}")
        elif old.get("content") != new.content:
            lines.append(f"the images of {name} were added, removed, renamed, exchanged or changed")
    return sorted(lines)


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def random_bits(seed: int, indices: Tensor, count: int) -> Tensor:
    """64 random bits, (N, count) int64.

    Column j is the j-th output of a splitmix64 (Steele, Lea and Flood, OOPSLA 2014) that begins at a hash of (seed,
    index).
    """
    states = _mix(indices * _signed(_GOLDEN) + _signed(hash_seed(seed)))
    steps = torch.arange(1, count + 1, device=indices.device) * _signed(_GOLDEN)
    return _mix(states[:, None] + steps)


def uniform(seed: int, indices: Tensor, count: int) -> Tensor:
    """`random_bits` as multiples of 2^-53 in [0, 1), float64."""
    return ((random_bits(seed, indices, count) >> 11) & (1 << 53) - 1).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """The splitmix64 finalizer, in place; masks make arithmetic shifts logical."""
    state ^= (state >> 30) & (1 << 34) - 1
    state *= _signed(_FIRST)
    state ^= (state >> 27) & (1 << 37) - 1
    state *= _signed(_SECOND)
    state ^= (state >> 31) & (1 << 33) - 1
    return state


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_ORDER_SEED = 1797


def stratified_order(targets: Tensor) -> Tensor:
    """An order (N,) int64 whose every prefix has the classes in proportion."""
    count = len(targets)
    shuffled = random_bits(_ORDER_SEED, torch.arange(count), 1)[:, 0].argsort(stable=True)
    by_class = shuffled[targets[shuffled].argsort(stable=True)]
    sizes = torch.bincount(targets)
    starts = sizes.cumsum(0) - sizes
    classes = targets[by_class]
    rank = torch.arange(count) - starts[classes]
    share = torch.empty(count, dtype=torch.float64)
    share[by_class] = (rank + 0.5) / sizes[classes].double()
    return shuffled[share[shuffled].argsort(stable=True)]


def bounded(targets: Tensor, limit: int | None) -> Tensor:
    """Positions of at most `limit` images, stratified, in stored order."""
    if limit is None or limit >= len(targets):
        return torch.arange(len(targets))
    return stratified_order(targets)[:limit].sort().values
