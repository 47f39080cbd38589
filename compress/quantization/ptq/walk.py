"""A walk through a quantized network and the same network in float, node by node, with all calibration images.

Methods that process one layer after another need each layer's input in the quantized network, in which all layers
before it are finished, and its output in the float network. Every node is computed for all images, in float and
quantized, before the next one; values that no later node uses are freed. What is alive between nodes is in memory for
all images,
twice: callers limit their number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import CalibrationError
from compress.graph.inplace import may_overwrite
from compress.graph.inputs import first_inputs
from compress.graph.ops import node_module
from compress.quantization.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A layer with a quantized weight, reached by the walk.

    Attributes:
        layer: its weight and bias may be changed, its outputs are computed afterwards.
        inputs: the layer's input in the quantized network, for each batch.
        settings: further arguments of the call, such as a transposed convolution's `output_size`.
        targets: the layer's output in the float network, for each batch.
    """

    path: str
    layer: nn.Module
    node: fx.Node
    inputs: list[Tensor]
    targets: list[Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def walk(qmodel: fx.GraphModule, batches: Iterable[Any], visit: Callable[[Visit], None], *, images: int) -> None:
    """Call `visit` at every layer with a quantized weight, in graph order, in evaluation mode; it may change the layer.

    Raises:
        CalibrationError: no images.
        DataError: a batch does not hold the model's inputs.
    """
    qmodel.eval()
    values = calibration_inputs(qmodel, batches, images)
    interpreter = fx.Interpreter(qmodel)
    exact: dict[fx.Node, list[Any]] = {}
    rounded: dict[fx.Node, list[Any]] = {}
    fed = 0
    for node in qmodel.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder" and fed < len(values[0]):
            column = [inputs[fed] for inputs in values]
            exact[node], rounded[node], fed = column, list(column), fed + 1
        else:
            _step(interpreter, node, exact, rounded, visit, len(values))
        for dead in interpreter.user_to_last_uses.get(node, []):
            exact.pop(dead, None)
            rounded.pop(dead, None)


def _step(
    interpreter: fx.Interpreter,
    node: fx.Node,
    exact: dict[fx.Node, list[Any]],
    rounded: dict[fx.Node, list[Any]],
    visit: Callable[[Visit], None],
    count: int,
) -> None:
    module = node_module(node) if node.op == "call_module" else None
    if isinstance(module, Quantizer):
        exact[node] = exact[node.all_input_nodes[0]]
    else:
        quantizer = getattr(module, "weight_quantizer", None)
        if module is not None and isinstance(quantizer, Quantizer):
            enabled, quantizer.enabled = quantizer.enabled, False
            exact[node] = [_value(interpreter, node, exact, i) for i in range(count)]
            quantizer.enabled = enabled
            visit(_visit(node, module, exact, rounded))
        else:
            exact[node] = [_value(interpreter, node, exact, i) for i in range(count)]
    rounded[node] = [_value(interpreter, node, rounded, i) for i in range(count)]


def _visit(
    node: fx.Node, layer: nn.Module, exact: dict[fx.Node, list[Any]], rounded: dict[fx.Node, list[Any]]
) -> Visit:
    """The call of a layer; further arguments are sizes, the same for every batch."""
    bound = inspect.signature(layer.forward).bind(*node.args, **node.kwargs).arguments
    source, *others = bound
    settings = {name: fx.node.map_arg(bound[name], lambda n: rounded[n][0]) for name in others}
    inputs = rounded[bound[source]]
    return Visit(path=str(node.target), layer=layer, node=node, inputs=inputs, targets=exact[node], settings=settings)


def _value(interpreter: fx.Interpreter, node: fx.Node, values: dict[fx.Node, list[Any]], i: int) -> object:
    """The value of `node` for batch `i`, a copy for operations in place: the other network may hold the same input."""
    if node.op == "placeholder":  # one with a default
        return node.args[0] if node.args else None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][i])
    if may_overwrite(node) and args and isinstance(args[0], Tensor):
        args = (args[0].clone(), *args[1:])
    return getattr(interpreter, node.op)(node.target, args, kwargs)


def calibration_inputs(qmodel: nn.Module, batches: Iterable[Any], limit: int) -> list[tuple[Tensor, ...]]:
    """Inputs of each batch, in the order of the graph's placeholders."""
    values = list(first_inputs(qmodel, batches, limit))
    if not values:
        raise CalibrationError("the walk got no images: `batches` was empty; give at least one batch")
    return values
