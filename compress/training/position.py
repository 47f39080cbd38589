"""The progress of a training, as its checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from compress.errors import CheckpointError
from compress.training.log import EpochRow
from compress.training.tensor_file import Contents
from compress.validation import parse


@dataclass
class Position:
    """Position in a training, and the sums of the present epoch so far, over all processes."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished optimizer steps of this epoch
    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0  # of the seconds, without a step to compute
    history: list[EpochRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # files of the training split that could not be read

    @classmethod
    def read(cls, contents: Contents, *, epochs: int, steps_per_epoch: int) -> Position:
        """Return the position in a checkpoint, if it is one of this training."""
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
