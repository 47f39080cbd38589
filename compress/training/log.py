"""The report of a training, and its progress as a checkpoint holds it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from compress.errors import CheckpointError, CompressError
from compress.support.meters import TaskMetric
from compress.support.validation import parse
from compress.training.evaluate import Evaluation
from compress.training.tensor_file import Contents, writing

_WAITS = 0.1
"""Share of the time in which training waits for images, from which on a line says so."""


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """An epoch; shares are 0 to 1, None = not evaluated.

    Attributes:
        epoch: from 1.
        step: since the begin.
        lr: of the last step.
        train_loss: as minimized, with smoothing and distillation.
        train_top1: during the epoch; None for other tasks.
        val_loss: without smoothing.
        images_per_s: of all processes.
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
        """Return a figure of the evaluation by name, such as `top1` or `miou`; None = not evaluated."""
        value: float | None = self.val.get(name, getattr(self, f"val_{name}", None))
        return value

    def sentence(self, epochs: int, metric: TaskMetric) -> str:
        """Return the figures as a line of a log."""
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
        """Return the evaluation after this epoch; None if there was none."""
        if self.val_loss is None:
            return None
        tops = {name: value for name in ("top1", "top5") if (value := getattr(self, f"val_{name}")) is not None}
        return Evaluation(values={**tops, **self.val}, loss=self.val_loss, images=images)


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Result of a training.

    Attributes:
        history: with epochs before a resume.
        best: first of equals; None without epochs.
        images_per_s: of all processes.
        seconds: as `EpochRow`, with those before a resume.
        resumed_from: step; None = from the start.
        stopped: why early, or None.
    """

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
    """Return the report of a training."""
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
    """CSV; an empty cell = not evaluated.

    Raises:
        CheckpointError: the file cannot be written.
    """
    rows = list(rows)
    others = list(dict.fromkeys(f"val_{name}" for row in rows for name in row.val))
    names = [name for name in (f.name for f in fields(EpochRow)) if name != "val" and not (others and "_top" in name)]
    text = io.StringIO()
    table = csv.DictWriter(text, [*names, *others], lineterminator="\n", extrasaction="ignore")
    table.writeheader()
    for row in rows:
        cells = asdict(row) | {f"val_{name}": value for name, value in row.val.items()}
        table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells.items()})
    with writing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")
    return path


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
        """Return the epoch's means so far; nothing before the first reading."""
        if not self.images or not self.seconds:
            return {}
        correct = {} if counted is None else {"accuracy": self.correct / self.images}
        return {"loss": self.loss / self.images, **correct, "images_per_s": self.images / self.seconds}

    @classmethod
    def read(cls, contents: Contents, *, epochs: int, steps_per_epoch: int) -> Position:
        """Return the position in a checkpoint of this training."""
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
    """Loss or weights not finite; `saved` tells of the last checkpoint."""
    return CompressError(
        f"{problem}: the training has diverged.{saved} Try a lower lr, a longer warm-up, clip_grad_norm: 1, or "
        "precision bf16 or fp32 in place of fp16"
    )
