"""Callbacks that observe a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compress.training.log import EpochRow, TrainReport
from compress.training.spec import TrainSpec


class Callback:
    """A callback; override the methods that you need. With several processes only rank 0 calls it.

    >>> class Best(Callback):
    ...     def epoch(self, name, row):
    ...         print(name, row.epoch, row.val_top1)
    """

    def begin(self, name: str, spec: TrainSpec, *, done: int) -> None:
        """A training (`train`, `qat`, ...) begins, or goes on after `done` steps."""

    def step(self, name: str, step: int, figures: Mapping[str, float]) -> None:
        """A step has ended, counted from 1; `figures` are the epoch's means so far and `lr`."""

    def epoch(self, name: str, row: EpochRow) -> None:
        """An epoch has ended."""

    def end(self, name: str, report: TrainReport) -> None:
        """The training has ended."""


class Callbacks(Callback):
    """Several callbacks, called in turn."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.each = tuple(callbacks)

    def begin(self, name: str, spec: TrainSpec, *, done: int) -> None:
        """See `Callback.begin`."""
        for callback in self.each:
            callback.begin(name, spec, done=done)

    def step(self, name: str, step: int, figures: Mapping[str, float]) -> None:
        """See `Callback.step`."""
        for callback in self.each:
            callback.step(name, step, figures)

    def epoch(self, name: str, row: EpochRow) -> None:
        """See `Callback.epoch`."""
        for callback in self.each:
            callback.epoch(name, row)

    def end(self, name: str, report: TrainReport) -> None:
        """See `Callback.end`."""
        for callback in self.each:
            callback.end(name, report)
