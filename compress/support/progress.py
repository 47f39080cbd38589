"""The listener that long work reports its progress to."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Listener of long work; `fields` are figures beside the bar of `task`."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Begin a task of `total` units, `done` already finished."""

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Finish `amount` units, with the newest figures."""

    def finish(self, task: str) -> None:
        """End the task."""

    def note(self, text: str) -> None:
        """Show a line of its own."""


class NoProgress:
    """The listener that ignores everything: the default of every function."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Do nothing."""

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Do nothing."""

    def finish(self, task: str) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""
