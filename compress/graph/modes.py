"""Parts of a graph that differ between training and evaluation, as modules that follow `train()` and `eval()`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn


class InTraining(nn.Module):
    """Computes a part of a network in training, and returns its first input in evaluation."""

    def __init__(self, part: fx.GraphModule) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, *others: Any) -> Any:
        """The result of the part, or `x`."""
        return self.part(x, *others) if self.training else x


class ByMode(nn.Module):
    """A constant that has one value in training and another in evaluation, such as a rate of dropout."""

    def __init__(self, training: Any, evaluation: Any) -> None:
        super().__init__()
        self.values = (training, evaluation)

    def forward(self) -> Any:
        """The value of the current mode."""
        return self.values[0] if self.training else self.values[1]
