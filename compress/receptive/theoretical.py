"""Exact theoretical receptive fields of any model that torch.fx can trace: its graph is evaluated on fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import ReceptiveFieldError
from compress.graph.inputs import Inputs, as_inputs, first_of
from compress.graph.layers import layers
from compress.graph.ops import attribute_of, layer_name, node_kind, node_module, run_node
from compress.graph.report import leaves_of
from compress.graph.trace import trace
from compress.graph.traits import kinds
from compress.receptive import rules_mixing, rules_moving, rules_windows
from compress.receptive.fields import Call, Field, NoRuleError, image_field, join
from compress.receptive.table import ReceptiveField, ReceptiveFieldTable, make_row

_Rule = Callable[[Call], Any]


def _elementwise(call: Call) -> Field:
    return call.field(0)


def _broadcasting(call: Call) -> Field:
    return join(call.operands(), call.result_shape(), call.name)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs == 1), _elementwise),
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs > 1), _broadcasting),
    **rules_windows.RULES,
    **rules_mixing.RULES,
    **rules_moving.RULES,
}
"""For each kind of operation, from its operands' fields to its result's."""


def _apply_rule(call: Call) -> object:
    """A Field, a tuple of them, or a plain value (a shape); NoRuleError: no rule covers these arguments."""
    rule = _RULES.get(call.kind)
    if rule is None:
        raise NoRuleError("there is no rule for this kind of operation")
    return rule(call)


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    reason: str
    shape: tuple[int, ...] | None


def receptive_field(model: nn.Module, example_inputs: Inputs) -> ReceptiveFieldTable:
    """The theoretical receptive field of every node with respect to the model's first input.

    Definitions: arXiv 1603.07285 (Dumoulin and Visin), and Araujo et al., "Computing Receptive Fields of Convolutional
    Neural Networks" (Distill, 2019). The image is (N, C, spatial...); sizes without borders depend on its size only
    after adaptive pooling.

    Raises:
        ReceptiveFieldError: the input is not an image.
        ModelError: the model fails on the input or cannot be traced.

    Examples:
        >>> convs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2))
        >>> [row.size for row in compress.receptive_field(convs, images[:1])]
        [(1, 1), (3, 3), (5, 5)]
    """
    inputs = first_of(as_inputs(example_inputs), 1)
    check_image(inputs[0])
    return graph_receptive_field(trace(model, inputs), inputs, name=type(model).__name__)


def check_image(image: Tensor) -> None:
    """Refuse (ReceptiveFieldError) a tensor that is not a batch of images."""
    if image.ndim < 3 or 0 in image.shape:
        raise ReceptiveFieldError(
            f"a receptive field needs a batch of images (N, C, height, width), got a tensor of shape "
            f"{tuple(image.shape)}"
        )


def graph_receptive_field(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], *, name: str = ""
) -> ReceptiveFieldTable:
    """The fields of a traced graph, with inputs of batch 1."""
    walker = _Walker(graph_module, inputs)
    return ReceptiveFieldTable(
        model=name or type(graph_module).__name__, image_size=tuple(inputs[0].shape[2:]), rows=tuple(walker.walk())
    )


class _Walker:
    """Evaluates a graph on fields; `walk` returns a row for each tensor."""

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        self.graph_module = graph_module
        self.inputs = list(inputs)
        self.axes = inputs[0].ndim - 2
        self.values: dict[fx.Node, Any] = {}
        self.leaves = {leaf.path: leaf.reason for leaf in leaves_of(graph_module)}
        self.macs = {layer.name: layer.macs for layer in layers(graph_module)}

    def walk(self) -> list[ReceptiveField]:
        """The rows in the order of the graph."""
        rows = []
        users = Counter({node: len(node.users) for node in self.graph_module.graph.nodes})
        for node in self.graph_module.graph.nodes:
            if node.op == "output":
                continue
            value = self.values[node] = self._run(node)
            if isinstance(value, (Field, _Unknown)):
                rows.append(self._row(node, value))
            for operand in node.all_input_nodes:
                users[operand] -= 1
                if not users[operand]:
                    del self.values[operand]  # the bounds of a deep network would fill the memory
        return rows

    def _run(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            value = self.inputs.pop(0) if self.inputs else node.args[0] if node.args else None
            first = not any(n.op == "placeholder" for n in self.values)
            return image_field((1, *value.shape[1:])) if first and isinstance(value, Tensor) else value
        if node.op == "get_attr":
            return attribute_of(self.graph_module, str(node.target))
        args = fx.node.map_arg(node.args, lambda n: self.values.get(n))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self.values.get(n))
        flat = list(_flat([args, kwargs]))
        unknown = next((v for v in flat if isinstance(v, _Unknown)), None)
        kind = node_kind(node)
        if unknown is not None and kind != "shape":
            return _Unknown(reason=unknown.reason, shape=node.meta.get("shape"))
        if kind == "assert":
            return None
        module = node_module(node) if node.op == "call_module" else None
        if unknown is not None:
            args = tuple(torch.zeros(()).expand(v.shape or ()) if isinstance(v, _Unknown) else v for v in args)
        if unknown is not None or not any(isinstance(v, Field) for v in flat):
            return run_node(self.graph_module, node, args, kwargs)  # it does not depend on the image
        call = Call(node=node, kind=kind, module=module, args=args, kwargs=kwargs, name=layer_name(node))
        return self._apply(call)

    def _apply(self, call: Call) -> object:
        shape = call.node.meta.get("shape")
        try:
            value = _apply_rule(call)
            if isinstance(value, Field) and shape is not None and value.shape != tuple(shape):
                raise NoRuleError(f"its rule gives shape {value.shape} where the model gives {tuple(shape)}")
        except (NoRuleError, RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            if call.module is not None and call.name in self.leaves:
                reason = f"torch.fx cannot trace it ({self.leaves[call.name]})"
            return _Unknown(reason=f"unknown from {call.name} ({call.function}) on: {reason}", shape=shape)
        return value

    def _row(self, node: fx.Node, value: Field | _Unknown) -> ReceptiveField:
        module = node_module(node) if node.op == "call_module" else None
        stack = node.meta.get("nn_module_stack") or {}
        path = str(node.target) if module is not None else ""
        parents = [path[:i] for i, c in enumerate(path) if c == "."]
        owner = node.args[0] if node_kind(node) == "getitem" else None
        if isinstance(owner, fx.Node) and owner.op == "call_module":  # a module that returns a tuple
            parents.append(str(owner.target))
        labels = {
            "name": node.name,
            "path": path,
            "kind": node_kind(node),
            "type": type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target)),
            "shape": value.shape,
            "scopes": tuple(dict.fromkeys([*(str(s).partition("@")[0] for s in stack), *parents])),  # @: a later call
        }
        operands = [self.values.get(n) for n in node.all_input_nodes]
        return make_row(
            labels=labels,
            found=value if isinstance(value, Field) else None,
            inputs=[f for f in operands if isinstance(f, Field)],
            reason=value.reason if isinstance(value, _Unknown) else "",
            axes=self.axes,
            macs=self.macs.get(node.name, 0),
        )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, slice):
        yield from _flat([value.start, value.stop, value.step])
    else:
        yield value
