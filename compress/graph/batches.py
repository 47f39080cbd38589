"""From the batches of a user's loader to the inputs of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import DataError
from compress.graph.inputs import TARGET_KEYS, KeywordInputs, each_input, first_of

Batches = Iterable[Any]
"""Tensors, or tuples that begin with all inputs of the model, which a target may follow; see `batch_inputs`."""


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs of a labelled batch (a tensor, a tuple, or a mapping by keyword) and its targets.

    Args:
        batch: (images, targets); (first, second, ..., targets); or a mapping with targets under one of `TARGET_KEYS`.

    Raises:
        DataError: the batch has no targets.

    >>> inputs, targets = split_batch({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2)})
    >>> list(inputs), tuple(targets.shape)
    (['pixel_values'], (2,))
    """
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        if key is None:
            raise DataError(
                f"a batch has the keys {', '.join(map(str, batch))}; its targets must be its {TARGET_KEYS[0]!r}"
            )
        return {name: value for name, value in batch.items() if name not in TARGET_KEYS}, batch[key]
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(f"a batch is a {type(batch).__name__}; give pairs of images and targets, or mappings")
    inputs = tuple(batch[:-1])
    return (inputs[0] if len(inputs) == 1 else inputs), batch[-1]


def batch_inputs(batch: Any, count: int = 1) -> tuple[Tensor, ...]:
    """The first `count` tensors of a batch: a tensor, a tuple or list, or one whose first element holds them.

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
        raise DataError(_too_few(parts, count))
    return inputs


def _too_few(parts: Sequence[Any], count: int) -> str:
    got = ", ".join(type(part).__name__ for part in parts) or "nothing"
    wanted = "a tensor or (tensor, target)" if count == 1 else f"a tuple that begins with {count} tensors"
    return f"a batch holds {got}; the model takes {count} input{'s'[: count > 1]}: give {wanted}"


def model_inputs(model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
    """The inputs of `model` in a batch, on its device: as many as `forward` has arguments without a default.

    A mapping gives the tensors whose keys are arguments of `forward`.

    Raises:
        DataError: the batch does not hold them.
    """
    device = device_of(model)
    if isinstance(batch, Mapping):
        return each_input(lambda x: x.to(device), _named_inputs(model, batch))
    return tuple(x.to(device) for x in batch_inputs(batch, _required(model)))


def first_inputs(model: nn.Module, batches: Iterable[Any], images: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the inputs of the first `images` images, batch by batch.

    Raises:
        DataError: a batch does not hold the model's inputs.
    """
    for batch in batches:
        inputs = first_of(model_inputs(model, batch), images)
        images -= len(inputs[0])
        if len(inputs[0]):
            yield inputs
        if images <= 0:
            return


def _named_inputs(model: nn.Module, batch: Mapping[str, Any]) -> KeywordInputs:
    """The tensors of a mapping that are arguments of `forward`, in its order."""
    given = {name: value for name, value in batch.items() if name not in TARGET_KEYS and isinstance(value, Tensor)}
    known = _arguments(model)
    arguments = [name for name in known if name in given]
    if len(given) < (count := _required(model)):
        raise DataError(_too_few(list(given.values()), count))
    if len(arguments) < len(given):
        names = ", ".join(map(str, batch))
        raise DataError(
            f"a batch has the keys {names}, and {type(model).__name__} takes {', '.join(known)}: name them alike"
        )
    return KeywordInputs({name: given[name] for name in arguments})


def _arguments(model: nn.Module) -> list[str]:
    """Arguments of `forward`; a graph may have renamed them."""
    if isinstance(model, fx.GraphModule):
        return [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    return list(inspect.signature(model.forward).parameters)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter or buffer; the CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _required(model: nn.Module) -> int:
    """Number of arguments of `forward` without a default; 1 if it takes any number of them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return max(1, sum(p.kind in positional and p.default is p.empty for p in parameters))
