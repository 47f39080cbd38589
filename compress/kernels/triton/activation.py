"""Smooth activations x * s(x) and fake quantization in one kernel, by strips of columns."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue, rounding_threshold
from compress.kernels.memory_format import empty_as, like
from compress.kernels.triton.fake_quantize import Strips, on_grid, step_of, steps_of, strip
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

_FORWARD = (2048, 2112)  # elements of a tile, and programs in all, about
_BACKWARD = (1024, 1056)
_WARPS = 8
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _reciprocal(x, EXACT: tl.constexpr):
    """The reciprocal of a positive number, in two instructions unless EXACT; Triton's `/` takes five."""
    if EXACT:
        return tl.div_rn(1.0, x)
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def smooth_factor(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(s, its derivative) of an activation x * s(x)."""
    if ACTIVATION == "gelu":
        bell = tl.exp2(x * x * (-0.5 * _LOG2_E))
        if EXACT:
            s = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        else:
            # Abramowitz and Stegun 7.1.26: 0.3275911 / sqrt(2), and halves of its coefficients
            t = _reciprocal(1.0 + tl.abs(x) * 0.23164189, EXACT)
            tail = 0.5307027145 * t - 0.7265760135
            tail = ((tail * t + 0.7107068705) * t - 0.142248368) * t + 0.1274147960
            tail *= t * bell
            s = tl.where(x < 0.0, tail, 1.0 - tail)
        slope = bell * 0.3989422804014327
    elif ACTIVATION == "hardswish":
        s = tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
        slope = tl.where((x > -3.0) & (x < 3.0), 0.16666666666666666, 0.0)
    else:
        inner = x
        steep = 1.0
        if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
            square = x * x
            inner = x * (1.5957691216057308 + 0.07135481282553487 * square)
            steep = 1.5957691216057308 + 0.2140644384766046 * square
        s = _reciprocal(1.0 + tl.exp2(-inner * _LOG2_E), EXACT)
        slope = s * (1.0 - s) * steep
    return s, slope


@triton.jit
def _activated(x, scale, reciprocal, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(the activation in steps of the scale, its derivative)."""
    s, slope = smooth_factor(x, ACTIVATION, EXACT)
    steps = steps_of(x * s, float("-inf"), float("inf"), scale, reciprocal) if EXACT else x * s * reciprocal
    return steps, s + x * slope


@triton.jit
def bias_of(bias_ptr, column, inside, HAS_BIAS: tl.constexpr):
    """The bias of columns, as a row; zeros that nothing reads where there is none."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(column.shape, dtype=tl.float32)
    return bias[None, :]


@triton.jit
def with_bias(tile_ptr, at, there, bias, HAS_BIAS: tl.constexpr):
    """A tile, of elements `at` from a pointer, in float32 and with the bias of its columns."""
    x = tl.load(tile_ptr + at, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += bias
    return x


@triton.jit
def forward_kernel(
    y_ptr,
    bias_ptr,
    amax_ptr,
    out_ptr,
    rows,
    columns,
    steps,
    low,
    high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the tiles of a strip of columns: y + bias, activated and quantized."""
    low = tl.cast(low, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = strip(columns, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = with_bias(y_ptr + row * columns, at, there, bias, HAS_BIAS)
        found, _ = _activated(x, scale, reciprocal, ACTIVATION, y_ptr.dtype.element_ty == tl.float32)
        value = on_grid(found, low, high) * scale
        tl.store(out_ptr + row * columns + at, value.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    grad_ptr,
    y_ptr,
    bias_ptr,
    amax_ptr,
    out_ptr,
    sums_ptr,
    rows,
    columns,
    steps,
    least,
    high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the tiles of a strip of columns: the gradient, masked and times the derivative of the activation."""
    least = tl.cast(least, tl.float32)
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = strip(columns, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = with_bias(y_ptr + row * columns, at, there, bias, HAS_BIAS)
        found, slope = _activated(x, scale, reciprocal, ACTIVATION, y_ptr.dtype.element_ty == tl.float32)
        passes = (found > least) & (found < high + 0.5)  # `high` is odd: halves round away from it
        passed = tl.where(passes, grad * slope, 0.0)
        tl.store(out_ptr + row * columns + at, passed.to(out_ptr.dtype.element_ty), mask=there)
        if SUMS:
            total += passed
    if SUMS:
        tl.store(sums_ptr + tl.program_id(1) * columns + column, tl.sum(total, axis=0), mask=inside)


def smooth_quantize(y: Tensor, amax: Tensor, epilogue: Epilogue, activation: str, bias: Tensor | None) -> Tensor:
    e = epilogue
    return _SmoothQuantize.apply(y, bias, amax, activation, e.low, e.high, e.bias_dim)


class _SmoothQuantize(torch.autograd.Function):
    """Keeps its inputs; the result is kept by the layer that consumes it."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, amax: Tensor, activation: str, low: int, high: int, bias_dim: int
    ) -> Tensor:
        to_out, out = empty_as(y, y.dtype)
        columns = _columns(y, bias)
        s = Strips.of(y.numel(), columns, *_FORWARD)
        numbers = (y.numel() // columns, columns, s.steps, float(low), float(high))
        launch(
            forward_kernel,
            (s.strips, s.programs),
            (y, amax if bias is None else bias, amax, to_out),
            (*numbers, activation, bias is not None, s.tile, s.strip),
            num_warps=_WARPS,
        )
        ctx.save_for_backward(y, amax, *([] if bias is None else [bias]))
        ctx.activation, ctx.low, ctx.high = activation, low, high
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        y, amax, *rest = ctx.saved_tensors
        bias = rest[0] if len(rest) else None
        to_out, out = empty_as(y, y.dtype)
        columns = _columns(y, bias)
        s = Strips.of(y.numel(), columns, *_BACKWARD)
        wants = bias is not None and ctx.needs_input_grad[1]
        sums = torch.empty((s.programs, columns) if wants else (1,), dtype=torch.float32, device=y.device)
        numbers = (y.numel() // columns, columns, s.steps, rounding_threshold(ctx.low), float(ctx.high))
        launch(
            backward_kernel,
            (s.strips, s.programs),
            (like(grad, y), y, amax if bias is None else bias, amax, to_out, sums),
            (*numbers, ctx.activation, bias is not None, wants, s.tile, s.strip),
            num_warps=_WARPS,
        )
        return out, sums.sum(0).to(bias.dtype) if bias is not None and wants else None, *(None,) * 5


def _columns(y: Tensor, bias: Tensor | None) -> int:
    """Columns of the matrix that the kernels go over: as many as the bias has, or a power of two."""
    return math.gcd(y.numel(), 128) if bias is None else bias.numel()
