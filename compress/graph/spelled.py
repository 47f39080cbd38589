"""Activations that a model or a file spells out, such as x * sigmoid(x), are found by the values that they compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compress.graph.ops import node_kind

V = TypeVar("V", bound=Hashable)


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x), the approximation of GELU that CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


KNOWN: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "softplus": F.softplus,
}
AT = torch.linspace(-6, 6, 49)
"""Where activations are compared."""
_SAME = 1e-4
"""Largest difference to a known activation: constants such as 1.4142 are written with few digits."""
_MOST = 12
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "square"})
_TELLING = frozenset({"sigmoid", "hardsigmoid", "softplus", "tanh", "relu6", "clamp", "erf"})


class Form(Protocol[V]):
    """A graph in which activations are looked for; a value is the one result of an operation."""

    def inputs(self, value: V) -> Sequence[V]:
        """The operands of the operation that computes a value, without constants."""

    def is_arithmetic(self, value: V) -> bool:
        """True for sums, products, quotients and powers."""

    def reader(self, value: V) -> V | None:
        """The result of the only operation that reads a value; None if there are several, or it is returned."""

    def computed(self, values: Sequence[V], x: V) -> Tensor | None:
        """What operations compute where x is `AT`; None if it is not known."""


@dataclass(frozen=True)
class Spelled(Generic[V]):
    """An activation that is written as several operations.

    Attributes:
        name: key of `KNOWN`.
        values: results of its operations, in the order of the graph; the last one is the activation's.
        x: the value that the activation is applied to.
    """

    name: str
    values: tuple[V, ...]
    x: V


def spelled_activation(value: V, form: Form[V]) -> Spelled[V] | None:
    """The known activation that contains a function, such as the Sigmoid of x * sigmoid(x); None if there is none."""
    made, reads = [value], list(form.inputs(value))
    while len(made) < _MOST:
        found = _forward(made, reads[0], form) if len(reads) == 1 else None
        if found is not None:
            return found
        operands = [name for name in reads if form.is_arithmetic(name)]
        inner = [name for name in operands if form.reader(name) is not None]  # others may be what it is applied to
        before = next(iter(inner or operands), None)
        if before is None or (len(reads) == 1 and not inner):
            return None
        made.insert(0, before)
        reads = [name for name in dict.fromkeys((*reads, *form.inputs(before))) if name != before]
    return None


def _forward(made: Sequence[V], x: V, form: Form[V]) -> Spelled[V] | None:
    """Return the largest known activation of x that begins with `made`: Softplus alone is one, and part of Mish."""
    found, after, largest = list(made), form.reader(made[-1]), None
    while after is not None and len(found) < _MOST:
        known = {*found, x}
        for other in form.inputs(after):
            if other not in known:
                if not form.is_arithmetic(other) or not known.issuperset(form.inputs(other)):
                    return largest
                found.insert(0, other)
        found.append(after)
        got = form.computed(found, x) if form.is_arithmetic(after) else None
        if got is not None:
            name = next((key for key, known in KNOWN.items() if bool(((known(AT) - got).abs() < _SAME).all())), None)
            if name is not None:
                largest = Spelled(name, tuple(found), x)
        after = form.reader(after)
    return largest


class _TorchForm:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._modules = dict(graph_module.named_modules())

    def inputs(self, value: fx.Node) -> Sequence[fx.Node]:
        return value.all_input_nodes

    def is_arithmetic(self, value: fx.Node) -> bool:
        return node_kind(value) in _ARITHMETIC and not _name(value).endswith("_") and value.op != "call_module"

    def reader(self, value: fx.Node) -> fx.Node | None:
        after = next(iter(value.users)) if len(value.users) == 1 else None
        return after if after is not None and (self.is_arithmetic(after) or _is_telling(after)) else None

    def computed(self, values: Sequence[fx.Node], x: fx.Node) -> Tensor | None:
        inside = set(values)
        if any(not inside.issuperset(value.users) for value in values[:-1]):
            return None
        env: dict[fx.Node, Any] = {x: AT.clone()}
        for value in values:
            args, kwargs = fx.node.map_arg((value.args, value.kwargs), env.__getitem__)
            if value.op == "call_module":
                env[value] = self._modules[str(value.target)](*args, **kwargs)
            elif value.op == "call_method":
                env[value] = getattr(args[0], str(value.target))(*args[1:], **kwargs)
            else:
                env[value] = value.target(*args, **kwargs)  # type: ignore[operator]
        result = env[values[-1]]
        return result if isinstance(result, Tensor) and result.shape == AT.shape else None


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_telling(node: fx.Node) -> bool:
    kind = node_kind(node)
    if node.op != "call_module" and _name(node).endswith("_"):
        return False  # an operation in place: its operand no longer has its value afterwards
    return kind in _TELLING or (kind == "unknown" and node.op != "call_module" and _name(node) == "erf")


def activations_in_one(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Replace spelled out activations by torch's own, in place; return the nodes. Shapes are stale afterwards."""
    form, replaced = _TorchForm(graph_module), list[str]()
    for node in list(graph_module.graph.nodes):
        found = spelled_activation(node, form) if node.users and _is_telling(node) else None
        if found is None:
            continue
        last, function = found.values[-1], KNOWN[found.name]
        with graph_module.graph.inserting_after(last):
            target, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
            one = graph_module.graph.call_function(target, (found.x,), dict(options))
        one.meta["nn_module_stack"] = last.meta.get("nn_module_stack")
        last.replace_all_uses_with(one)
        for value in reversed(found.values):
            graph_module.graph.erase_node(value)
        replaced.append(last.name)
    graph_module.recompile()
    return tuple(replaced)
