"""Triton kernels of `fused_ops`: the same numbers, one pass over memory.

A tile holds groups of eight neighbours in memory, the innermost axis of the tile: a thread loads one group of half
precision numbers in one 16-byte access and packs their bits without talking to others. With one bias per column of a
row-major matrix (channels_last convolutions, linear layers), the backward kernel walks down a strip of columns, so
that it sums the bias's gradient while it masks; each program writes its own partial sums, and the result does not
depend on the order in which programs run.

NaN passes through as in torch: a training that diverges must be seen to. Division is rounded correctly (Triton's `/`
is not), because a value that lies on a tie must round as in the engine.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.quantization.fused_ops import Epilogue, inner_size

_GROUPS = 256  # of eight elements, in a tile of the flat kernels
_TILE = 2048  # elements of a tile of the strip kernel
_PROGRAMS = 1056  # of the strip kernel: 8 on each of 132 multiprocessors


@triton.jit
def _forward_kernel(
    y_ptr, bias_ptr, residual_ptr, amax_ptr, out_ptr, bits_ptr,
    n, bias_groups, axis_inner, axis_size,
    lower, upper, low, high,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PER_CHANNEL: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * GROUPS  # 64 bits for what all share, 32 for what each thread computes
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    whole = group < (n + 7) // 8 - first
    there = whole[:, None] if EVEN else at < n - first * 8
    x = tl.load(y_ptr + first * 8 + at, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        channel = (((first % bias_groups).to(tl.int32) + group) % bias_groups)[:, None] * 8 + lane[None, :]
        x += tl.load(bias_ptr + channel).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + first * 8 + at, mask=there, other=0.0).to(tl.float32)
    passes = (x > lower) & (x < upper)
    x = tl.where(x < lower, lower, x)
    x = tl.where(x > upper, upper, x)
    if PER_CHANNEL:  # weights: never 2^31 elements
        channel = (((first * 8).to(tl.int32) + at) // axis_inner) % axis_size
        amax = tl.load(amax_ptr + channel, mask=there, other=1.0).to(tl.float32)
        scale = tl.div_rn(amax, tl.full(at.shape, 0.0, tl.float32) + high)
    else:
        scale = tl.full(at.shape, 0.0, tl.float32) + tl.div_rn(tl.load(amax_ptr).to(tl.float32), high)
    steps = tl.div_rn(x, scale)
    steps = tl.where(steps > 4096.0, 4096.0, steps)
    steps = tl.where(steps < -4096.0, -4096.0, steps)
    rounded = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction bits, so it rounds half to even
    passes = passes & (rounded >= low) & (rounded <= high)
    rounded = tl.where(rounded > high, high, rounded)
    rounded = tl.where(rounded < low, low, rounded)
    tl.store(out_ptr + first * 8 + at, (rounded * scale).to(out_ptr.dtype.element_ty), mask=there)
    bits = tl.sum((passes & there).to(tl.int32) << lane[None, :], axis=1)
    tl.store(bits_ptr + first + group, bits.to(tl.uint8), mask=whole)


@triton.jit
def _backward_kernel(grad_ptr, bits_ptr, out_ptr, n, EVEN: tl.constexpr, GROUPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    whole = group < (n + 7) // 8 - first
    there = whole[:, None] if EVEN else at < n - first * 8
    grad = tl.load(grad_ptr + first * 8 + at, mask=there, other=0.0)
    bits = tl.load(bits_ptr + first + group, mask=whole, other=0).to(tl.int32)
    passed = tl.where(((bits[:, None] >> lane[None, :]) & 1) != 0, grad.to(tl.float32), 0.0)
    tl.store(out_ptr + first * 8 + at, passed.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _backward_bias_kernel(
    grad_ptr, bits_ptr, out_ptr, sums_ptr, rows, groups, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = groups * 8
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    local = tl.arange(0, ROWS)
    at = local[:, None] * columns + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * columns + at, mask=there, other=0.0)
        bits = tl.load(bits_ptr + row * groups + at // 8, mask=there, other=0).to(tl.int32)
        passed = tl.where(((bits >> (column % 8)[None, :]) & 1) != 0, grad.to(tl.float32), 0.0)
        tl.store(out_ptr + row * columns + at, passed.to(out_ptr.dtype.element_ty), mask=there)
        total += passed
    tl.store(sums_ptr + tl.program_id(1) * columns + column, tl.sum(total, axis=0), mask=inside)


def forward(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `fused_ops.forward_torch`; a bias must belong to the innermost axis, whose size divides by 8."""
    e = epilogue
    axis = -1 if e.axis is None else e.axis % y.dim()
    numbers = (e.low, e.high, e.lower, e.upper, axis, dtype)
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = _forward_op(y, bias, residual, amax, *numbers)
        return result
    return _forward(y, bias, residual, amax, *numbers)


