"""Replaces operations by equivalent ones where an exporter does not know them or an engine computes them wrongly."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.errors import ExportError
from compress.graph.ops import node_kind
from compress.onnx_graph.window import AVERAGE_POOLS, MAX_POOLS

_MAX_POOLS: dict[int, type[nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d]] = {
    1: nn.MaxPool1d,
    2: nn.MaxPool2d,
    3: nn.MaxPool3d,
}
_AVERAGES = (F.avg_pool2d, F.avg_pool3d)


class _LogSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return log_sigmoid(x)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(sigmoid(x)); ONNX Runtime cuts off the sigmoid at -18, and its logarithm has no tail there."""
    return -F.softplus(-x)


def avg_pool(
    x: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return an average with a divisor of its own as a product: torch's exporter leaves `divisor_override` out.

    The arguments are those of `F.avg_pool2d` and `F.avg_pool3d`; `count_include_pad` has no effect where there is a
    divisor.
    """
    pool = AVERAGE_POOLS[x.dim() - 2]
    stride = kernel_size if stride is None else stride
    if divisor_override is None:
        averaged: Tensor = pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
        return averaged
    if ceil_mode:
        raise ExportError(
            "an average pooling has divisor_override and ceil_mode: ONNX has no such form; pad it instead"
        )
    window = (kernel_size,) * (x.dim() - 2) if isinstance(kernel_size, int) else kernel_size
    averaged = pool(x, kernel_size, stride, padding)
    return averaged * (math.prod(window) / divisor_override)


class _AvgPool(nn.Module):
    def __init__(self, layer: nn.AvgPool2d | nn.AvgPool3d) -> None:
        super().__init__()
        self.window, self.stride, self.padding = layer.kernel_size, layer.stride, layer.padding
        self.ceil_mode, self.divisor = layer.ceil_mode, layer.divisor_override

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool(x, self.window, self.stride, self.padding, self.ceil_mode, divisor_override=self.divisor)


def spell_plainly(model: nn.Module) -> None:
    """Replace what an exporter does not know or an engine computes wrongly, in place.

    RReLU becomes LeakyReLU of the mean slope, adaptive maxima over equal windows become plain ones, average pooling
    with a divisor of its own an average and a product, and LogSigmoid minus a Softplus.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LogSigmoid):
            model.set_submodule(name, _LogSigmoid())
        if isinstance(module, nn.RReLU):
            model.set_submodule(name, nn.LeakyReLU((module.lower + module.upper) / 2))
        if isinstance(module, (nn.AvgPool2d, nn.AvgPool3d)) and module.divisor_override is not None:
            model.set_submodule(name, _AvgPool(module))
    if isinstance(model, fx.GraphModule):
        for node in list(model.graph.nodes):
            if node_kind(node) == "adaptive_max_pool":
                _spell_pool(model, node)
            if node.target is F.logsigmoid:
                node.target = log_sigmoid
            if node.target in _AVERAGES and (len(node.args) > 6 or node.kwargs.get("divisor_override") is not None):
                node.target = avg_pool
                node.kwargs = {("x" if name == "input" else name): value for name, value in node.kwargs.items()}
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
    users = [other for other in model.graph.nodes if other.op == "call_module" and other.target == node.target]
    if users == [node]:  # its name stays that of the file's node
        model.set_submodule(str(node.target), _MAX_POOLS[len(window)](window))
    else:
        node.op, node.target = "call_function", MAX_POOLS[len(window)]
        node.args, node.kwargs = (source, window), {}
