"""The epilogue of a layer: bias, residual, activation and fake quantization; types, and formulas in torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.memory_format import along_axis, unpack

# Largest pooling window whose argmax fits a uint8; 255 itself means that no gradient passes.
LARGEST_WINDOW = 255


class IntegerGrid(NamedTuple):
    """Integers from `low` to `high` (odd, at most 255); a step of `amax`, () or (C,) along `axis`, is amax / high."""

    amax: Tensor
    low: int
    high: int
    axis: int | None = None


class Epilogue(NamedTuple):
    """The operations between the matrix product of a layer and the input of the next layer.

    Attributes:
        low, high: smallest and largest integer; the scale is amax / high.
        lower, upper: bounds of the activation; infinities for none.
        axis: channel axis of per-channel ranges; None = one range.
        bias_dim: axis of the bias: 1 for convolutions, -1 for linear layers.
    """

    low: int
    high: int
    lower: float = -math.inf
    upper: float = math.inf
    axis: int | None = None
    bias_dim: int = 1


class Window(NamedTuple):
    """The window of a max pool; each (vertical, horizontal), as in `torch.nn.MaxPool2d`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def out_size(self, size: tuple[int, int]) -> tuple[int, int]:
        found = []
        for n, k, s, p in zip(size, self.kernel, self.stride, self.padding, strict=True):
            windows = (n + 2 * p - k + (s - 1 if self.ceil_mode else 0)) // s + 1
            found.append(windows - 1 if (windows - 1) * s >= n + p else windows)  # no window begins past the image
        return found[0], found[1]

    @property
    def overlap(self) -> tuple[int, int]:
        """Largest number of windows that share a pixel, along each axis."""
        ends = zip(self.kernel, self.stride, self.padding, strict=True)
        found = [(s - 1 + p) // s + (k - 1 - p) // s + 1 for k, s, p in ends]
        return found[0], found[1]


def rounding_threshold(low: int) -> float:
    """The threshold above which rounding a float32 half to even yields at least `low`."""
    tie = low - 0.5
    return tie if low % 2 else tie - 2.0 ** (math.frexp(tie)[1] - 24)  # the next float32 below


def activated_torch(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> tuple[Tensor, Tensor]:
    """(the activation of `y` plus bias and residual, a mask of where it passes its gradient); float32 or float64."""
    work = y if y.dtype == torch.float64 else y.float()
    if bias is not None:
        work = work + along_axis(bias.to(work.dtype), y, epilogue.bias_dim)
    if residual is not None:
        work = work + residual
    passes = (work > epilogue.lower) & (work < epilogue.upper)
    if math.isfinite(epilogue.lower):
        work = work.clamp(min=epilogue.lower)
    if math.isfinite(epilogue.upper):
        work = work.clamp(max=epilogue.upper)
    return work, passes


def forward_torch(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(the quantized tensor, a boolean mask of where the gradient passes), laid out as `y`."""
    work, passes = activated_torch(y, bias, residual, epilogue)
    scale = along_axis((amax / epilogue.high).to(work.dtype), y, epilogue.axis)
    rounded = torch.round(work / scale)
    clamped = rounded.clamp(epilogue.low, epilogue.high)
    result = clamped * scale
    # In torch 2.11's compiler an autograd.Function that ends in a `.to` of the same type has gradient zero
    return (result if result.dtype == dtype else result.to(dtype)), passes & (rounded == clamped)


def backward_torch(
    grad: Tensor, mask: Tensor, dtype: torch.dtype, bias_dim: int, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """(`grad` where `mask`, boolean or packed, is set, its sum over all axes but `bias_dim` if wanted)."""
    passed = torch.where(mask if mask.dtype == torch.bool else unpack(mask, grad), grad, 0.0).to(dtype)
    if not wants_bias:
        return passed, None
    dims = [d for d in range(grad.dim()) if d != bias_dim % grad.dim()]
    return passed, passed.sum(dims, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def max_pool(x: Tensor, window: Window) -> Tensor:
    return torch.nn.functional.max_pool2d(x, window.kernel, window.stride, window.padding, ceil_mode=window.ceil_mode)
