"""For Transformers' Trainer; needs `transformers`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from compress.training.loops.cycle import QuantizationCycle


class ClassifierForTrainer(nn.Module):
    """`pixel_values` and `labels` in, {"loss", "logits"} out.

    Args:
        network: returns logits, alone, first, or as "logits".
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (N, classes), and with labels (N,) the cross entropy."""
        found: Any = self.network(pixel_values)
        if not isinstance(found, Tensor):
            found = found["logits"] if hasattr(found, "keys") else getattr(found, "logits", None) or found[0]
        loss = {} if labels is None else {"loss": F.cross_entropy(found.float(), labels)}
        return {**loss, "logits": found}


class QuantizationTrainerCallback(TrainerCallback):
    """Freezing, averaging and export during `Trainer.train`.

    The cycle begins before:
    `Trainer(model=ClassifierForTrainer(cycle.begin(model)), callbacks=[QuantizationTrainerCallback(cycle)], ...)`.
    """

    def __init__(self, cycle: QuantizationCycle) -> None:
        self.cycle = cycle

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.cycle.epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.cycle.before_step(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.cycle.after_step(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.cycle.end()
