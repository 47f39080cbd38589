"""Triton kernels of `fused_gate`: strips of columns, so that the bias's gradient is summed where it is masked.

A number costs some thirty instructions, which is what a GPU computes while the memory moves it; hence the short
formulas (`_gate`) in half precision, and one multiplication in the place of a correct division there.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.epilogue import empty_as, least_kept, like, refuse_second_derivative
from compress.kernels.triton.fake_quantize import Strips
from compress.kernels.triton.launch import launch
from compress.kernels.triton.rounding import on_grid, step_of, steps_of

_FORWARD = (2048, 2112)  # elements of a tile, and programs in all, about
_BACKWARD = (1024, 1056)
_WARPS = 8
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _reciprocal(x, EXACT: tl.constexpr):
    """Of a positive number, in two instructions unless it has to be exact; Triton's `/` takes five."""
    if EXACT:
        return tl.div_rn(1.0, x)
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _gate(x, GATE: tl.constexpr, EXACT: tl.constexpr):
    """(s, its slope) of an activation x * s(x)."""
    if GATE == "gelu":
        bell = tl.exp2(x * x * (-0.5 * _LOG2_E))
        if EXACT:
            s = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        else:
            t = _reciprocal(
                1.0 + tl.abs(x) * 0.23164189, EXACT
            )  # 0.3275911 / sqrt(2); coefficients: halves of 7.1.26's
            tail = 0.5307027145 * t - 0.7265760135
            tail = ((tail * t + 0.7107068705) * t - 0.142248368) * t + 0.1274147960
            tail *= t * bell
            s = tl.where(x < 0.0, tail, 1.0 - tail)
        slope = bell * 0.3989422804014327
    elif GATE == "hardswish":
        s = tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
        slope = tl.where((x > -3.0) & (x < 3.0), 0.16666666666666666, 0.0)
    else:
        inner = x
        steep = 1.0
        if GATE == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
            square = x * x
            inner = x * (1.5957691216057308 + 0.07135481282553487 * square)
            steep = 1.5957691216057308 + 0.2140644384766046 * square
        s = _reciprocal(1.0 + tl.exp2(-inner * _LOG2_E), EXACT)
        slope = s * (1.0 - s) * steep
    return s, slope


@triton.jit
def _activated(x, scale, reciprocal, GATE: tl.constexpr, EXACT: tl.constexpr):
    """(the activation in steps of a grid, its slope)."""
    s, slope = _gate(x, GATE, EXACT)
    steps = steps_of(x * s, float("-inf"), float("inf"), scale, reciprocal) if EXACT else x * s * reciprocal
    return steps, s + x * slope


@triton.jit
def _strip(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows of a tile, the columns of this program's strip, which of them there are, where their numbers lie)."""
    local = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return local, column, column < columns, local[:, None] * columns + column[None, :]


@triton.jit
def forward_kernel(
    y_ptr, bias_ptr, amax_ptr, out_ptr, rows, columns, steps, low, high,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles of a strip of columns: y + bias, activated, rounded to the grid."""
    low = tl.cast(low, tl.float32)  # the compiler of torch.compile hands Python's numbers over in float64
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = _strip(columns, ROWS, COLUMNS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = tl.load(y_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += bias[None, :]
        found, _ = _activated(x, scale, reciprocal, GATE, y_ptr.dtype.element_ty == tl.float32)
        value = on_grid(found, low, high) * scale
        tl.store(out_ptr + row * columns + at, value.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    grad_ptr, y_ptr, bias_ptr, amax_ptr, out_ptr, sums_ptr, rows, columns, steps, least, high,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles of a strip of columns: the gradient where the integer did not saturate, times that of the activation."""
    least = tl.cast(least, tl.float32)
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = _strip(columns, ROWS, COLUMNS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(y_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += bias[None, :]
        found, slope = _activated(x, scale, reciprocal, GATE, y_ptr.dtype.element_ty == tl.float32)
        passes = (found > least) & (found < high + 0.5)  # `high` is odd: halves round away from it
        passed = tl.where(passes, grad * slope, 0.0)
        tl.store(out_ptr + row * columns + at, passed.to(out_ptr.dtype.element_ty), mask=there)
        if SUMS:
            total += passed
    if SUMS:
        tl.store(sums_ptr + tl.program_id(1) * columns + column, tl.sum(total, axis=0), mask=inside)


class GatedQuantize(torch.autograd.Function):
    """Keeps what it reads; the result is kept by whichever layer reads it."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, amax: Tensor, gate: str, low: int, high: int, bias_dim: int
    ) -> Tensor:
        """The quantized tensor, laid out as `y`, which `gate_fits`."""
        to_out, out = empty_as(y, y.dtype)
        columns = _columns(y, bias)
        s = Strips.of(y.numel(), columns, *_FORWARD)
        launch(
            forward_kernel,
            (s.strips, s.programs),
            (y, amax if bias is None else bias, amax, to_out),
            (y.numel() // columns, columns, s.steps, float(low), float(high), gate, bias is not None, s.tile, s.strip),
            num_warps=_WARPS,
        )
        ctx.save_for_backward(y, amax, *([] if bias is None else [bias]))
        ctx.gate, ctx.low, ctx.high = gate, low, high
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of `y` and the bias."""
        refuse_second_derivative(grad)
        y, amax, *rest = ctx.saved_tensors
        bias = rest[0] if len(rest) else None
        to_out, out = empty_as(y, y.dtype)
        columns = _columns(y, bias)
        s = Strips.of(y.numel(), columns, *_BACKWARD)
        wants = bias is not None and ctx.needs_input_grad[1]
        sums = torch.empty((s.programs, columns) if wants else (1,), dtype=torch.float32, device=y.device)
        numbers = (y.numel() // columns, columns, s.steps, least_kept(ctx.low), float(ctx.high))
        launch(
            backward_kernel,
            (s.strips, s.programs),
            (like(grad, y), y, amax if bias is None else bias, amax, to_out, sums),
            (*numbers, ctx.gate, bias is not None, wants, s.tile, s.strip),
            num_warps=_WARPS,
        )
        return out, sums.sum(0).to(bias.dtype) if bias is not None and wants else None, *(None,) * 5


def _columns(y: Tensor, bias: Tensor | None) -> int:
    """Of the matrix that the kernels walk over: those of the bias, or eight at least."""
    return math.gcd(y.numel(), 128) if bias is None else bias.numel()
