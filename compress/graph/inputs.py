"""Inputs and outputs of models: tensors, one or several, by position or by keyword, and their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from compress.errors import ModelError

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""A tensor, tensors in the order of `forward`, or tensors by the names of its arguments."""

TARGET_KEYS = ("labels", "label", "targets", "target")
"""Keys of a mapping that hold targets, which are no inputs."""


class KeywordInputs(tuple[Tensor, ...]):
    """Inputs that a model takes by keyword; a graph traced with them takes them in this order.

    Attributes:
        names: arguments of the model's `forward`, one for each tensor.
    """

    names: tuple[str, ...]

    def __new__(cls, named: Mapping[str, Tensor]) -> KeywordInputs:
        """Keep the values of a mapping in its order."""
        made = super().__new__(cls, named.values())
        made.names = tuple(named)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return KeywordInputs, (dict(zip(self.names, self, strict=True)),)


def as_inputs(example_inputs: Inputs) -> tuple[Tensor, ...]:
    """A tensor, a sequence or a mapping of tensors as a tuple, which keeps the names of a mapping.

    The targets of a mapping are left out.

    Raises:
        ModelError: `example_inputs` is something else, or empty.
    """
    if isinstance(example_inputs, KeywordInputs):
        return example_inputs
    if isinstance(example_inputs, Mapping):
        named = {name: value for name, value in example_inputs.items() if name not in TARGET_KEYS}
        given: tuple[Any, ...] = KeywordInputs(named)
    else:
        given = tuple(example_inputs) if isinstance(example_inputs, Sequence) else (example_inputs,)
    if not given or not all(isinstance(x, Tensor) for x in given):
        got = ", ".join(type(x).__name__ for x in given) or "nothing"
        raise ModelError(
            f"example_inputs must be a tensor, or a sequence or mapping of tensors, got {got}; wrap a model that takes "
            "anything else (a list of images) in a module whose forward takes tensors"
        )
    return given


def run_with(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Call a model, or its `forward`: by keyword where the inputs have names (not graph modules), else by position."""
    owner = getattr(model, "__self__", model)
    if isinstance(inputs, KeywordInputs) and not isinstance(owner, fx.GraphModule):
        return model(**dict(zip(inputs.names, inputs, strict=True)))
    return model(*inputs)


def each_input(function: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Apply a function to every input, and keep their names."""
    if isinstance(inputs, KeywordInputs):
        return KeywordInputs({name: function(x) for name, x in zip(inputs.names, inputs, strict=True)})
    return tuple(function(x) for x in inputs)


def first_of(inputs: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """The first `count` images of every input."""
    return each_input(lambda x: x[:count], inputs)


def copies_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Clone the inputs."""
    return each_input(Tensor.clone, inputs)


def shapes_text(inputs: tuple[Tensor, ...]) -> str:
    """Names, shapes and types, for messages."""
    names = [f"{name} " for name in inputs.names] if isinstance(inputs, KeywordInputs) else [""] * len(inputs)
    return ", ".join(f"{name}{tuple(x.shape)} {x.dtype}" for name, x in zip(names, inputs, strict=True))


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in a tensor, tuple, list, mapping or dataclass, in order."""
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
