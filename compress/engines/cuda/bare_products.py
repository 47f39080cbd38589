"""Times a layer's bare product in floating point by torch's libraries, which our INT8 kernel has to beat."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Convolution, Linear, Step
from compress.engines.cuda.timing import launch_ms

_KNOWN: dict[object, float] = {}


def bare_ms(
    step: Step, layout: Layout, dtype: torch.dtype = torch.float16, device: torch.device | None = None
) -> float | None:
    """Milliseconds of a convolution or a linear layer with its bias, channels_last; None for other steps.

    Its residual, its activation and its pooling are left out, so the layer takes at least this long.
    """
    if not isinstance(step, (Convolution, Linear)):
        return None
    place = device or torch.device("cuda")
    shape = layout.plan.tensors[step.x.name].shape
    geometry = (step.stride, step.padding, step.dilation, step.groups) if isinstance(step, Convolution) else ()
    key = (shape, tuple(step.weight.shape), geometry, dtype, place)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(step, shape, dtype, place)
    return _KNOWN[key]


def _measured(step: Convolution | Linear, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(step.weight.shape, device=device).to(dtype)
    bias = torch.randn(weight.shape[0], device=device).to(dtype)
    if isinstance(step, Linear):
        return launch_ms(partial(_linear, x, weight, bias), device)
    (above, below), (left, right) = step.padding
    if (above, left) != (below, right):
        x = nn.functional.pad(x, (left, right, above, below))
        above = left = 0
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    stride, dilation, groups = step.stride, step.dilation, step.groups

    def run() -> None:
        nn.functional.conv2d(x, weight, bias, stride, (above, left), dilation, groups)

    return launch_ms(run, device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    nn.functional.linear(x, weight, bias)
