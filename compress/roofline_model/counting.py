"""Work and traffic of a network: its graph as a list of operations, one for each kernel that an engine would run.

Each tensor is counted once for each operation that consumes it and once when it is written, weights once a batch;
views move nothing. Both counts are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, fx, nn

from compress.errors import RooflineError
from compress.graph.inputs import Inputs, as_inputs
from compress.graph.layers import Layer, layers, tensor_args
from compress.graph.ops import consumers_past, kinds, layer_name, node_kind, node_module, producer_past
from compress.graph.trace import trace

# Kinds that return their input without moving it; an engine chooses layouts so that a transpose costs nothing.
VIEWS = kinds(lambda t: t.free) | {"assert"}
producer = partial(producer_past, through=VIEWS)

# Kinds whose inputs are floating point even if the products run in 8 bits.
FLOAT_KINDS = kinds(lambda t: t.needs_float)

PRODUCTS = kinds(lambda t: t.category in {"weighted", "product"})
_EPILOGUE = kinds(lambda t: t.elementwise and t.category != "shape" and not (t.free or t.needs_float))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operation of the graph, or several that an engine fuses, named after the first of them.

    Attributes:
        kind: of `compress.graph.ops`; `pointwise` for a fused chain of pointwise ones.
        detail: kernel and groups of a convolution, such as `3x3 depthwise`.
        members: names of its nodes, in order.
        paths: of the modules among them.
        macs: multiply-accumulates for the whole batch; None = unknown.
    """

    name: str
    kind: str
    type: str
    detail: str = ""
    members: tuple[str, ...]
    paths: tuple[str, ...]
    macs: int | None


