"""How long work tells of its progress without printing: callers pass a listener, the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Listener of long work. `task` names a bar; `fields` are figures to show beside it."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """A task of `total` units begins, `done` of which are behind it already (a resumed run)."""

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """`amount` units are done; `fields` holds the newest figures, such as loss=0.31."""

    def finish(self, task: str) -> None:
        """The task has ended."""


class NoProgress:
    """The listener that hears nothing: the default of every function."""

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Do nothing."""

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Do nothing."""

    def finish(self, task: str) -> None:
        """Do nothing."""
