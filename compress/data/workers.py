"""Worker processes that read ahead, and stay for the next pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from compress.errors import DataError

T = TypeVar("T")

Place = tuple[int, int | None]
"""Index of an item, and the seed of its random changes; None = unchanged."""


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

        Raises:
            DataError: a process died; while batches are taken.
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
