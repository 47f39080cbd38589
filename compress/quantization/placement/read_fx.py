"""Reads a torch.fx graph into the view that placement works on."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import fx

from compress.graph.ops import altered, node_kind, node_module
from compress.graph.report import Leaf, leaves_of
from compress.graph.traits import WEIGHTED
from compress.quantization.placement.view import GraphView, Node, Parameters, mask_in
from compress.quantization.quantizer import can_quantize, weight_axis


def read_fx(graph_module: fx.GraphModule) -> GraphView:
    leaves = leaves_of(graph_module)
    by_path = {leaf.path: leaf for leaf in leaves}
    nodes: dict[fx.Node, Node] = {}
    for source in graph_module.graph.nodes:
        node = nodes[source] = _node(source, by_path)
        node.inputs = tuple(nodes[value] for value in source.all_input_nodes)
    for source, node in nodes.items():
        node.consumers = [nodes[user] for user in source.users]
    return GraphView(nodes=tuple(nodes.values()), leaves=leaves)


def _node(source: fx.Node, leaves: dict[str, Leaf]) -> Node:
    kind, dtype = node_kind(source), source.meta.get("dtype")
    module: Any = node_module(source) if source.op == "call_module" else None
    path, note = str(source.target) if module is not None else "", str(source.meta.get("whole", ""))
    note = note or (altered(module) if module is not None else "")
    node = Node(
        name=source.name,
        kind=kind,
        path=path,
        shape=source.meta.get("shape"),
        floating=dtype is not None and dtype.is_floating_point,
        note=note,
        leaf=leaves.get(path),
    )
    if kind in WEIGHTED:
        function = f"is a function that cannot become a layer: {note or 'its weight is of no module'}"
        node.refusal = (can_quantize(module) or mask_in(module.bias)) if module is not None else function
    if module is not None and kind in WEIGHTED | {"batch_norm"}:
        node.parameters = Parameters(
            weight=partial(getattr, module, "weight"),
            bias=partial(getattr, module, "bias"),
            mean=partial(getattr, module, "running_mean", None),
            axis=weight_axis(module),
            groups=getattr(module, "groups", 1),
        )
    _read_arguments(source, module, node)
    if kind == "pad" and _pads_convolutions(source, module):
        node.kind = "zero_pad"
    if _is_neutral(source, node):
        node.kind = "identity"
    node.converts = node.kind == "identity" and any(
        n.meta.get("dtype", dtype) != dtype for n in source.all_input_nodes[:1]
    )
    return node


def _is_neutral(source: fx.Node, node: Node) -> bool:
    """Return True for x + 0 and x * 1, as Python's `sum` begins; exporters leave them out."""
    neutral = {"add": 0.0, "mul": 1.0}.get(node.kind)
    one = len(source.all_input_nodes) == 1 and len(source.args) == 2 and not source.kwargs
    return one and node.numbers == (neutral,) and source.all_input_nodes[0].meta.get("dtype") == source.meta["dtype"]


def _pads_convolutions(source: fx.Node, module: Any) -> bool:
    """True if an operation pads images with zeros for convolutions alone: the export moves it into them."""
    amounts = getattr(module, "padding", None) if module is not None else _argument(source, 1, "pad")
    mode = "constant" if module is not None else _argument(source, 2, "mode") or "constant"
    filling = getattr(module, "value", 0) if module is not None else _argument(source, 3, "value")
    zeros = module is None or type(module).__name__.startswith(("ZeroPad", "ConstantPad"))
    shape = source.meta.get("shape")
    if (
        not zeros
        or mode != "constant"
        or (filling or 0) != 0
        or shape is None
        or not isinstance(amounts, (tuple, list))
    ):
        return False
    numbers = [amount for amount in amounts if isinstance(amount, int) and amount >= 0]
    spatial = len(numbers) == len(amounts) <= 2 * (len(shape) - 2)
    return spatial and bool(source.users) and all(_is_padding_convolution(user) for user in source.users)


def _is_padding_convolution(node: fx.Node) -> bool:
    if node.op != "call_module" or node_kind(node) != "conv":
        return False
    module: Any = node_module(node)
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _read_arguments(source: fx.Node, module: Any, node: Node) -> None:
    if node.traits.category == "arithmetic":
        operands = (*source.args, *source.kwargs.values())  # alpha of torch.add is one
        node.numbers = tuple(float(value) for value in operands if isinstance(value, (int, float)))
    elif node.kind == "clamp":
        low = getattr(module, "min_val", None) if module is not None else _argument(source, 1, "min", "min_val")
        node.low = float(low) if isinstance(low, (int, float)) else node.low
    elif node.kind == "resize":
        node.mode = str(getattr(module, "mode", "") if module is not None else _argument(source, 3, "mode"))
    elif node.kind == "mean":
        dims = _argument(source, 1, "dim")
        shape = source.all_input_nodes[0].meta.get("shape")
        node.axes = frozenset(d % len(shape) for d in dims) if shape and isinstance(dims, (list, tuple)) else None
    elif node.kind == "pad":
        filling = getattr(module, "value", None) if module is not None else _argument(source, 3, "value")
        node.filling = float(filling or 0) if isinstance(filling, (int, float, type(None))) else float("nan")
    elif source.op == "call_method" and source.target == "float":
        node.cast = "float32"


def _argument(node: fx.Node, position: int, *names: str) -> object:
    found = [node.kwargs[name] for name in names if name in node.kwargs]
    return found[0] if found else node.args[position] if len(node.args) > position else None
