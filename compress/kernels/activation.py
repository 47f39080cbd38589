"""Smooth activations x * s(x) and fake quantization as one operation: GELU, SiLU and hard swish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.bitmask import BITS_PER_BYTE
from compress.kernels.dispatch import Kernels, use_triton
from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.memory_format import along_axis, dense
from compress.kernels.triton import activation as triton_activation
from compress.kernels.triton.fake_quantize import fits

SMOOTH_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
}
"""Torch's functions by the names that the kernels use."""


def smooth_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    activation: str,
    *,
    bias: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Compute the fake quantization of activation(y + bias), in float32 (float64 for float64).

    In half precision GELU uses Abramowitz and Stegun, formula 7.1.26 (error at most 7.5e-8).

    - `y`: any shape, floating point: the result of a layer without its bias.
    - `amax`: () or (C,): the largest magnitudes kept.
    - `epilogue`: integers; its bounds are infinite.
    - `activation`: a key of `SMOOTH_ACTIVATIONS`.
    - `bias`: (C,), C the size of `y` along `epilogue.bias_dim`.
    - `kernels`: None = Triton on a GPU, where layout and type fit.

    Raises:
        QuantizationError: a second derivative is asked of Triton kernels.
    """
    if use_triton(y, kernels):
        y = dense(y)
        if bias is not None and not smooth_fits(y, epilogue, bias):
            y, bias = y + along_axis(bias.to(y.dtype), y, epilogue.bias_dim), None
        if smooth_fits(y, epilogue, bias):
            return triton_activation.smooth_quantize(y, amax, epilogue, activation, bias)
    work = y if y.dtype == torch.float64 else y.float()
    if bias is not None:
        work = work + along_axis(bias.to(work.dtype), y, epilogue.bias_dim)
    activated = SMOOTH_ACTIVATIONS[activation](work)
    return fused_quantize(activated, amax, epilogue, dtype=y.dtype, kernels=kernels, recompute_mask=True)


def smooth_fits(y: Tensor, epilogue: Epilogue, bias: Tensor | None) -> bool:
    """Whether the kernels take a dense `y`: as `fits`, with one range, and a multiple of eight elements."""
    return epilogue.axis is None and y.numel() > 0 and y.numel() % BITS_PER_BYTE == 0 and fits(y, epilogue, bias)
