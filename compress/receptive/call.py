"""One operation of a graph, in which receptive fields take the place of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from compress.receptive.fields import Field, constant_field


class NoRuleError(Exception):
    """A rule cannot determine an operation's inputs; the field becomes unknown."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation with its arguments; a tensor that depends on the image is a Field, any other a real tensor."""

    node: fx.Node
    kind: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    @property
    def function(self) -> str:
        """Name of the function, method or class, without its module."""
        if self.module is not None:
            return type(self.module).__name__
        return str(getattr(self.node.target, "__name__", self.node.target))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position, else by name; of a module, its attribute."""
        if self.module is not None:
            return getattr(self.module, name, default)
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def field(self, position: int, name: str = "input") -> Field:
        """An operand, by position or by name, as a Field (NoRuleError: it is missing or no tensor)."""
        value = self.args[position] if len(self.args) > position else self.kwargs.get(name)
        if isinstance(value, Field):
            return value
        if isinstance(value, Tensor):
            return constant_field(value.shape, next(self.fields()))
        raise NoRuleError(f"its argument {position} is {type(value).__name__} and no tensor")

    def operands(self) -> list[Field]:
        """All tensors among the arguments, also in lists."""
        like = next(self.fields())
        flat = _flat([*self.args, *self.kwargs.values()])
        return [v if isinstance(v, Field) else constant_field(v.shape, like) for v in flat]

    def fields(self) -> Iterator[Field]:
        """Yield the arguments that depend on the image, also in lists."""
        return (v for v in _flat([*self.args, *self.kwargs.values()]) if isinstance(v, Field))

    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result (NoRuleError: it is no tensor)."""
        shape = self.node.meta.get("shape")
        if shape is None:
            raise NoRuleError("its result is no tensor")
        return tuple(shape)


def _flat(values: Any) -> Iterator[Field | Tensor]:
    for value in values:
        if isinstance(value, (Field, Tensor)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
