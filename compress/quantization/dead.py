"""Tensors that are zero whatever the image, because what makes them multiplies by zero.

Networks whose branches begin at zero (timm's `zero_init_last`, torchvision's `zero_init_residual`: the last BatchNorm
of a block has weight 0) hold such tensors until they are trained, pruned ones may keep some. No calibration image
reaches them, and any range is right for them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from compress.graph.ops import node_kind, node_module

_WEIGHTED = frozenset({"conv", "conv_transpose", "linear", "batch_norm"})
_OF_ZERO_ZERO = frozenset(
    {
        *(
            "relu",
            "relu6",
            "leaky_relu",
            "silu",
            "gelu",
            "hardswish",
            "tanh",
            "mish",
            "quantizer",
            "dropout",
            "identity",
        ),
        *("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "mean", "sum", "max", "resize"),
        *("flatten", "reshape", "transpose", "squeeze", "roll", "repeat", "split", "getitem", "pixel_shuffle"),
        *("add", "sub", "concat", "stack"),
    }
)
_PRODUCTS = frozenset({"mul", "matmul"})


def always_zero(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph whose tensors are zero for every input, as far as weights tell."""
    dead: set[fx.Node] = set()
    for node in graph.nodes:
        kind, known = node_kind(node), [source in dead for source in node.all_input_nodes]
        if kind in _WEIGHTED and node.op == "call_module":
            layer: Any = node_module(node)
            if _zero(layer.bias) and (all(known) or _zero(layer.weight)):
                dead.add(node)
        elif (kind in _PRODUCTS and any(known)) or (
            kind in _OF_ZERO_ZERO and known and all(known) and _no_number(node)
        ):
            dead.add(node)
    return dead


def _zero(values: Tensor | None) -> bool:
    return values is None or not bool(values.detach().any())


def _no_number(node: fx.Node) -> bool:
    """Whether no number is added: sums have no operand but tensors."""
    return node_kind(node) not in {"add", "sub"} or all(isinstance(value, fx.Node) for value in node.args)
