"""The end of a training by its metric: the best epoch's weights, and stopping before the last epoch.

Both follow from the epochs so far alone, so that a training that is resumed ends as one that is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, RecipeError
from compress.support.meters import TaskMetric
from compress.training.log import EpochRow, best_row
from compress.training.spec import TrainSpec


class BestWeights:
    """The weights and buffers of the epoch with the best value of the metric, the first of equals, on the CPU.

    Args:
        model: the network in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: dict[str, Tensor] = {}

    def offer(self, history: Sequence[EpochRow], metric: TaskMetric) -> None:
        """Keep the model's present state if the last epoch of `history` is the best of all."""
        if best_row(history, metric) is history[-1]:
            self.state = {name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()}

    def install(self) -> None:
        """Give the model the state that was kept, if there is one."""
        if self.state:
            self.model.load_state_dict(self.state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of a checkpoint.

        Raises:
            CheckpointError: it belongs to another model.
        """
        own = self.model.state_dict()
        if state and (state.keys() != own.keys() or any(state[n].shape != t.shape for n, t in own.items())):
            raise CheckpointError("the checkpoint's best epoch is of another model: build the model as it was")
        self.state = dict(state)


def check_reference(spec: TrainSpec, reference: float | None) -> None:
    """Refuse `stop_within` without anything to compare with.

    Raises:
        RecipeError: there is no reference.
    """
    if spec.stop_within is not None and reference is None:
        raise RecipeError("stop_within is set without a reference: pass the metric of the float network")


def stop_reason(
    history: Sequence[EpochRow], spec: TrainSpec, metric: TaskMetric, reference: float | None
) -> str | None:
    """Return why a training ends after the epochs of `history`, before its last epoch; None if it goes on.

    Args:
        history: a row for each epoch so far.
        spec: its `stop_within` and `stop_after`.
        metric: that judges the network.
        reference: value of the metric that `stop_within` compares with.
    """
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


@torch.no_grad()
def best_state(tensors: Mapping[str, Tensor], prefix: str = "best.") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that belong to its best epoch, by the model's names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
