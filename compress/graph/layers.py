"""The layers of a graph with what they cost: kind, shapes, macs and elements moved.

macs are multiply-accumulates (flops = 2 * macs). The table holds the operations that dominate; elementwise
operations and pools have no multiply-accumulate of a matrix product and count 0; an operation that stands in no
table is None, which is unknown and not zero, and `total_macs` says which ones those were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from compress.graph.ops import KINDS, node_kind, node_module

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operation of a traced graph, for the batch that it was traced with.

    Attributes:
        name: the fx node's name.
        path: the module's path; "" for a function or a method.
        kind: `compress.graph.ops` name.
        type: class or function, as written.
        input_shapes: of its tensor arguments.
        output_shape: of its result; None when that is no tensor.
        weight_elements, bias_elements: elements of its own parameters; of a module with several (attention), those
            with two dimensions or more are weights.
        macs: multiply-accumulates for the traced batch; None = unknown.
        weight_macs: those of them that multiply a weight, which is all but the products of attention.
        groups: of a convolution, else 1.
        kernel: kernel size of a convolution or pool, () otherwise.
    """

    name: str
    path: str
    kind: str
    type: str
    input_shapes: tuple[Shape, ...]
    output_shape: Shape | None
    weight_elements: int
    bias_elements: int
    macs: int | None
    weight_macs: int = 0
    groups: int = 1
    kernel: Shape = ()


def layers(graph_module: fx.GraphModule) -> tuple[Layer, ...]:
    """The operations of a graph made by `trace`, in order, without inputs, constants and shape arithmetic."""
    skipped = {"input", "output", "constant", "shape", "assert", "compare", "floordiv", "quantizer"}
    nodes = (n for n in graph_module.graph.nodes if node_kind(n) not in skipped)
    return tuple(_layer(n) for n in nodes if _output_shape(n) is not None or node_kind(n) == "unknown")