def backward(grad: Tensor, bits: Tensor, dtype: torch.dtype, bias_dim: int, wants_bias: bool) -> tuple[Tensor, Tensor]:
    """As `fused_ops.backward_torch`."""
    columns = grad.shape[bias_dim] if wants_bias else 0
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = _backward_op(grad, bits, dtype, columns)
        return result
    return _backward(grad, bits, dtype, columns)


def _forward(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    amax: Tensor,
    low: int,
    high: int,
    lower: float,
    upper: float,
    axis: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    n = y.numel()
    out = torch.empty_like(y, dtype=dtype)
    bits = torch.empty(-(-n // 8), dtype=torch.uint8, device=y.device)
    bias_groups = 1 if bias is None else bias.numel() // 8
    inner, size = (1, 1) if axis < 0 else (inner_size(y, axis), y.shape[axis])
    if n:
        _forward_kernel[(triton.cdiv(n, 8 * _GROUPS),)](
            y, y if bias is None else bias, y if residual is None else residual, amax, out, bits,
            n, bias_groups, inner, size, lower, upper, float(low), float(high),
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PER_CHANNEL=axis >= 0,
            EVEN=n % 8 == 0, GROUPS=_GROUPS,
        )  # fmt: skip
    return out, bits


def _backward(grad: Tensor, bits: Tensor, dtype: torch.dtype, columns: int) -> tuple[Tensor, Tensor]:
    n = grad.numel()
    out = torch.empty_like(grad, dtype=dtype)
    if not columns or not n:
        if n:
            _backward_kernel[(triton.cdiv(n, 8 * _GROUPS),)](grad, bits, out, n, EVEN=n % 8 == 0, GROUPS=_GROUPS)
        return out, torch.zeros(columns, dtype=torch.float32, device=grad.device)
    rows = n // columns
    strip = min(128, triton.next_power_of_2(columns))
    tile = _TILE // strip
    strips = triton.cdiv(columns, strip)
    steps = triton.cdiv(rows, max(1, _PROGRAMS // strips) * tile)
    programs = triton.cdiv(rows, steps * tile)
    sums = torch.empty((programs, columns), dtype=torch.float32, device=grad.device)
    _backward_bias_kernel[(strips, programs)](
        grad, bits, out, sums, rows, columns // 8, steps, ROWS=tile, COLUMNS=strip
    )  # fmt: skip
    return out, sums.sum(0)


@torch.library.custom_op("compress::fused_quantize", mutates_args=())
def _forward_op(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    amax: Tensor,
    low: int,
    high: int,
    lower: float,
    upper: float,
    axis: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return _forward(y, bias, residual, amax, low, high, lower, upper, axis, dtype)


@_forward_op.register_fake
def _(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    amax: Tensor,
    low: int,
    high: int,
    lower: float,
    upper: float,
    axis: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y, dtype=dtype), y.new_empty((y.numel() + 7) // 8, dtype=torch.uint8)


@torch.library.custom_op("compress::fused_quantize_backward", mutates_args=())
def _backward_op(grad: Tensor, bits: Tensor, dtype: torch.dtype, columns: int) -> tuple[Tensor, Tensor]:
    return _backward(grad, bits, dtype, columns)


@_backward_op.register_fake
def _(grad: Tensor, bits: Tensor, dtype: torch.dtype, columns: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad, dtype=dtype), grad.new_empty(columns, dtype=torch.float32)
