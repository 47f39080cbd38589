"""Spells operations as others that compute the same, where an exporter does not know them or an engine errs on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind

_MAX_POOLS: dict[int, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    1: (nn.MaxPool1d, F.max_pool1d),
    2: (nn.MaxPool2d, F.max_pool2d),
    3: (nn.MaxPool3d, F.max_pool3d),
}


class _LogSigmoid(nn.Module):
    """See `log_sigmoid`."""

    def forward(self, x: Tensor) -> Tensor:
        return log_sigmoid(x)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(sigmoid(x)); ONNX Runtime cuts off the sigmoid at -18, and its logarithm has no tail there."""
    return -F.softplus(-x)


def spell_plainly(model: nn.Module) -> None:
    """Replace RReLU, evaluated as LeakyReLU of the mean slope, LogSigmoid, and adaptive maxima over equal windows.

    Args:
        model: changed in place.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LogSigmoid):
            model.set_submodule(name, _LogSigmoid())
        if isinstance(module, nn.RReLU):
            model.set_submodule(name, nn.LeakyReLU((module.lower + module.upper) / 2))
    if isinstance(model, fx.GraphModule):
        for node in list(model.graph.nodes):
            if node_kind(node) == "adaptive_max_pool":
                _spell_pool(model, node)
            if node.target is F.logsigmoid:
                node.target = log_sigmoid
        model.recompile()


def _spell_pool(model: fx.GraphModule, node: fx.Node) -> None:
    """Make a max pooling of an adaptive one, which torch 2.11 does not export, unless windows differ in size."""
    source = node.all_input_nodes[0]
    before, after = source.meta.get("shape"), node.meta.get("shape")
    if before is None or after is None or len(before) != len(after) or len(after) - 2 not in _MAX_POOLS:
        return
    sizes = list(zip(before[2:], after[2:], strict=True))
    if any(size % windows for size, windows in sizes):
        return
    window = tuple(size // windows for size, windows in sizes)
    layer, function = _MAX_POOLS[len(window)]
    users = [other for other in model.graph.nodes if other.op == "call_module" and other.target == node.target]
    if users == [node]:  # its name stays that of the file's node
        model.set_submodule(str(node.target), layer(window))
    else:
        node.op, node.target = "call_function", function
        node.args, node.kwargs = (source, cast(fx.node.Argument, window)), {}
