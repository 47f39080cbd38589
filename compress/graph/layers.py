"""The layers of a graph and their costs: kind, shapes, parameters and macs; and how long values are alive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, fx

from compress.graph.attention import attention_arguments
from compress.graph.ops import TRAITS, node_kind, node_module
from compress.graph.spelled import written_out

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operation of a traced graph, for the batch that it was traced with.

    Attributes:
        name: the fx node's name.
        path: the module's path; "" for a function or a method.
        kind: row of `graph.ops`.
        type: class or function, as written.
        output_shape: None if the result is no tensor.
        weight_elements, bias_elements: elements of its own parameters; of a module with several, those with two
            dimensions or more are weights.
        macs: multiply-accumulates of matrix products (flops = 2 * macs), 0 for elementwise operations and pools;
            None = unknown.
        weight_macs: the part of `macs` that multiplies a weight.
        groups: groups of a convolution, else 1.
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
    """The operations of a traced graph, in order, without inputs, constants and shape arithmetic."""
    skipped = {"graph", "shape", "quantizer"}
    nodes = (n for n in graph_module.graph.nodes if TRAITS[node_kind(n)].category not in skipped)
    return tuple(
        _layer(n) for n in nodes if _output_shape(n) is not None or (node_kind(n) in _TUPLES and tensor_args(n))
    )


_TUPLES = frozenset({"unknown", "sort", "scan", "recurrent"})  # which may return several tensors


def total_macs(items: tuple[Layer, ...]) -> tuple[int, tuple[str, ...]]:
    """(sum of the known macs, names of the layers whose macs are unknown)."""
    unknown = tuple(layer.path or layer.name for layer in items if layer.macs is None)
    return sum(layer.macs or 0 for layer in items), unknown


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments (also in lists) whose value is a tensor."""
    return [n for n in node.all_input_nodes if n.meta.get("shape") is not None]


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []  # a tensor as often as it is given
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if n.meta.get("shape") is not None]


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
    if node.meta.get("shape") is None and node_kind(node) == "attention":
        query: Shape = tensor_args(node)[0].meta["shape"]
        return query
    return node.meta.get("shape")


Macs = tuple[int, int]  # with a weight, without


def _macs(node: fx.Node, kind: str) -> Macs | None:
    if TRAITS[kind].category in {"weighted", "product", "unknown"}:
        formula = _MACS.get(kind)
        if formula is None and not tensor_args(node):
            return 0, 0  # such as torch.arange
        return formula(node) if formula else None
    return 0, 0


def _weight_shape(node: fx.Node) -> Shape | None:
    if node.op == "call_module":
        return tuple(node_module(node).weight.shape)  # type: ignore[arg-type]
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return weight.meta.get("shape") if isinstance(weight, fx.Node) else None


def _weight_macs(node: fx.Node) -> Macs | None:
    """Each element of the result, or of a transposed convolution's input, meets weight[1:]."""
    weight = _weight_shape(node)  # (out, in / groups, k...), or (out, in); if transposed (in, out / groups, k...)
    met = tensor_args(node)[0] if node_kind(node) == "conv_transpose" else node
    return (math.prod(met.meta["shape"]) * math.prod(weight[1:]), 0) if weight else None


def _matmul_macs(node: fx.Node) -> Macs | None:
    factors = _operands(node)[1 if node_kind(node) == "addmm" else 0 :]  # the first argument is added to the product
    if len(factors) < 2:
        return None
    macs = math.prod(node.meta["shape"]) * factors[0].meta["shape"][-1]
    return (macs, 0) if any(n.op == "get_attr" for n in factors) else (0, macs)


