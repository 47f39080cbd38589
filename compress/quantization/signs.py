"""Which tensors are never negative, so that their integers need no sign."""

from __future__ import annotations

from torch import fx

from compress.graph.layers import tensor_args
from compress.graph.ops import node_kind, node_module

_NEVER_NEGATIVE = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "softplus"})
_KEEPS_SIGN = frozenset(
    {"max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool", "mean", "add", "mul", "concat", "dropout"}
    | {"identity", "flatten", "reshape", "transpose", "squeeze", "split", "getitem", "resize", "roll", "repeat"}
    | {"pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "stack", "quantizer"}
)
"""Results that are not negative when no input is (a bilinear resize too: its weights are positive)."""


def never_negative(node: fx.Node) -> bool:
    """Whether the value of `node` is at least 0 for every input of the model. False where that is not known."""
    kind = node_kind(node)
    if kind in _NEVER_NEGATIVE:
        return True
    if kind == "clamp":
        return _lower_bound(node) >= 0
    if kind == "resize" and "bicubic" in str(node.kwargs.get("mode", getattr(_module(node), "mode", ""))):
        return False  # cubic weights are negative in places
    sources = tensor_args(node)
    constant = any(not isinstance(a, (fx.Node, tuple, list, int)) for a in node.args) and kind in {"add", "mul"}
    return kind in _KEEPS_SIGN and bool(sources) and not constant and all(never_negative(s) for s in sources)


def _module(node: fx.Node) -> object:
    return node_module(node) if node.op == "call_module" else None


def _lower_bound(node: fx.Node) -> float:
    low = getattr(_module(node), "min_val", None)
    if low is None:
        low = node.kwargs.get("min", node.kwargs.get("min_val", node.args[1] if len(node.args) > 1 else None))
    return float(low) if isinstance(low, (int, float)) else float("-inf")
