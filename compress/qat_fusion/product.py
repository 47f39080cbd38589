"""The product of a layer with another weight and bias, and the operations that may follow it in a chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels.activation import SMOOTH_ACTIVATIONS
from compress.kernels.epilogue import Epilogue
from compress.qat_fusion.chain import BOUNDS
from compress.quantization.quantizer import Quantizer

ACTIVATIONS = {"relu": F.relu, "relu6": F.relu6, **SMOOTH_ACTIVATIONS}
_PLAIN: tuple[float, float] = (-math.inf, math.inf)


def epilogue_of(layer: nn.Module | None, activation: str, quantizer: Quantizer) -> Epilogue:
    """The epilogue of a chain: its activation, if it clips, and the quantizer's integers."""
    lower, upper = BOUNDS.get(activation, _PLAIN)
    bias_dim = -1 if isinstance(layer, nn.Linear) else 1
    quant_format = quantizer.format
    return Epilogue(quant_format.low, quant_format.high, lower, upper, quant_format.axis, bias_dim)


def product(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The result of a convolution or linear layer with another weight and bias; None = its own quantized weight."""
    if weight is None:
        weight = layer.quantized_weight if hasattr(layer, "weight_quantizer") else layer.weight
    matmul: Callable[..., Tensor] = F.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    return matmul(x, weight, bias)
