"""Callbacks that observe a training: the interface, and TensorBoard, MLflow, Weights & Biases and trackio."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.training.log import EpochRow, TrainReport
from compress.training.spec import TrainSpec
from compress.version import install_hint


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


class Logger(Callback):
    """Writes figures; a subclass says where.

    Args:
        every: steps; epochs are always written.
    """

    def __init__(self, *, every: int = 10) -> None:
        self.every = every

    @abstractmethod
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures at a step."""

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a training's settings; by default nothing."""

    def close(self) -> None:
        """Write what is left."""

    def begin(self, name: str, spec: TrainSpec, *, done: int) -> None:
        """See `Callback.begin`."""
        self.settings(name, {f"{name}/{key}": value for key, value in asdict(spec).items()})

    def step(self, name: str, step: int, figures: Mapping[str, float]) -> None:
        """See `Callback.step`."""
        if step % self.every == 0:
            self.log({f"{name}/{key}": value for key, value in figures.items()}, step)

    def epoch(self, name: str, row: EpochRow) -> None:
        """See `Callback.epoch`."""
        figures = {"epoch": float(row.epoch), "train_loss": row.train_loss, "val_loss": row.val_loss}
        figures |= {"val_top1": row.val_top1, "val_top5": row.val_top5}
        figures |= {f"val_{key}": value for key, value in row.val.items()}
        self.log({f"{name}/{key}": value for key, value in figures.items() if value is not None}, row.step)


class TensorBoardLogger(Logger):
    """Event files of TensorBoard in `folder`.

    Raises:
        RecipeError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path | str = "runs/tensorboard", *, every: int = 10) -> None:
        super().__init__(every=every)
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional: the extra `tensorboard`
        except ImportError as error:
            raise _missing("tensorboard", error) from None
        self.writer: Any = SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `Logger.log`."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def end(self, name: str, report: TrainReport) -> None:
        """Flush; further trainings may follow."""
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class _Client(Logger):
    """A library with functions for settings, figures and the end."""

    def __init__(self, library: str, *, every: int, **start: Any) -> None:
        super().__init__(every=every)
        try:
            self.module: Any = __import__(library)  # optional: the extra of the same name
        except ImportError as error:
            raise _missing(library, error) from None
        self.start(**start)

    @abstractmethod
    def start(self, **options: Any) -> None:
        """Begin a run."""


class MLflowLogger(_Client):
    """A run of MLflow; `options` are those of `mlflow.start_run`, such as run_name."""

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        super().__init__("mlflow", every=every, **options)

    def start(self, **options: Any) -> None:
        """Begin a run, or go on with the active one."""
        self.own = self.module.active_run() is None
        if self.own:
            self.module.start_run(**options)

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Write the settings as parameters."""
        self.module.log_params({key.replace("/", "."): str(value)[:500] for key, value in values.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `Logger.log`."""
        self.module.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        """End the run if this logger began it."""
        if self.own:
            self.module.end_run()


class WandbLogger(_Client):
    """A run of Weights & Biases; `options` are those of `wandb.init`."""

    library = "wandb"

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        super().__init__(self.library, every=every, **options)

    def start(self, **options: Any) -> None:
        """Begin a run."""
        self.run = self.module.init(**options)

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Write the settings into the configuration."""
        self.run.config.update(dict(values))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures with the step among them, as each training counts its own."""
        self.module.log({**figures, "step": step})

    def close(self) -> None:
        """End the run."""
        self.module.finish()


class TrackioLogger(WandbLogger):
    """A run of trackio; `options` are those of `trackio.init`."""

    library = "trackio"

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Nothing: trackio takes them at the beginning alone."""


def _missing(library: str, error: ImportError) -> RecipeError:
    return RecipeError(f"logging to {library} needs its library ({error}): {install_hint(library)}")
