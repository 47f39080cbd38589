"""Calibration images through networks: node by node, in float and quantized, or some tensors of some images.

Methods that process one layer after another (`walk`) need each layer's input in the quantized network, in which all
layers before it are finished, and its output in the float network. Every node is computed for all images, in float and
quantized, before the next one. What is alive between nodes is in memory for all images, twice: callers limit their
number. `on_images` is what `auto` decides by in torch models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from compress.errors import CalibrationError
from compress.graph.canonical import may_overwrite
from compress.graph.inputs import Batches, first_inputs, flat_tensors, model_inputs
from compress.graph.ops import Watching, node_module
from compress.quantization.quantizer import Quantizer, switched_off


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A layer with a quantized weight, reached by the walk; its weight and bias may be changed.

    Attributes:
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
    """Call `visit`, which may change the layer, at every layer with a quantized weight, in graph order."""
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
        with switched_off([quantizer] if isinstance(quantizer, Quantizer) else ()):
            exact[node] = [_value(interpreter, node, exact, i) for i in range(count)]
        if module is not None and isinstance(quantizer, Quantizer):
            visit(_visit(node, module, exact, rounded))
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
    values = list(first_inputs(qmodel, batches, limit))
    if not values:
        raise CalibrationError("the walk got no images: `batches` was empty; give at least one batch")
    return values


T = TypeVar("T")

# Images that are looked at; for scales the even ones measure ranges, the others the error.
IMAGES = 32
# Batches that are looked at where they cannot be split into images.
_BATCHES = 8
# Errors that torch raises for inputs of the wrong shape or type.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)


def some_of(batches: Batches) -> tuple[list[Any], Batches]:
    """Batches from all over the data, or the first ones of what can be read once; and all batches."""
    if isinstance(batches, Sequence):
        return list(batches[:: -(-len(batches) // IMAGES) or 1]), batches
    source, seen, images = iter(batches), list[Any](), 0
    for batch in source:
        seen.append(batch)
        images += _length(batch)
        if images >= IMAGES:
            break
    return seen, (chain(seen, source) if source is batches else _Begun(batches, seen, source))


class _Begun:
    """Batches whose first pass has begun: it goes on after what was read."""

    def __init__(self, batches: Batches, seen: Sequence[Any], rest: Iterator[Any]) -> None:
        self.batches, self.seen = batches, seen
        self.rest: Iterator[Any] | None = rest

    def __iter__(self) -> Iterator[Any]:
        if self.rest is None:
            return iter(self.batches)
        rest, self.rest = self.rest, None
        return chain(self.seen, rest)

    def __length_hint__(self) -> int:
        return length_hint(self.batches)


@torch.no_grad()
def on_images(
    work: Callable[[Sequence[tuple[Tensor, ...]]], T],
    graph_module: fx.GraphModule,
    batches: Sequence[Any],
    *,
    all_reduce: bool,
) -> T | None:
    """Return what `work` finds on single images of batches, or on whole ones, as rank 0 does; None on none."""
    found = _found(work, graph_module, batches) if batches else None
    if all_reduce:
        box = [found]
        torch.distributed.broadcast_object_list(box, 0)
        (found,) = box
    return found


def _found(
    work: Callable[[Sequence[tuple[Tensor, ...]]], T], graph_module: fx.GraphModule, batches: Sequence[Any]
) -> T | None:
    try:
        if _alone_as_together(graph_module, batches[0]):
            return work(list(_images(graph_module, batches)))
    except FAILURES:  # the first dimension of its inputs is no batch
        pass
    try:
        return work([model_inputs(graph_module, batch) for batch in batches[:_BATCHES]])
    except FAILURES:  # calibration meets the same batch, and describes it
        return None


def _alone_as_together(graph_module: fx.GraphModule, batch: Any) -> bool:
    # False for statistics of the batch, and for rows that are one set.
    two = [x[:2] for x in model_inputs(graph_module, batch)]
    if _length(two) < 2:
        return True
    both, one = (flat_tensors(graph_module(*inputs)) for inputs in (two, [x[1:] for x in two]))
    results = [(a[-len(b) :], b) for a, b in zip(both, one, strict=True) if b.numel() and b.dim()]
    return all(torch.allclose(a, b, 1e-2, 1e-3 * float(b.abs().max())) for a, b in results if b.is_floating_point())


def tensors_of(graph_module: fx.GraphModule, names: frozenset[str], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The results of the nodes of these names, float32, on the CPU."""
    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        found[name] = x.detach().float().cpu()

    Watching(graph_module, names, keep).run(*inputs)
    return found


def _images(graph_module: fx.GraphModule, batches: Sequence[Any]) -> Iterator[tuple[Tensor, ...]]:
    places = [(batch, place) for batch in batches for place in range(_length(batch))]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    for batch, start in chosen:
        yield tuple(x[start : start + 1] for x in model_inputs(graph_module, batch))


def _length(batch: Any) -> int:
    while isinstance(batch, (tuple, list, Mapping)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, Tensor) and batch.ndim else 1
