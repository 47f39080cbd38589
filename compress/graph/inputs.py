"""Inputs and outputs of models by position or keyword, their names, and whether a graph takes images of other sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import ModelError
from compress.graph.report import report_of

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


def bound_to_size(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str:
    """A sentence on the size of images, (N, C, H, W), that the graph is bound to; "" if none, or not known."""
    if any(x.dim() != 4 for x in inputs):
        return ""
    height, width = inputs[0].shape[2:]
    larger = each_input(
        lambda x: x.new_empty((*x.shape[:2], *(2 * side for side in x.shape[2:])), device="meta"), inputs
    )
    place = _failing_node(graph_module, larger)
    same = each_input(lambda x: torch.empty_like(x, device="meta"), inputs)
    if place is None or _failing_node(graph_module, same) is not None:
        return ""
    return (
        f"the network takes images of {height} x {width} pixels alone: {place} has a size or a tensor that was fixed "
        "when it was traced; trace and quantize it again for another size"
    )


def size_remark(model: nn.Module) -> str:
    """What to add to the error of a model that failed on its inputs: that it is bound to a size, or ""."""
    bound = report_of(model).bound
    return f"; {bound}" if bound else ""


def _failing_node(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str | None:
    run = _OnMeta(graph_module)
    try:
        with torch.no_grad():
            run.run(*inputs)
    except Exception:  # a graph's operations can fail in any way
        return run.place
    return None


class _OnMeta(fx.Interpreter):
    """Runs a graph on the meta device, beside its weights; `place` is the node that ran last."""

    place = ""

    def run_node(self, n: fx.Node) -> object:
        fixed = [str(node.target) for node in n.all_input_nodes if node.op == "get_attr"]
        name = str(n.target) if n.op == "call_module" else n.name
        self.place = f"{name} (of {', '.join(fixed)})" if fixed else name
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        module = self.submodules[target]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        there = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return torch.func.functional_call(module, there, args, kwargs)

    def fetch_attr(self, target: str) -> object:
        value = super().fetch_attr(target)
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
