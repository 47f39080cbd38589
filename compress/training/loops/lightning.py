"""A Lightning callback; needs the extra `lightning`, or `pytorch_lightning`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback

from compress.training.checkpoint import WeightAverage
from compress.training.loops.cycle import QuantizationCycle


class QuantizationCallback(Callback):
    """Quantizes before the optimizer is made, and goes through the cycle during `fit`.

    Args:
        attribute: of the network.
    """

    def __init__(self, cycle: QuantizationCycle, *, attribute: str = "model") -> None:
        self.cycle, self.attribute = cycle, attribute
        self._step = 0
        self._means: Mapping[str, Any] | None = None
        self._swapped = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.cycle.model is None:
            setattr(pl_module, self.attribute, self.cycle.begin(getattr(pl_module, self.attribute)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.cycle.epoch(trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.cycle.before_step(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the mean if the batch ended an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self._means is not None and self.cycle.model is not None and self.cycle.qat.ema_decay is not None:
                self.cycle.average = WeightAverage(self.cycle.model, self.cycle.qat.ema_decay)
                self.cycle.average.load(self._means)
                self._means = None
            self.cycle.after_step(self._step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swapped.enter_context(self.cycle.averaged())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swapped.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.cycle.end()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.cycle.average is None else {"means": dict(self.cycle.average.means)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._means = state_dict.get("means")
