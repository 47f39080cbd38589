"""Progress of a training, as in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from compress.errors import CheckpointError, CompressError
from compress.support.validation import parse
from compress.training.evaluate import Evaluation
from compress.training.log import EpochRow
from compress.training.tensor_file import Contents


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
