"""The layers of a graph with what they cost: kind, shapes, macs and elements moved.

macs are multiply-accumulates (flops = 2 * macs). The table holds the operations that dominate; elementwise
operations and pools have no multiply-accumulate of a matrix product and count 0; an operation that stands in no
table is None, which is unknown and not zero, and `total_macs` says which ones those were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
        weight_elements, bias_elements: elements of its own parameters.
        macs: multiply-accumulates for the traced batch; None = unknown.
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
    groups: int = 1
    kernel: Shape = ()

    @property
    def input_elements(self) -> int:
        """Elements of all tensor arguments."""
        return sum(math.prod(shape) for shape in self.input_shapes)

    @property
    def output_elements(self) -> int:
        """Elements of the result."""
        return math.prod(self.output_shape) if self.output_shape is not None else 0


def layers(graph_module: fx.GraphModule) -> tuple[Layer, ...]:
    """The operations of a graph made by `trace`, in order, without inputs, constants and shape arithmetic."""
    skipped = {"input", "output", "constant", "shape", "assert", "compare", "floordiv", "quantizer"}
    nodes = (n for n in graph_module.graph.nodes if node_kind(n) not in skipped)
    return tuple(_layer(n) for n in nodes if n.meta.get("shape") is not None or node_kind(n) == "unknown")


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
    parameters = sum(p.numel() for p in module.parameters()) if module is not None else 0
    weight_elements = weight.numel() if isinstance(weight, Tensor) else 0
    inputs = tuple(n.meta["shape"] for n in tensor_args(node))
    kernel = getattr(module, "kernel_size", ())
    return Layer(
        name=node.name,
        path=str(node.target) if module is not None else "",
        kind=kind,
        type=type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target)),
        input_shapes=inputs,
        output_shape=node.meta.get("shape"),
        weight_elements=weight_elements,
        bias_elements=parameters - weight_elements,
        macs=_MACS[kind](node) if kind in _MACS else None if kind not in _FREE else 0,
        groups=getattr(module, "groups", 1),
        kernel=(kernel,) if isinstance(kernel, int) else tuple(kernel),
    )


def _weight_shape(node: fx.Node) -> Shape | None:
    """Shape of the weight of a conv or linear, whether it is a module's or a function's second argument."""
    if node.op == "call_module":
        return tuple(node_module(node).weight.shape)  # type: ignore[arg-type]
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return weight.meta.get("shape") if isinstance(weight, fx.Node) else None


def _conv_macs(node: fx.Node) -> int | None:
    weight = _weight_shape(node)
    return math.prod(node.meta["shape"]) * math.prod(weight[1:]) if weight else None  # weight: (out, in / groups, k..)


def _conv_transpose_macs(node: fx.Node) -> int | None:
    weight = _weight_shape(node)  # (in, out / groups, k...): every input element meets weight[1:]
    return math.prod(tensor_args(node)[0].meta["shape"]) * math.prod(weight[1:]) if weight else None


def _linear_macs(node: fx.Node) -> int | None:
    weight = _weight_shape(node)
    return math.prod(node.meta["shape"]) * weight[1] if weight else None


def _matmul_macs(node: fx.Node) -> int | None:
    arguments = tensor_args(node)
    added = getattr(node.target, "__name__", "") in {"baddbmm", "addmm"}  # the first argument is added to the product
    return math.prod(node.meta["shape"]) * arguments[added].meta["shape"][-1] if len(arguments) >= 2 else None


def _attention_macs(node: fx.Node) -> int | None:
    """Projections and both products of nn.MultiheadAttention, or both products of scaled_dot_product_attention."""
    shapes = [n.meta["shape"] for n in tensor_args(node)]
    if node.op != "call_module":
        if len(shapes) < 3:
            return None
        query, key, value = shapes[:3]
        return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
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
    return projections + batch * query[length] * key[length] * width * 2


_MACS: dict[str, Callable[[fx.Node], int | None]] = {
    "conv": _conv_macs,
    "conv_transpose": _conv_transpose_macs,
    "linear": _linear_macs,
    "matmul": _matmul_macs,
    "attention": _attention_macs,
}

_FREE = KINDS - set(_MACS) - {"einsum"}
