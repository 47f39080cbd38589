"""The listener of long work."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """`fields` are figures beside the bar of `task`. Methods that a subclass does not define do nothing."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Begin a task of `total` units, `done` already finished."""
        return

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Finish `amount` units, with the newest figures."""
        return

    def finish(self, task: str) -> None:
        """End the task."""
        return

    def note(self, text: str) -> None:
        """Show a line of its own."""
        return


class NoProgress(Progress):
    """Ignores everything: the default."""


def tracked(progress: Progress, task: str, items: Collection[T], *, done: int = 0) -> Iterator[T]:
    """Yield items and tell of each; `done` were finished before."""
    progress.start(task, len(items) + done, done=done)
    for item in items:
        yield item
        progress.advance(task)
    progress.finish(task)
