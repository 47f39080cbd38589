"""Calls of a user's model on a batch: images, or inputs by keyword, and the outputs that the task takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compress.errors import ModelError
from compress.graph.sizes import size_remark
from compress.tasks.base import first_tensor


class OutputsOf(nn.Module):
    """Calls `model` and selects from its outputs, for DistributedDataParallel and torch.compile.

    Args:
        model: a module of images, or of inputs by keyword.
        select: takes what the task needs from its outputs; by default the logits.
    """

    def __init__(self, model: nn.Module, select: Callable[[Any], Any] = first_tensor) -> None:
        super().__init__()
        self.model = model
        self.select = select

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Any:
        """Return the selected outputs of images (N, C, H, W), or of a mapping of inputs by keyword."""
        return self.select(self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs))


def outputs_of(forward: OutputsOf, inputs: Tensor | Mapping[str, Tensor]) -> Any:
    """Return the selected outputs, and report inputs that the model fails on.

    Raises:
        ModelError: the model fails on them, or its outputs are not those that the task takes.
    """
    try:
        return forward(inputs)
    except ModelError:
        raise
    except Exception as error:  # the model is its user's and can fail in any way
        shapes = inputs if isinstance(inputs, Mapping) else {"images": inputs}
        got = ", ".join(f"{name} of shape {tuple(value.shape)}" for name, value in shapes.items())
        raise ModelError(
            f"{type(forward.model).__name__} fails on {got}, the shape of the data's "
            f"images ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            f"{size_remark(forward.model)}"
        ) from error
