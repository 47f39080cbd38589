"""The report of a training, its progress as a checkpoint holds it, and callbacks that log it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError, CompressError, RecipeError
from compress.support.meters import TaskMetric
from compress.support.text import csv_text
from compress.support.validation import parse
from compress.training import TrainSpec
from compress.training.checkpoint import Contents, writing
from compress.training.passes import Evaluation
from compress.version import install_hint

# Share of the time in which training waits for images, from which on a line says so.
_WAITS = 0.1


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """An epoch; shares are 0 to 1, None = not evaluated.

    Attributes:
        train_loss: as minimized, with smoothing and distillation.
        seconds: without evaluation and checkpoints.
        waited: share of that time that the first process's device waited for images, if known.
        val: figures of other tasks.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    train_top1: float | None = None
    val_top1: float | None = None
    val_top5: float | None = None
    val_loss: float | None = None
    images_per_s: float
    seconds: float
    waited: float | None = None
    val: Mapping[str, float] = field(default_factory=dict)

    def figure(self, name: str) -> float | None:
        return self.val.get(name, getattr(self, f"val_{name}", None))

    def sentence(self, epochs: int, metric: TaskMetric) -> str:
        value = self.figure(metric.name)
        tested = "" if value is None else f", {metric.title} {metric.text(value)}"
        waited = (
            ""
            if self.waited is None or self.waited < _WAITS
            else f", {100 * self.waited:.0f} % of it waiting for images"
        )
        return (
            f"epoch {self.epoch} of {epochs}, loss {self.train_loss:.4g}{tested}, {self.images_per_s:.0f} images/s, "
            f"{self.seconds:.0f} s{waited}"
        )

    def evaluation(self, images: int) -> Evaluation | None:
        if self.val_loss is None:
            return None
        tops = {name: value for name in ("top1", "top5") if (value := getattr(self, f"val_{name}")) is not None}
        return Evaluation(values={**tops, **self.val}, loss=self.val_loss, images=images)


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Result of a training; `seconds` as `EpochRow`, with those before a resume."""

    history: tuple[EpochRow, ...]
    final: Evaluation
    best: EpochRow | None
    images_per_s: float
    seconds: float
    steps: int
    resumed_from: int | None
    stopped: str | None = None


def summarize(
    history: tuple[EpochRow, ...],
    final: Evaluation,
    *,
    metric: TaskMetric,
    resumed_from: int | None,
    stopped: str | None = None,
) -> TrainReport:
    seconds = sum(row.seconds for row in history)
    images = sum(row.images_per_s * row.seconds for row in history)
    return TrainReport(
        history=history,
        final=final,
        best=best_row(history, metric),
        images_per_s=images / seconds if seconds else 0.0,
        seconds=seconds,
        steps=history[-1].step if history else 0,
        resumed_from=resumed_from,
        stopped=stopped,
    )


def best_row(history: Iterable[EpochRow], metric: TaskMetric) -> EpochRow | None:
    """The first of equals; None if none was evaluated."""
    sign = 1 if metric.direction == "higher" else -1
    evaluated = [(sign * value, row) for row in history if (value := row.figure(metric.name)) is not None]
    return max(evaluated, key=lambda pair: pair[0])[1] if evaluated else None


def write_log(rows: Iterable[EpochRow], path: Path) -> Path:
    rows = list(rows)
    others = list(dict.fromkeys(f"val_{name}" for row in rows for name in row.val))
    names = [name for name in (f.name for f in fields(EpochRow)) if name != "val" and not (others and "_top" in name)]
    columns = [*names, *others]
    cells = [asdict(row) | {f"val_{name}": value for name, value in row.val.items()} for row in rows]
    texts = ([f"{v:.6g}" if isinstance(v, float) else v for v in map(row.get, columns)] for row in cells)
    with writing(path) as temporary:
        temporary.write_text(csv_text(columns, texts), encoding="utf-8")
    return path


def check_reference(spec: TrainSpec, reference: float | None) -> None:
    if spec.stop_within is not None and reference is None:
        raise RecipeError("stop_within is set without a reference: pass the metric of the float network")


def stop_reason(
    history: Sequence[EpochRow], spec: TrainSpec, metric: TaskMetric, reference: float | None
) -> str | None:
    """Why a training ends early after the epochs of `history`; None if it goes on."""
    values = [value for row in history if (value := row.figure(metric.name)) is not None]
    if not history or not values or history[-1].figure(metric.name) is None or len(history) >= spec.epochs:
        return None
    if spec.stop_within is not None and reference is not None:
        drop = metric.drop(reference, values[-1])
        if drop <= spec.stop_within:
            return (
                f"{metric.title} {metric.text(values[-1])} is within {spec.stop_within:g} of the reference, "
                f"{metric.text(reference)}"
            )
    if spec.stop_after is not None:
        sign = 1 if metric.direction == "higher" else -1
        best = max(range(len(values)), key=lambda i: (sign * values[i], -i))
        since = len(values) - 1 - best
        if since >= spec.stop_after:
            return f"{since} evaluations gave no better {metric.title} than {metric.text(values[best])}"
    return None


@dataclass
class Position:
    """Position in a training, and the present epoch's sums over all processes."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished optimizer steps of this epoch
    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0  # of the seconds, without a step to compute
    history: list[EpochRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # files of the training split that could not be read

    def row(self, seen: Evaluation | None, *, step: int, lr: float, counted: object) -> EpochRow:
        """The epoch that ended; `seen` is its evaluation, `counted` None if correct images are not counted."""
        values = dict(seen.values) if seen else {}
        return EpochRow(
            epoch=self.epoch + 1,
            step=step,
            lr=lr,
            train_loss=self.loss / self.images,
            train_top1=None if counted is None else self.correct / self.images,
            val_top1=values.pop("top1", None),
            val_top5=values.pop("top5", None),
            val_loss=seen.loss if seen else None,
            images_per_s=self.images / self.seconds,
            seconds=self.seconds,
            waited=min(1.0, self.waited / self.seconds),
            val=values,
        )

    def figures(self, counted: object) -> dict[str, float]:
        """The epoch's means so far; nothing before the first reading."""
        if not self.images or not self.seconds:
            return {}
        correct = {} if counted is None else {"accuracy": self.correct / self.images}
        return {"loss": self.loss / self.images, **correct, "images_per_s": self.images / self.seconds}

    @classmethod
    def read(cls, contents: Contents, *, epochs: int, steps_per_epoch: int) -> Position:
        position, lines = parse(cls, contents.data["position"], where="position")
        if position is not None:
            inside = 0 <= position.epoch <= epochs and 0 <= position.step < max(1, steps_per_epoch)
            if not inside or len(position.history) != position.epoch:
                lines = [
                    f"it is at epoch {position.epoch}, step {position.step}, with {len(position.history)} rows, of "
                    f"{epochs} epochs of {steps_per_epoch} steps"
                ]
        if position is None or lines:
            raise CheckpointError(f"{contents.path} is damaged: {'; '.join(lines)}. Start a new training")
        return position


def diverged(problem: str, saved: str) -> CompressError:
    return CompressError(
        f"{problem}: the training has diverged.{saved} Try a lower lr, a longer warm-up, clip_grad_norm: 1, or "
        "precision bf16 or fp32 in place of fp16"
    )


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


class Logger(Callback):
    """Writes figures; a subclass says where.

    Args:
        every: steps; epochs are always written.
    """

    def __init__(self, *, every: int = 10) -> None:
        self.every = every

    @abstractmethod
    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a training's settings; by default nothing."""

    def close(self) -> None: ...

    def begin(self, name: str, spec: TrainSpec, *, done: int) -> None:
        self.settings(name, {f"{name}/{key}": value for key, value in asdict(spec).items()})

    def step(self, name: str, step: int, figures: Mapping[str, float]) -> None:
        if step % self.every == 0:
            self.log({f"{name}/{key}": value for key, value in figures.items()}, step)

    def epoch(self, name: str, row: EpochRow) -> None:
        figures = {"epoch": float(row.epoch), "train_loss": row.train_loss, "val_loss": row.val_loss}
        figures |= {"val_top1": row.val_top1, "val_top5": row.val_top5}
        figures |= {f"val_{key}": value for key, value in row.val.items()}
        self.log({f"{name}/{key}": value for key, value in figures.items() if value is not None}, row.step)


class TensorBoardLogger(Logger):
    """Event files of TensorBoard in `folder`."""

    def __init__(self, folder: Path | str = "runs/tensorboard", *, every: int = 10) -> None:
        super().__init__(every=every)
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional: the extra `tensorboard`
        except ImportError as error:
            raise _missing("tensorboard", error) from None
        self.writer: Any = SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def end(self, name: str, report: TrainReport) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Client(Logger):
    """A library with functions for settings, figures and the end."""

    library: str

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        super().__init__(every=every)
        try:
            self.module: Any = __import__(self.library)  # optional: the extra of the same name
        except ImportError as error:
            raise _missing(self.library, error) from None
        self.start(**options)

    @abstractmethod
    def start(self, **options: Any) -> None: ...


class MLflowLogger(_Client):
    """A run of MLflow; `options` are those of `mlflow.start_run`, such as run_name."""

    library = "mlflow"

    def start(self, **options: Any) -> None:
        """Begin a run, or go on with the active one."""
        self.own = self.module.active_run() is None
        if self.own:
            self.module.start_run(**options)

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        self.module.log_params({key.replace("/", "."): str(value)[:500] for key, value in values.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.module.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        if self.own:
            self.module.end_run()


class WandbLogger(_Client):
    """A run of Weights & Biases; `options` are those of `wandb.init`."""

    library = "wandb"

    def start(self, **options: Any) -> None:
        self.run = self.module.init(**options)

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """The step is among the figures, as each training counts its own."""
        self.module.log({**figures, "step": step})

    def close(self) -> None:
        self.module.finish()


class TrackioLogger(WandbLogger):
    """A run of trackio; `options` are those of `trackio.init`."""

    library = "trackio"

    def settings(self, name: str, values: Mapping[str, Any]) -> None:
        """Trackio takes them at the beginning alone."""


def _missing(library: str, error: ImportError) -> RecipeError:
    return RecipeError(f"logging to {library} needs its library ({error}): {install_hint(library)}")
