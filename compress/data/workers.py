"""Batches made ahead of their use: by worker processes that stay for the next pass, or by a thread."""

from __future__ import annotations

import os
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compress.data import IMAGENET, NORMALIZATION, DataSpec
from compress.data.base import Batch, BatchPlan, Preprocessing, Split, seed_of_changes
from compress.data.memory import to_device
from compress.errors import DataError
from compress.support.process import core_count

T = TypeVar("T")

Place = tuple[int, int | None]  # index of an item, and the seed of its random changes; None = unchanged

_MAX_WORKERS = 8


class Workers:
    """Processes of a split; copies and pickles start their own.

    Args:
        count: at most; 0 = this one reads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: dict[Any, DataLoader[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Workers, (self.count,)

    def read(
        self,
        items: Dataset[Any],
        collate: Callable[[Any], T],
        shares: Sequence[list[int]],
        seed: int | None,
        *,
        pin: bool = False,
    ) -> Iterator[T]:
        """Batches of each share, in order; processes start before it returns.

        They stay when all has been taken, and end when a pass is left.

        `items` are called with a `Place`, the same in every call; `collate` runs in the worker; empty `shares` are left
        out; `pin` pins memory.
        """
        shares = [indices for indices in shares if indices]
        count, key = min(self.count, len(shares)), (collate, pin)
        loader = self._idle.pop(key, None)  # it is not there while another pass uses it
        if loader is None or loader.num_workers < count:
            loader = DataLoader(
                items,
                batch_sampler=_Shares(),
                num_workers=count,
                collate_fn=collate,
                pin_memory=pin,
                persistent_workers=count > 0,
                generator=torch.Generator(),  # else each pass would take a number from the global random state
            )
        sampler: Any = loader.batch_sampler
        sampler.shares, sampler.seed = shares, seed
        return self._taken(loader, iter(loader), key, len(shares))

    def _taken(self, loader: DataLoader[Any], passes: Iterator[T], key: Any, left: int) -> Iterator[T]:
        try:
            for found in passes:
                left -= 1
                yield found
        except RuntimeError as error:
            if not loader.num_workers:
                raise
            raise DataError(
                f"a worker process that reads images died ({error}): out of memory, or of shared memory? Try fewer "
                f"data.workers than {loader.num_workers}; 0 reads in the main process"
            ) from error
        finally:
            if not left:
                self._idle[key] = loader


class _Shares:
    def __init__(self) -> None:
        self.shares: Sequence[list[int]] = ()
        self.seed: int | None = None

    def __iter__(self) -> Iterator[list[Place]]:
        return ([(index, self.seed) for index in indices] for indices in self.shares)


DEPTH = 2

_POLL_S = 0.1


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` in order, each made by a thread while those before it are used.

    The thread ends with the iterator; errors of `batches` are raised here.
    """
    ready: queue.Queue[Any] = queue.Queue(DEPTH)
    stop = threading.Event()
    thread = threading.Thread(target=_make, args=(batches, device, ready, stop), name="compress-images", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            batch, made = found
            if made is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(made)
                for tensor in batch:
                    tensor.record_stream(current)
            yield batch
    finally:
        stop.set()
        thread.join()


def _make(batches: Iterator[Batch], device: torch.device, ready: queue.Queue[Any], stop: threading.Event) -> None:
    last: Any = None
    try:
        with ExitStack() as contexts:
            side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
            if side is not None:
                contexts.enter_context(torch.cuda.device(device))
                contexts.enter_context(torch.cuda.stream(side))
            for batch in batches:
                _put(ready, (batch, None if side is None else side.record_event()), stop)
                if stop.is_set():
                    return
    except BaseException as error:
        last = error
    _put(ready, last, stop)


def _put(ready: queue.Queue[Any], found: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            return ready.put(found, timeout=_POLL_S)
        except queue.Full:
            continue


def worker_count() -> int:
    """This process's cores over the processes of this machine; 8 at most."""
    return max(1, min(_MAX_WORKERS, core_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


Item = tuple[Tensor | None, Any, str, str]  # pixels (3, H, W) uint8 or None, target, file name, and the error
# Images (n, 3, H, W) uint8, their targets, and the file and error of each failure.
Decoded = tuple[Tensor, list[Any], list[tuple[str, str]]]


def collate(items: list[Item]) -> Decoded:
    good = [(pixels, target) for pixels, target, _, _ in items if pixels is not None]
    images = torch.stack([pixels for pixels, _ in good]) if good else torch.empty((0, 3, 1, 1), dtype=torch.uint8)
    failures = [(file, problem) for pixels, _, file, problem in items if pixels is None]
    return images, [target for _, target in good], failures


class ItemSplit(Split):
    """A split of the user's files.

    Args:
        augment: change training images at random.
    """

    def __init__(self, labels: Sequence[str], spec: DataSpec, *, augment: bool, crop_ratio: float = 1.0) -> None:
        mean, std = NORMALIZATION.get(spec.name, IMAGENET)
        preprocessing = Preprocessing.of(spec, mean=mean, std=std, crop_ratio=crop_ratio)
        super().__init__(labels=tuple(labels), preprocessing=preprocessing, seed=spec.seed)
        self.augment, self.on_error, self.max_pixels = augment, spec.on_error, spec.max_pixels
        self._workers = Workers(worker_count() if spec.workers is None else spec.workers)

    @abstractmethod
    def reader(self) -> Dataset[Item]:
        """Items in the stored order, by their `Place`."""

    @abstractmethod
    def targets_of(self, found: list[Any], device: torch.device) -> Tensor | list[dict[str, Tensor]]:
        """Targets of a batch in the task's form."""

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        reader, seed = self.reader(), seed_of_changes(self.seed, epoch, augment=self.augment)
        return self._finish(collate([reader[index, seed] for index in indices]), device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        yield from self.finished(self.read(self.reader(), collate, plan, torch.device(device)), torch.device(device))

    def read(
        self, reader: Dataset[Any], together: Callable[[Any], T], plan: BatchPlan, device: torch.device
    ) -> Iterator[T]:
        """Batches of `plan`, put `together` from the reader's items by the workers, in memory fit for `device`."""
        seed = seed_of_changes(self.seed, plan.epoch, augment=self.augment)
        return self._workers.read(reader, together, self.batch_indices(plan), seed, pin=device.type == "cuda")

    def finished(self, found: Iterable[Decoded], device: torch.device) -> Iterator[Batch]:
        for decoded in found:
            images, targets = self._finish(decoded, device)
            if len(targets):
                yield images, targets

    def _finish(self, decoded: Decoded, device: torch.device) -> Batch:
        pixels, targets, failures = decoded
        for file, problem in failures:
            if self.on_error == "raise":
                raise DataError(f"{problem}; data.on_error: skip leaves it out")
            if file not in self.skipped:
                self.skipped.append(file)
        if not targets:
            pixels = pixels.new_empty(0, 3, *self.preprocessing.height_width)
        images = self.preprocessing.normalize(to_device(pixels, device).float().div_(255))
        return images, self.targets_of(targets, device)
