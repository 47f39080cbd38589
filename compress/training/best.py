"""Weights that a training ends with, and early stopping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, RecipeError
from compress.support.meters import TaskMetric
from compress.training.log import EpochRow, best_row
from compress.training.spec import TrainSpec


class BestWeights:
    """The epoch with the best metric, the first of equals, on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: dict[str, Tensor] = {}

    def offer(self, history: Sequence[EpochRow], metric: TaskMetric) -> None:
        """Keep the model's state if the last epoch is the best."""
        if best_row(history, metric) is history[-1]:
            self.state = {name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()}

    def install(self) -> None:
        """Give the model the kept state."""
        if self.state:
            self.model.load_state_dict(self.state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's state.

        Raises:
            CheckpointError: it belongs to another model.
        """
        own = self.model.state_dict()
        if state and (state.keys() != own.keys() or any(state[n].shape != t.shape for n, t in own.items())):
            raise CheckpointError("the checkpoint's best epoch is of another model: build the model as it was")
        self.state = dict(state)


def check_reference(spec: TrainSpec, reference: float | None) -> None:
    """Refuse `stop_within` without a reference.

    Raises:
        RecipeError: there is none.
    """
    if spec.stop_within is not None and reference is None:
        raise RecipeError("stop_within is set without a reference: pass the metric of the float network")


def stop_reason(
    history: Sequence[EpochRow], spec: TrainSpec, metric: TaskMetric, reference: float | None
) -> str | None:
    """Return why a training ends early after the epochs of `history`; None if it goes on."""
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
    """Tensors of the best epoch, by the model's names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class WeightAverage:
    """Running mean of a model's trainable parameters; buffers are those of the last step.

    After step t the mean takes a share 1 - min(decay, (1 + t) / (10 + t)). Weights stop hopping between two integers
    (Nagel et al., arXiv 2203.11086).

    Args:
        decay: 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.means = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the mean after `step` steps, counted from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.means.values()), [p.data for p in self.parameters.values()], share)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the mean while the block runs."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.install()
        try:
            yield
        finally:
            _copy(own, self.parameters)

    def install(self) -> None:
        """Give the model the mean."""
        _copy(self.means, self.parameters)

    def load(self, means: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's means.

        Raises:
            CheckpointError: they belong to other parameters.
        """
        if means.keys() != self.means.keys() or any(means[n].shape != m.shape for n, m in self.means.items()):
            raise CheckpointError(
                f"the checkpoint holds a mean of {len(means)} weights, and the model trains {len(self.means)} others: "
                "build the model as it was"
            )
        _copy(means, self.means)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.data.copy_(source[name])
