"""The product of a layer with another weight and bias, and the operations that may follow it in a chain."""

from __future__ import annotations

import math
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels.activation import SMOOTH_ACTIVATIONS
from compress.kernels.dispatch import Kernels, use_triton
from compress.kernels.epilogue import Epilogue
from compress.kernels.triton.depthwise import depthwise, fits
from compress.qat_fusion.chain import BOUNDS
from compress.qat_fusion.weights import weight_dtype
from compress.quantization.quantizer import Quantizer

ACTIVATIONS = {"relu": F.relu, "relu6": F.relu6, **SMOOTH_ACTIVATIONS}
_PLAIN: tuple[float, float] = (-math.inf, math.inf)


def epilogue_of(layer: nn.Module | None, activation: str, quantizer: Quantizer) -> Epilogue:
    """The epilogue of a chain: its activation, if it clips, and the quantizer's integers."""
    lower, upper = BOUNDS.get(activation, _PLAIN)
    bias_dim = -1 if isinstance(layer, nn.Linear) else 1
    quant_format = quantizer.format
    return Epilogue(quant_format.low, quant_format.high, lower, upper, quant_format.axis, bias_dim)


def product(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """The result of a convolution or linear layer with another weight and bias.

    Args:
        layer: whose result it is.
        x: the layer's input.
        weight: quantized; None = the layer's own quantized weight.
        bias: None = none is added.
        kernels: as of `fuse_for_training`: Triton's for depthwise convolutions with large filters.
    """
    if weight is None:
        weight = layer.quantized_weight if hasattr(layer, "weight_quantizer") else layer.weight
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if layer.groups > 1 and layer.padding_mode == "zeros" and use_triton(x, kernels):
        dtype, padding = weight_dtype(x), layer.padding
        if not isinstance(padding, str) and fits(x, weight, dtype, layer.stride, padding, layer.dilation):
            return depthwise(x.to(dtype), weight.to(dtype), bias)
    return cast(Tensor, layer._conv_forward(x, weight, bias))
