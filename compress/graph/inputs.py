"""Inputs and outputs of models: tensors, one or several, and their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from compress.errors import ModelError

Inputs = Tensor | Sequence[Tensor]


def as_inputs(example_inputs: Inputs) -> tuple[Tensor, ...]:
    """A tensor or a sequence of tensors as a tuple.

    Raises:
        ModelError: `example_inputs` is something else, or empty.
    """
    given = (example_inputs,) if not isinstance(example_inputs, Sequence) else tuple(example_inputs)
    if not given or not all(isinstance(x, Tensor) for x in given):
        got = ", ".join(type(x).__name__ for x in given) or "nothing"
        raise ModelError(
            f"example_inputs must be a tensor or a sequence of tensors, got {got}; wrap a model that takes anything "
            "else (a dict, a list of images) in a module whose forward takes tensors"
        )
    return given


def copies_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of inputs, which a model may change in place."""
    return tuple(x.clone() for x in inputs)


def shapes_text(inputs: tuple[Tensor, ...]) -> str:
    """Shapes and types, for messages."""
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in a tensor, tuple, list, mapping or dataclass (model outputs), in order."""
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """`flat_tensors`, each with the keys, fields and indices that lead to it, joined by "_" ("" for a lone tensor)."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = zip(getattr(value, "_fields", None) or range(len(value)), value, strict=True)
    elif dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return [found for key, item in items for found in named_tensors(item, f"{name}_{key}" if name else str(key))]
