"""Bias, residual add, activation and fake quantization as one operation that keeps one bit an element for backward.

A training step is bound by memory bandwidth in everything but its convolutions, and its memory is what is kept for the
backward pass. Done one by one, bias, add, ReLU and fake quantization read and write the tensor four times and
keep the ReLU's result and a byte mask beside the quantized tensor that the next convolution keeps for itself. But
the gradient of the whole chain is the incoming gradient where the ReLU passed and the integer did not saturate, and 0
elsewhere: one bit says it. So forward reads the layer's result once, writes the quantized tensor and an eighth of a
byte; backward reads the gradient and that bit, and sums the bias's gradient on the way.

Storing the integer (one byte) in place of the quantized tensor would halve the memory again, but every convolution's
backward would first have to write it out in half precision: three bytes an element of traffic to save one of memory.

`fused_quantize` is computed by Triton kernels on a GPU (`fused_triton`), where layout and type fit, and by the torch
operations below everywhere else; both compute the same numbers, those of `fake_quantize`. Under torch.compile its
forward pass is the same kernel, and its backward pass torch operations (`fused_traced`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from compress.errors import QuantizationError
from compress.kernels.triton.launch import HAS_TRITON
from compress.quantization.numerics import QuantFormat, along_axis

Kernels = Literal["triton", "torch"]

BITS = 8
"""In a byte."""
MOST_TAPS = 255
"""Of a pool's window whose places a byte counts, with one number left."""


class Epilogue(NamedTuple):
    """What happens between a layer's matrix product and the next layer's input, besides the tensors.

    Attributes:
        low, high: smallest and largest integer; the scale is amax / high.
        lower, upper: bounds of the activation: 0 and infinity for ReLU, 0 and 6 for ReLU6, infinities for none.
        axis: of per-channel ranges; None = one range.
        bias_dim: the axis that the bias belongs to: 1 for convolutions, -1 for linear layers.
    """

    low: int
    high: int
    lower: float = -math.inf
    upper: float = math.inf
    axis: int | None = None
    bias_dim: int = 1


class Window(NamedTuple):
    """Of a max pool; each (vertical, horizontal), as in `torch.nn.MaxPool2d`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def out_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(OH, OW) of the pool of an image of (H, W)."""
        found = []
        for n, k, s, p in zip(size, self.kernel, self.stride, self.padding, strict=True):
            windows = (n + 2 * p - k + (s - 1 if self.ceil_mode else 0)) // s + 1
            found.append(windows - 1 if (windows - 1) * s >= n + p else windows)  # none begins behind the image
        return found[0], found[1]

    @property
    def overlap(self) -> tuple[int, int]:
        """How many windows the pixels of a cell of `stride` lie in, at most."""
        ends = zip(self.kernel, self.stride, self.padding, strict=True)
        found = [(s - 1 + p) // s + (k - 1 - p) // s + 1 for k, s, p in ends]
        return found[0], found[1]


def least_kept(low: int) -> float:
    """Every float32 above this rounds, half to even, to `low` or more; no other does."""
    tie = low - 0.5
    return tie if low % 2 else tie - 2.0 ** (math.frexp(tie)[1] - 24)  # the next float32 below


def epilogue_of(
    quant_format: QuantFormat, *, lower: float = -math.inf, upper: float = math.inf, bias_dim: int = 1
) -> Epilogue:
    """The epilogue that ends in integers of `quant_format`."""
    return Epilogue(quant_format.low, quant_format.high, lower, upper, quant_format.axis, bias_dim)


def fused_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
    again: bool = False,
) -> Tensor:
    """Fake quantization of activation(y + bias + residual), computed in float32 (float64 for float64).

    The gradient is that of the operations one by one (`fake_quantize` straight through, ReLU 0 at 0); `amax` has none.

    Args:
        y: any shape, floating point: what a layer computed without its bias.
        amax: () or (C,): the largest magnitudes kept.
        epilogue: what is computed.
        bias: (C,), C the size of `y` along `epilogue.bias_dim`.
        residual: shape of `y`.
        dtype: of the result; None = that of `y`.
        kernels: which implementation; None = Triton on a GPU, where layout and type fit.
        again: torch's operations in a graph that is being compiled keep a mask in the place of bits: for a `y` that is
            kept for backward anyway, from which the compiler then computes the mask again where it is needed. Bits it
            would compute again too, but pack them in a kernel of its own, for another to read.

    Returns:
        Shape and memory format of `y`.
    """
    dtype = dtype or y.dtype
    result: Tensor | None = None
    if in_graph(y, kernels):
        from compress.kernels.triton import compiled as fused_traced  # Triton is not installed everywhere

        result = fused_traced.fused_quantize(y, amax, epilogue, bias, residual, dtype)
    elif by_hand(y, kernels):
        result = _triton().fused_quantize(dense(y), amax, epilogue, bias, residual, dtype)
    if result is not None:
        return result
    return cast(Tensor, _FusedQuantize.apply(y, bias, residual, amax, *epilogue, dtype, again))


