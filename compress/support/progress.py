"""The listener that long work reports its progress to; callers pass one, and the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Listener of long work. `task` names a bar; `fields` are figures to show beside it."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Begin a task of `total` units, of which `done` are finished already (a resumed run)."""

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Finish `amount` units; `fields` holds the newest figures, such as loss=0.31."""

    def finish(self, task: str) -> None:
        """End the task."""

    def note(self, text: str) -> None:
        """Show a line of its own, such as the figures of an epoch."""


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