def total_macs(items: tuple[Layer, ...]) -> tuple[int, tuple[str, ...]]:
    """(sum of the known macs, names of the layers whose macs are unknown)."""
    unknown = tuple(layer.path or layer.name for layer in items if layer.macs is None)
    return sum(layer.macs or 0 for layer in items), unknown


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments (also in lists, as of concat) whose value is a tensor."""
    return [n for n in node.all_input_nodes if n.meta.get("shape") is not None]


def _layer(node: fx.Node) -> Layer:
    module = node_module(node) if node.op == "call_module" else None
    kind = node_kind(node)
    weight = getattr(module, "weight", None)
    parameters = list(module.parameters()) if module is not None else []
    weights = [weight] if isinstance(weight, Tensor) else [p for p in parameters if p.ndim > 1]
    weight_elements = sum(p.numel() for p in weights)
    macs = _macs(node, kind)
    inputs = tuple(n.meta["shape"] for n in tensor_args(node))
    kernel = getattr(module, "kernel_size", ())
    return Layer(
        name=node.name,
        path=str(node.target) if module is not None else "",
        kind=kind,
        type=type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target)),
        input_shapes=inputs,
        output_shape=_output_shape(node),
        weight_elements=weight_elements,
        bias_elements=sum(p.numel() for p in parameters) - weight_elements,
        macs=None if macs is None else sum(macs),
        weight_macs=0 if macs is None else macs[0],
        groups=getattr(module, "groups", 1),
        kernel=(kernel,) if isinstance(kernel, int) else tuple(kernel),
    )


def _output_shape(node: fx.Node) -> Shape | None:
    """Shape of the result; of an attention module, which returns (output, weights), that of its output."""
    if node.meta.get("shape") is None and node_kind(node) == "attention":
        query: Shape = tensor_args(node)[0].meta["shape"]
        return query
    return node.meta.get("shape")


Macs = tuple[int, int]  # with a weight, without


def _macs(node: fx.Node, kind: str) -> Macs | None:
    if kind in _MACS:
        return _MACS[kind](node)
    if kind == "unknown" and node.op == "call_function":  # torchvision's functions that it tells fx not to enter
        formula = _WRAPPED.get(getattr(node.target, "__name__", ""))
        return formula(node) if formula else None
    return (0, 0) if kind in _FREE else None


def _weight_shape(node: fx.Node) -> Shape | None:
    """Shape of the weight of a conv or linear, whether it is a module's or a function's second argument."""
    if node.op == "call_module":
        return tuple(node_module(node).weight.shape)  # type: ignore[arg-type]
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return weight.meta.get("shape") if isinstance(weight, fx.Node) else None


def _conv_macs(node: fx.Node) -> Macs | None:
    weight = _weight_shape(node)  # (out, in / groups, k...)
    return (math.prod(node.meta["shape"]) * math.prod(weight[1:]), 0) if weight else None


def _conv_transpose_macs(node: fx.Node) -> Macs | None:
    weight = _weight_shape(node)  # (in, out / groups, k...): every input element meets weight[1:]
    return (math.prod(tensor_args(node)[0].meta["shape"]) * math.prod(weight[1:]), 0) if weight else None


def _linear_macs(node: fx.Node) -> Macs | None:
    weight = _weight_shape(node)
    return (math.prod(node.meta["shape"]) * weight[1], 0) if weight else None


def _matmul_macs(node: fx.Node) -> Macs | None:
    arguments = tensor_args(node)
    added = getattr(node.target, "__name__", "") in {"baddbmm", "addmm"}  # the first argument is added to the product
    if len(arguments) < 2:
        return None
    macs = math.prod(node.meta["shape"]) * arguments[added].meta["shape"][-1]
    return (macs, 0) if any(n.op == "get_attr" for n in arguments[added:]) else (0, macs)


def _attention_macs(node: fx.Node) -> Macs | None:
    """Projections and both products of nn.MultiheadAttention, or both products of scaled_dot_product_attention."""
    shapes = [n.meta["shape"] for n in tensor_args(node)]
    if node.op != "call_module":
        if len(shapes) < 3:
            return None
        query, key, value = shapes[:3]
        return 0, math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    module = node_module(node)
    width: int = module.embed_dim  # type: ignore[assignment]
    kdim: int = module.kdim  # type: ignore[assignment]
    vdim: int = module.vdim  # type: ignore[assignment]
    if len(shapes) == 1:  # query, key and value are one tensor
        shapes = shapes * 3
    query, key = shapes[0], shapes[1]
    length = 1 if getattr(module, "batch_first", False) else 0
    batch = math.prod(query[:-1]) // query[length]
    projections = math.prod(query[:-1]) * width * width * 2 + math.prod(key[:-1]) * width * (kdim + vdim)
    return projections, batch * query[length] * key[length] * width * 2


def _window_attention_macs(node: fx.Node) -> Macs | None:
    """Of torchvision's shifted_window_attention: the map is padded to whole windows, and each attends to itself."""
    (batch, *sides, width), window = tensor_args(node)[0].meta["shape"], cast("list[int]", node.args[4])
    tokens = batch * math.prod(-(-side // step) * step for side, step in zip(sides, window, strict=True))
    return tokens * width * width * 4, tokens * math.prod(window) * width * 2


_MACS: dict[str, Callable[[fx.Node], Macs | None]] = {
    "conv": _conv_macs,
    "conv_transpose": _conv_transpose_macs,
    "linear": _linear_macs,
    "matmul": _matmul_macs,
    "attention": _attention_macs,
}

_WRAPPED: dict[str, Callable[[fx.Node], Macs | None]] = {
    "shifted_window_attention": _window_attention_macs,
    "_get_relative_position_bias": lambda node: (0, 0),  # a look-up in a table
    "_patch_merging_pad": lambda node: (0, 0),  # pads and regroups
}

_FREE = KINDS - set(_MACS) - {"einsum"}