def pooled_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    window: Window,
    *,
    bias: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Max pooling of `fused_quantize`; one kernel, also in a compiled graph, on a GPU where layout and type fit.

    Args:
        y: (N, C, H, W), what a convolution computed without its bias.
        amax: (), the largest magnitude kept.
        epilogue: what is computed.
        window: of the pool.
        bias: (C,).
        kernels: as of `fused_quantize`.
    """
    if in_graph(y, kernels) or by_hand(y, kernels):
        from compress.kernels.triton import pool as fused_pool  # Triton is not installed everywhere

        if fused_pool.fits(y) and epilogue.axis is None:
            return fused_pool.pooled_quantize(y, amax, epilogue, window, bias, y.dtype)
    return max_pool(fused_quantize(y, amax, epilogue, bias=bias, kernels=kernels), window)


def max_pool(x: Tensor, window: Window) -> Tensor:
    """Torch's own."""
    return torch.nn.functional.max_pool2d(x, window.kernel, window.stride, window.padding, ceil_mode=window.ceil_mode)


def by_hand(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether Triton kernels are to be launched for `x`: asked for, or on a GPU; never while it is being compiled."""
    return (kernels == "triton" or (kernels is None and HAS_TRITON and x.is_cuda)) and not torch.compiler.is_compiling()


def refuse_second_derivative(*grads: Tensor | None) -> None:
    """Refuse a gradient of a gradient, which Triton kernels do not compute.

    Raises:
        QuantizationError: one is asked for.
    """
    if not torch.compiler.is_compiling() and any(grad is not None and grad.requires_grad for grad in grads):
        raise QuantizationError(
            "our Triton kernels have no second derivative; for one, fuse with forward='float', kernels='torch' "
            "(fuse_for_training)"
        )


def in_graph(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether Triton kernels are to stand in the graph that is being compiled: on a GPU, unless torch is asked for."""
    return kernels != "torch" and HAS_TRITON and x.is_cuda and torch.compiler.is_compiling()


class _FusedQuantize(torch.autograd.Function):
    """Keeps the packed bits only, or a mask; the result is kept by whichever layer reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        amax: Tensor,
        low: int,
        high: int,
        lower: float,
        upper: float,
        axis: int | None,
        bias_dim: int,
        dtype: torch.dtype,
        again: bool,
    ) -> Tensor:
        y = dense(y)
        if residual is not None:
            residual = like(residual, y)
        epilogue = Epilogue(low, high, lower, upper, axis, bias_dim)
        result, passes = _forward(y, bias, residual, amax, epilogue, dtype)
        ctx.save_for_backward(passes if again and torch.compiler.is_compiling() else pack(passes))
        ctx.last = is_channels_last(y)
        ctx.bias_dim, ctx.dtype = bias_dim, y.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last if ctx.last else torch.contiguous_format)
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        passed, bias_grad = backward_torch(grad, bits, ctx.dtype, ctx.bias_dim, wants_bias)
        residual_grad = passed.to(ctx.residual_dtype) if ctx.residual_dtype is not None else None
        return passed, bias_grad.to(ctx.bias_dtype) if wants_bias else None, residual_grad, *(None,) * 9


def forward_torch(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(the quantized tensor, the packed bits) by torch operations; `residual` is laid out as `y`."""
    result, passes = _forward(y, bias, residual, amax, epilogue, dtype)
    return result, pack(passes)


def _forward(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(the quantized tensor, whether the gradient passes)."""
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
    scale = along_axis((amax / epilogue.high).to(work.dtype), y, epilogue.axis)
    rounded = torch.round(work / scale)
    clamped = rounded.clamp(epilogue.low, epilogue.high)
    result = clamped * scale
    # a `.to` that changes nothing, as an autograd.Function's result, has a gradient of zero in torch 2.11's compiler
    return (result if result.dtype == dtype else result.to(dtype)), passes & (rounded == clamped)


def backward_torch(
    grad: Tensor, bits: Tensor, dtype: torch.dtype, bias_dim: int, wants_bias: bool
) -> tuple[Tensor, Tensor]:
    """(`grad` where bits (packed, or a mask) are set, its sum over all axes but `bias_dim`, empty unless wanted)."""
    passed = torch.where(bits if bits.dtype == torch.bool else unpack(bits, grad), grad, 0.0).to(dtype)
    if not wants_bias:
        return passed, passed.new_empty(0)
    dims = [d for d in range(grad.dim()) if d != bias_dim % grad.dim()]
    return passed, passed.sum(dims, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def pack(bits: Tensor) -> Tensor:
    """Eight booleans to a byte, in the order in which they lie in memory; lowest bit first, padded with zeros."""
    flat = _memory_order(bits).reshape(-1)
    missing = -flat.numel() % BITS
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, missing)) if missing else flat.to(torch.uint8)
    return (flat.view(-1, BITS) << _shifts(flat)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    """The booleans of `pack`, shape and memory format of `like`."""
    flat = ((packed[:, None] >> _shifts(packed)) & 1).reshape(-1)[: like.numel()].bool()
    shape = _memory_order(like).shape
    if is_channels_last(like):
        return flat.view(shape).permute(0, 3, 1, 2)
    return flat.view(shape)


def fits(y: Tensor, epilogue: Epilogue, bias: Tensor | None) -> bool:
    """Whether type and layout of a dense `y` are those of Triton's kernels: the bias innermost, in eights."""
    if y.dtype == torch.float64:
        return False
    return bias is None or (bias.numel() % BITS == 0 and inner_size(y, epilogue.bias_dim) == 1)


def dense(y: Tensor) -> Tensor:
    """`y` without gaps, in the usual order or channels_last."""
    return y if is_channels_last(y) or y.is_contiguous() else y.contiguous()


def like(x: Tensor, y: Tensor) -> Tensor:
    """`x` in the memory format of a dense `y` of the same shape."""
    return x.contiguous(memory_format=torch.channels_last if is_channels_last(y) else torch.contiguous_format)


def inner_size(y: Tensor, axis: int) -> int:
    """How far apart neighbours along `axis` lie, in elements, once `y` is dense."""
    axis %= y.dim()
    if is_channels_last(y):
        sizes = {0: y.shape[1] * y.shape[2] * y.shape[3], 1: 1, 2: y.shape[1] * y.shape[3], 3: y.shape[1]}
        return sizes[axis]
    return math.prod(y.shape[axis + 1 :])


def empty_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(what a kernel writes to, the same memory as a channels_last tensor of `shape`).

    Two views for torch's compiler: it takes two `empty_strided` that are alike for one, and copies it then; and a
    channels_last `empty` it fills with zeros.
    """
    n, c, h, w = shape
    if torch.compiler.is_compiling():
        base = torch.empty((n, h, w, c), dtype=dtype, device=device)
        return base, base.permute(0, 3, 1, 2)
    view = torch.empty_strided(shape, (c * h * w, 1, c * w, c), dtype=dtype, device=device)
    return view, view


def empty_as(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(what a kernel writes to, the same memory in the shape and memory format of a dense `y`)."""
    if is_channels_last(y):
        return empty_last(cast("tuple[int, ...]", y.shape), dtype, y.device)
    made = torch.empty(y.shape, dtype=dtype, device=y.device)
    return made, made


def is_channels_last(y: Tensor) -> bool:
    """Whether `y` is dense in that order and not in the usual one."""
    return y.dim() == 4 and not y.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last)


def _memory_order(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1) if is_channels_last(y) else y


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=like.device)


@functools.cache
def _triton() -> Any:
    """The module of the Triton kernels: imported where they run, as Triton is not installed everywhere."""
    from compress.kernels.triton import fake_quantize as fused_triton

    return fused_triton