def _einsum_macs(node: fx.Node) -> Macs | None:
    # Every letter is a loop; of more than two operands the order of the products is not known.
    factors = _operands(node)
    shapes = [factor.meta["shape"] for factor in factors]
    written = written_out(str(node.args[0]), [len(shape) for shape in shapes])
    if written is None or len(factors) > 2:
        return None
    sizes: dict[str, int] = {}
    sides, _, result = written.partition("->")
    both = set[str].intersection(*map(set, sides.split(",")))
    for letters, shape in zip(sides.split(","), shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    summed = len(factors) == 2 and not both <= {*result}
    loops = both | {*result}  # what one operand alone has is summed before the product
    macs = math.prod(size for letter, size in sizes.items() if letter in loops) if summed else 0
    return (macs, 0) if any(n.op == "get_attr" for n in factors) else (0, macs)


def _attention_macs(node: fx.Node) -> Macs | None:
    """Projections and both products of nn.MultiheadAttention, or both products of scaled_dot_product_attention."""
    shapes = [n.meta["shape"] for n in _operands(node)]
    if node.op != "call_module":
        if len(shapes) < 3:
            return None
        if node.target is F.multi_head_attention_forward:  # (tokens, batch, width)
            given = attention_arguments(node)
            query, key, value, out = (given[n].meta["shape"] for n in ("query", "key", "value", "out_proj_weight"))
            projected = math.prod(query) + math.prod(key) + math.prod(value) + math.prod(query[:-1]) * out[0]
            return projected * query[-1], math.prod(query) * key[0] * 2
        query, key, value = shapes[:3]
        return 0, math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    module = node_module(node)
    width: int = module.embed_dim  # type: ignore[assignment]
    kdim: int = module.kdim  # type: ignore[assignment]
    vdim: int = module.vdim  # type: ignore[assignment]
    query, key = shapes[0], shapes[1]
    length = 1 if getattr(module, "batch_first", False) and len(query) == 3 else 0
    batch = math.prod(query[:-1]) // query[length]
    projections = math.prod(query[:-1]) * width * width * 2 + math.prod(key[:-1]) * width * (kdim + vdim)
    return projections, batch * query[length] * key[length] * width * 2


def _contraction_macs(node: fx.Node) -> Macs | None:
    # (m, k) by (k, n): each size is that of all axes that two of the three tensors share
    factors = _operands(node)
    if len(factors) != 2:
        return None
    left, right = (math.prod(factor.meta["shape"]) for factor in factors)
    macs = math.isqrt(left * right * math.prod(node.meta["shape"]))
    return (macs, 0) if any(n.op == "get_attr" for n in factors) else (0, macs)


def _recurrent_macs(node: fx.Node) -> Macs | None:
    # each matrix of the layer meets every token once
    matrices = sum(p.numel() for p in node_module(node).parameters() if p.ndim > 1)
    return math.prod(tensor_args(node)[0].meta["shape"][:-1]) * matrices, 0


def _window_attention_macs(node: fx.Node) -> Macs | None:
    """Macs of torchvision's shifted_window_attention, on a map padded to whole windows."""
    (batch, *sides, width), window = tensor_args(node)[0].meta["shape"], cast("list[int]", node.args[4])
    tokens = batch * math.prod(-(-side // step) * step for side, step in zip(sides, window, strict=True))
    return tokens * width * width * 4, tokens * math.prod(window) * width * 2


# Formulas; without one the macs of a weighted layer or a product are unknown.
_MACS: dict[str, Callable[[fx.Node], Macs | None]] = {
    "conv": _weight_macs,
    "conv_transpose": _weight_macs,
    "linear": _weight_macs,
    "matmul": _matmul_macs,
    "addmm": _matmul_macs,
    "einsum": _einsum_macs,
    "attention": _attention_macs,
    "window_attention": _window_attention_macs,
    "contraction": _contraction_macs,
    "recurrent": _recurrent_macs,
    "deform_conv": _weight_macs,
}


def alive_after(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Yield each node with those of `nodes`, in graph order, up to it that later ones of them consume."""
    place = {node: i for i, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users if user in place), default=-1) for node in place}
    live: set[fx.Node] = set()
    for node, i in place.items():
        live = {other for other in (*live, node) if last[other] > i}
        yield node, live