@dataclass(frozen=True, kw_only=True)
class Operation(Kernel):
    """A kernel with what it computes and moves. Counts are for the whole batch.

    Attributes:
        sparse_macs: macs that a 2:4 weight can halve, where input channels (per group) are a multiple of four.
        bias_elements: of biases and other parameters, which stay in floating point.
        activation_elements: read and written.
        float_elements: those of them that stay in floating point if the rest has 8 bits.
    """

    sparse_macs: int = 0
    weight_elements: int = 0
    sparse_weight_elements: int = 0
    bias_elements: int = 0
    activation_elements: int
    float_elements: int = 0

    def scaled(self, batch: int, traced: int) -> Operation:
        return replace(
            self,
            macs=None if self.macs is None else self.macs * batch // traced,
            sparse_macs=self.sparse_macs * batch // traced,
            activation_elements=self.activation_elements * batch // traced,
            float_elements=self.float_elements * batch // traced,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network as a list of operations, in the order of the graph."""

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    batch_size: int
    fused: bool
    operations: tuple[Operation, ...]

    def with_batch(self, batch_size: int) -> Workload:
        if batch_size < 1:
            raise RooflineError(f"batch_size must be 1 or more, got {batch_size}")
        return replace(
            self,
            batch_size=batch_size,
            input_shapes=tuple((batch_size, *shape[1:]) for shape in self.input_shapes),
            operations=tuple(op.scaled(batch_size, self.batch_size) for op in self.operations),
        )


def workload(model: nn.Module, example_inputs: Inputs, *, fused: bool = False) -> Workload:
    """Trace a model, which may be quantized, and count it; dimension 0 of the first input is the batch."""
    return count(trace(model, example_inputs), example_inputs, fused=fused, model=type(model).__name__)


def count(graph_module: fx.GraphModule, example_inputs: Inputs, *, fused: bool = False, model: str = "") -> Workload:
    inputs = as_inputs(example_inputs)
    if not inputs[0].ndim or not inputs[0].shape[0]:
        raise RooflineError(f"example_inputs need a batch dimension with at least one image, got {_shapes(inputs)}")
    known = {layer.name: layer for layer in layers(graph_module)}
    nodes = [n for n in graph_module.graph.nodes if n.name in known and node_kind(n) not in VIEWS]
    groups = fusion_groups(nodes) if fused else [(n,) for n in nodes]
    return Workload(
        model=model or type(graph_module).__name__,
        input_shapes=_shapes(inputs),
        batch_size=inputs[0].shape[0],
        fused=fused,
        operations=tuple(_operation(group, known) for group in groups),
    )


def convolution(
    *, channels: int, out_channels: int | None = None, size: int, kernel: int, groups: int = 1, batch_size: int = 1
) -> Operation:
    """A square convolution of stride 1 and same padding; `out_channels` None means `channels`."""
    out_channels = out_channels or channels
    per_group = channels // groups
    weights = out_channels * per_group * kernel**2
    macs = batch_size * size**2 * weights
    sparse = per_group % 4 == 0
    detail = _conv_detail((kernel, kernel), groups, channels)
    return Operation(
        name=f"{detail} {channels}->{out_channels} @{size}",
        kind="conv",
        type="Conv2d",
        members=(),
        paths=(),
        macs=macs,
        sparse_macs=macs * sparse,
        weight_elements=weights,
        sparse_weight_elements=weights * sparse,
        activation_elements=batch_size * size**2 * (channels + out_channels),
        detail=detail,
    )


def fusion_groups(nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Group nodes as an engine fuses them.

    A BatchNorm, activation or addition joins the group of its input if that has no other consumer and the result's
    shape. A product takes one addition of two tensors, a pointwise chain any number.
    """
    groups: list[list[fx.Node]] = []
    owner: dict[fx.Node, int] = {}
    for node in nodes:
        candidates = [owner[n] for n in _joinable(node) if n in owner and groups[owner[n]][-1] is n]
        candidates = [index for index in candidates if _accepts(groups[index], node)]
        if candidates:
            owner[node] = max(candidates)
            groups[owner[node]].append(node)
        else:
            owner[node] = len(groups)
            groups.append([node])
    return [tuple(group) for group in groups]


def _joinable(node: fx.Node) -> list[fx.Node]:
    if node_kind(node) not in _EPILOGUE:
        return []
    producers = [producer(n) for n in tensor_args(node)]
    shape = node.meta["shape"]
    return [m for m in producers if consumers_past(m, VIEWS) == [node] and m.meta.get("shape", shape) in {shape, None}]


def _accepts(group: list[fx.Node], node: fx.Node) -> bool:
    head = node_kind(group[0])
    if head in PRODUCTS:
        added = sum(_joins_two(n) for n in group[1:])
        return not (_joins_two(node) and added)
    return head in _EPILOGUE


def _joins_two(node: fx.Node) -> bool:
    return len([n for n in tensor_args(node) if n.op != "get_attr"]) > 1


def _operation(group: tuple[fx.Node, ...], known: dict[str, Layer]) -> Operation:
    items = [known[n.name] for n in group]
    head, main = group[0], known[group[0].name]
    product = main.kind in PRODUCTS or main.weight_macs > 0
    constants = _distinct(m for node in group for m in map(producer, tensor_args(node)) if m.op == "get_attr")
    matrices = [n for n in constants if product and n in map(producer, tensor_args(head)) and len(n.meta["shape"]) > 1]
    weights = main.weight_elements * product + sum(math.prod(n.meta["shape"]) for n in matrices)
    # An engine folds a BatchNorm after a product: its scale goes into the weight, its shift becomes the bias.
    scales = [item.weight_elements for item in items[product:] if not (product and item.kind == "batch_norm")]
    vectors = sum(math.prod(n.meta["shape"]) for n in constants if n not in matrices)
    if main.kind == "embedding":  # of its table the rows alone are read that are asked for
        scales = []
    sparse = _reduction(head) > 0 and _reduction(head) % 4 == 0
    moved, floating = _traffic(group)
    return Operation(
        name=layer_name(head),
        kind=main.kind if len(group) == 1 or main.kind not in _EPILOGUE else "pointwise",
        type=main.type,
        members=tuple(n.name for n in group),
        paths=tuple(item.path for item in items if item.path),
        macs=None if any(item.macs is None for item in items) else sum(item.macs or 0 for item in items),
        sparse_macs=main.weight_macs * sparse,
        weight_elements=weights,
        sparse_weight_elements=weights * sparse,
        bias_elements=sum(item.bias_elements for item in items) + sum(scales) + vectors,
        activation_elements=moved,
        float_elements=floating,
        detail=_conv_detail(main.kernel, main.groups, main.input_shapes[0][1]) if main.kind == "conv" else "",
    )


def _reduction(node: fx.Node) -> int:
    """Input channels (per group) along which 2:4 runs; 0 without."""
    kind = node_kind(node)
    if kind not in {"conv", "linear", "attention"}:
        return 0
    if node.op == "call_module":
        module = node_module(node)
        return int(module.embed_dim if kind == "attention" else module.weight.shape[1])  # type: ignore[arg-type, index]
    weight = node.args[1] if len(node.args) > 1 and kind != "attention" else None
    return int(weight.meta["shape"][1]) if isinstance(weight, fx.Node) else 0


def _traffic(group: tuple[fx.Node, ...]) -> tuple[int, int]:
    """Elements that a group moves, and those that stay in floating point."""
    inside = set(group)
    reads = _distinct(
        n for node in group for n in tensor_args(node) if producer(n) not in inside and producer(n).op != "get_attr"
    )
    result = group[-1].meta.get("shape") or tensor_args(group[-1])[0].meta["shape"]  # attention returns a tuple
    moved = [(_elements(n), producer(n)) for n in reads] + [(math.prod(result), group[-1])]
    moved += [(elements, group[0]) for elements in _inner_elements(group[0])]
    floating = sum(
        elements
        for elements, source in moved
        if any(
            node_kind(consumer) in FLOAT_KINDS or consumer.op == "output" for consumer in consumers_past(source, VIEWS)
        )
    )
    return sum(elements for elements, _ in moved), floating


def _elements(node: fx.Node) -> int:
    """Elements of the smallest view between a tensor and its producer."""
    smallest = math.prod(node.meta["shape"])
    while node_kind(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
        smallest = min(smallest, math.prod(node.meta["shape"])) if node.meta.get("shape") else smallest
    return smallest


def _inner_elements(head: fx.Node) -> list[int]:
    """Elements moved between the three kernels of an attention module, or read of a table."""
    if node_kind(head) == "embedding":
        return [math.prod(head.meta["shape"])]
    if node_kind(head) != "attention" or head.op != "call_module":
        return []
    query, *others = [math.prod(n.meta["shape"]) for n in tensor_args(head)]
    key = others[0] if others else query
    return [2 * query, 2 * key, 2 * key, 2 * query]


def _conv_detail(kernel: tuple[int, ...], groups: int, channels: int) -> str:
    name = "x".join(str(side) for side in kernel)
    return name if groups == 1 else f"{name} depthwise" if groups == channels else f"{name} grouped"


def _distinct(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _shapes(inputs: tuple[Tensor, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape) for x in inputs)
