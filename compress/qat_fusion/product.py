"""The product of a layer with another weight and bias, and the operations that may follow it in a chain."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels.activation import SMOOTH_ACTIVATIONS
from compress.kernels.dispatch import Kernels, use_triton
from compress.kernels.epilogue import Epilogue
from compress.kernels.memory_format import is_channels_last
from compress.kernels.triton.depthwise import depthwise, fits
from compress.qat_fusion.chain import BOUNDS
from compress.qat_fusion.weights import weight_dtype
from compress.quantization.quantizer import Quantizer

ACTIVATIONS = {"relu": F.relu, "relu6": F.relu6, **SMOOTH_ACTIVATIONS}
_PLAIN: tuple[float, float] = (-math.inf, math.inf)
_NARROW = range(16, 73)  # channels of the groups that are merged; 24, 48 and 72 were timed on an H200
_EVEN = 32  # cuDNN is fastest with groups of a multiple of it,
_LARGEST_EVEN = 256  # or with one group of at most so many channels,
_LARGEST_ODD = 96  # and else with the widest groups up to this


def epilogue_of(layer: nn.Module | None, activation: str, quantizer: Quantizer) -> Epilogue:
    """The epilogue of a chain: its activation, if it clips, and the quantizer's integers."""
    lower, upper = BOUNDS.get(activation, _PLAIN)
    bias_dim = -1 if isinstance(layer, nn.Linear) else 1
    quant_format = quantizer.format
    return Epilogue(quant_format.low, quant_format.high, lower, upper, quant_format.axis, bias_dim)


def product(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """The result of a convolution or linear layer with another weight and bias.

    A `weight` of None is the layer's own quantized one; a `bias` of None adds none. Triton computes only depthwise
    convolutions with large filters.
    """
    if weight is None:
        weight = layer.quantized_weight if hasattr(layer, "weight_quantizer") else layer.weight
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if layer.groups > 1 and layer.padding_mode == "zeros" and use_triton(x, kernels):
        dtype, padding = weight_dtype(x), layer.padding
        if not isinstance(padding, str) and fits(x, weight, dtype, layer.stride, padding, layer.dilation):
            return depthwise(x.to(dtype), weight.to(dtype), bias)
        timed = isinstance(layer, nn.Conv2d) and tuple(weight.shape[2:]) == (3, 3)
        count = groups_together(layer.groups, weight.shape[1]) if timed else 1
        if count > 1 and dtype in (torch.float16, torch.bfloat16) and is_channels_last(x):
            # cuDNN converts grouped tensors to another memory format and back unless the groups are wide (RegNetY)
            wide = merged_groups(weight.to(dtype), layer.groups, count)
            return F.conv2d(x, wide, bias, layer.stride, padding, layer.dilation, layer.groups // count)
    return layer._conv_forward(x, weight, bias)


def groups_together(groups: int, width: int) -> int:
    """How many neighbouring groups of a convolution, of `width` input channels each, are computed as one."""
    if width not in _NARROW or width % _EVEN == 0:
        return 1
    counts = [count for count in range(1, groups + 1) if groups % count == 0 and count * width <= _LARGEST_EVEN]
    even = [count for count in counts if count * width % _EVEN == 0]
    whole = [count for count in counts if count == groups]
    return min([*even, *whole], default=max((count for count in counts if count * width <= _LARGEST_ODD), default=1))


def merged_groups(weight: Tensor, groups: int, count: int) -> Tensor:
    """The filter (K, C * count, R, S), in channels_last, of a convolution whose groups are merged by `count`.

    `weight` is (K, C, R, S); `count` divides `groups`.
    """
    outputs, width, *taps = weight.shape
    blocks = weight.reshape(groups // count, count, outputs // groups, 1, width, *taps)
    own = torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(1, count, 1, count, 1, 1, 1)
    return (blocks * own).reshape(outputs, count * width, *taps).contiguous(memory_format=torch.channels_last)
