"""The report of a training: a row for each epoch, in memory, in the checkpoint and in a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from compress.training.evaluate import Accuracy
from compress.training.tensor_file import writing


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of training. Shares are 0 to 1; None = not evaluated after this epoch.

    Attributes:
        epoch: number of the epoch, counted from 1.
        step: optimizer steps since the training began.
        lr: learning rate of the epoch's last step.
        train_loss: mean over the epoch's images of the loss that was minimized (smoothing and distillation included).
        train_top1: share of the epoch's training images classified correctly, in training mode, during the epoch.
        val_top1, val_top5: accuracy on the evaluation split.
        val_loss: mean cross entropy on the evaluation split.
        images_per_s: training images of all processes per second.
        seconds: time of training, without evaluation and checkpoints.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    train_top1: float
    val_top1: float | None = None
    val_top5: float | None = None
    val_loss: float | None = None
    images_per_s: float
    seconds: float

    def sentence(self, epochs: int) -> str:
        """Return the epoch's figures as a line of a log; `epochs` is the length of the training."""
        tested = "" if self.val_top1 is None else f", top-1 {self.val_top1:.2%}"
        return (
            f"epoch {self.epoch} of {epochs}, loss {self.train_loss:.4g}{tested}, {self.images_per_s:.0f} images/s, "
            f"{self.seconds:.0f} s"
        )


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Result of a training.

    Attributes:
        history: a row for each epoch, those before a resume included.
        final: accuracy of the model after the training.
        best: the row of the highest val_top1, the first of equals; None without epochs.
        images_per_s: training images of all processes per second, over all epochs.
        seconds: time of training, without evaluation and checkpoints; that before a resume included.
        steps: number of optimizer steps.
        resumed_from: optimizer step at which a checkpoint was resumed; None for a training from its start.
    """

    history: tuple[EpochRow, ...]
    final: Accuracy
    best: EpochRow | None
    images_per_s: float
    seconds: float
    steps: int
    resumed_from: int | None


def summarize(history: tuple[EpochRow, ...], final: Accuracy, *, resumed_from: int | None) -> TrainReport:
    """Return the report of a training whose epochs are `history`."""
    seconds = sum(row.seconds for row in history)
    images = sum(row.images_per_s * row.seconds for row in history)
    evaluated = [row for row in history if row.val_top1 is not None]
    return TrainReport(
        history=history,
        final=final,
        best=max(evaluated, key=lambda row: row.val_top1 or 0.0, default=None),
        images_per_s=images / seconds if seconds else 0.0,
        seconds=seconds,
        steps=history[-1].step if history else 0,
        resumed_from=resumed_from,
    )


def write_log(rows: Iterable[EpochRow], path: Path) -> Path:
    """Write `rows` as CSV, whole or not at all: the names first, an empty cell where an epoch was not evaluated.

    Raises:
        CheckpointError: the file cannot be written.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(EpochRow)], lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
    with writing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")
    return path
