"""From the batches of a user's loader to the inputs of a model.

A loader yields images alone, or (images, target), or, for a network of several inputs, (first, second, ..., target).
The signature of the model's `forward` decides how many of them are inputs: as many as have no default.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import DataError

Batches = Iterable[Any]
"""Tensors, or tuples that begin with all inputs of the model, which a target may follow; see `batch_inputs`."""


def batch_inputs(batch: Any, count: int = 1) -> tuple[Tensor, ...]:
    """The first `count` tensors of a batch, without what follows them, such as a target.

    Args:
        batch: a tensor; a tuple or list that begins with `count` tensors; or one whose first element holds them.
        count: inputs of the model.

    Raises:
        DataError: the batch holds something else, or too few tensors.

    >>> images, target = torch.zeros(2, 3, 8, 8), torch.zeros(2)
    >>> [tuple(x.shape) for x in batch_inputs((images, target))]
    [(2, 3, 8, 8)]
    >>> [tuple(x.shape) for x in batch_inputs(((images, images), target), count=2)]
    [(2, 3, 8, 8), (2, 3, 8, 8)]
    """
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if parts and isinstance(parts[0], (tuple, list)):
        parts = parts[0]
    inputs = tuple(parts[:count])
    if len(inputs) < count or not all(isinstance(x, Tensor) for x in inputs):
        got = ", ".join(type(part).__name__ for part in parts) or "nothing"
        wanted = "a tensor or (tensor, target)" if count == 1 else f"a tuple that begins with {count} tensors"
        raise DataError(f"a batch holds {got}; the model takes {count} input{'s'[: count > 1]}: give {wanted}")
    return inputs


def model_inputs(model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
    """The inputs of `model` in a batch, on the model's device.

    Raises:
        DataError: the batch does not hold them.
    """
    device = device_of(model)
    return tuple(x.to(device) for x in batch_inputs(batch, _required(model)))


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter or buffer; the CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _required(model: nn.Module) -> int:
    """Number of arguments of `forward` without a default; 1 if it takes any number of them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return max(1, sum(p.kind in positional and p.default is p.empty for p in parameters))
