"""Triton kernels of `fused_ops`: the same numbers, one pass over memory.

A tile holds groups of eight neighbours in memory, the innermost axis of the tile: a thread loads one group of half
precision numbers in one 16-byte access and packs their bits without talking to others. With one bias per column of a
row-major matrix (channels_last convolutions, linear layers), the backward kernel walks down a strip of columns, so
that it sums the bias's gradient while it masks; each program writes its own partial sums, and the result does not
depend on the order in which programs run.

NaN passes through as in torch: a training that diverges must be seen to. Division is rounded correctly (Triton's `/`
is not), because a value that lies on a tie must round as in the engine (`rounding_triton`).
"""

# ruff: noqa: ANN001, ANN201, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.epilogue import (
    BITS,
    Epilogue,
    fits,
    inner_size,
    is_channels_last,
    least_kept,
    like,
    refuse_second_derivative,
)
from compress.kernels.triton.launch import Kept, Launch
from compress.kernels.triton.rounding import on_grid, step_of, steps_of

GROUPS = 256  # of eight elements, in a tile of the flat kernels
_TILE = 2048  # elements of a tile of the strip kernel
_PROGRAMS = 1056  # of the strip kernel: 8 on each of 132 multiprocessors


@triton.jit
def forward_kernel(
    y_ptr, bias_ptr, residual_ptr, amax_ptr, out_ptr, bits_ptr,
    n, bias_groups, axis_inner, axis_size,
    lower, upper, least, low, high,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PER_CHANNEL: tl.constexpr, EVEN: tl.constexpr,
    FROM: tl.constexpr, UP_TO: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A tile: y + bias + residual, activated, rounded to the grid, and its bits.

    FROM and UP_TO: the activation's bounds decide whether the gradient passes, below (in place of `least`) and above.
    """
    lower = tl.cast(lower, tl.float32)  # the compiler of torch.compile hands Python's numbers over in float64
    upper = tl.cast(upper, tl.float32)
    least = tl.cast(least, tl.float32)
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
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
    if PER_CHANNEL:  # weights: never 2^31 elements
        channel = (((first * 8).to(tl.int32) + at) // axis_inner) % axis_size
        amax = tl.load(amax_ptr + channel, mask=there, other=1.0).to(tl.float32)
        scale = tl.div_rn(amax, tl.full(at.shape, 0.0, tl.float32) + high)
        reciprocal = tl.div_rn(tl.full(at.shape, 1.0, tl.float32), scale)
    else:
        scale, reciprocal = step_of(tl.load(amax_ptr), high)
    steps = steps_of(x, lower, upper, scale, reciprocal)
    passes = (x > lower if FROM else steps > least) & (steps < high + 0.5)  # `high` is odd: halves round away from it
    if UP_TO:
        passes = passes & (x < upper)
    if not EVEN:
        passes = passes & there
    tl.store(out_ptr + first * 8 + at, (on_grid(steps, low, high) * scale).to(out_ptr.dtype.element_ty), mask=there)
    bits = tl.sum(tl.where(passes, (1 << lane)[None, :], 0), axis=1)
    tl.store(bits_ptr + first + group, bits.to(tl.uint8), mask=whole)


def bounds_of(epilogue: Epilogue) -> tuple[float, float, float, float, float]:
    """`lower` to `high` of `forward_kernel`."""
    e = epilogue
    return e.lower, e.upper, least_kept(e.low), float(e.low), float(e.high)


def decisive(epilogue: Epilogue) -> tuple[bool, bool]:
    """FROM and UP_TO of `forward_kernel`."""
    return epilogue.lower >= 0, math.isfinite(epilogue.upper)


@triton.jit
def backward_kernel(grad_ptr, bits_ptr, out_ptr, n, EVEN: tl.constexpr, GROUPS: tl.constexpr):
    """A tile of the gradient, masked."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    whole = group < (n + 7) // 8 - first
    there = whole[:, None] if EVEN else at < n - first * 8
    grad = tl.load(grad_ptr + first * 8 + at, mask=there, other=0.0)
    bits = tl.load(bits_ptr + first + group, mask=whole, other=0).to(tl.int32)
    passed = tl.where((bits[:, None] & (1 << lane)[None, :]) != 0, grad.to(tl.float32), 0.0)
    tl.store(out_ptr + first * 8 + at, passed.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward_bias_kernel(
    grad_ptr, bits_ptr, out_ptr, sums_ptr, rows, groups, steps, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """Tiles of a strip of columns, masked, and their sums over the rows."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = group < groups
    lane = tl.arange(0, 8)
    local = tl.arange(0, ROWS)
    bits_at = local[:, None] * groups + group[None, :]
    at = bits_at[:, :, None] * 8 + lane[None, None, :]
    total = tl.zeros([ROWS, GROUPS, 8], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        whole = (local < rows - row)[:, None] & inside[None, :]
        there = tl.broadcast_to(whole[:, :, None], (ROWS, GROUPS, 8))
        grad = tl.load(grad_ptr + row * groups * 8 + at, mask=there, other=0.0)
        bits = tl.load(bits_ptr + row * groups + bits_at, mask=whole, other=0).to(tl.int32)
        passed = tl.where((bits[:, :, None] & (1 << lane)[None, None, :]) != 0, grad.to(tl.float32), 0.0)
        tl.store(out_ptr + row * groups * 8 + at, passed.to(out_ptr.dtype.element_ty), mask=there)
        total += passed
    sums_at = (tl.program_id(1) * groups + group)[:, None] * 8 + lane[None, :]
    tl.store(sums_ptr + sums_at, tl.sum(total, axis=0), mask=tl.broadcast_to(inside[:, None], (GROUPS, 8)))


def plan_of(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue, dtype: torch.dtype
) -> Plan | None:
    """The plan for a dense `y` like this one; None where the bias does not lie along the innermost axis in eights."""
    bias_dtype = None if bias is None else bias.dtype
    residual_dtype = None if residual is None else residual.dtype
    key = (y.shape, y.stride(), y.dtype, y.get_device(), bias_dtype, residual_dtype, amax.dtype, epilogue, dtype)
    if key not in _PLANS:
        _PLANS[key] = Plan(y, bias_dtype, residual_dtype, epilogue, dtype) if fits(y, epilogue, bias) else None
    return cast("Plan | None", _PLANS[key])


_PLANS = Kept()


class Strips(NamedTuple):
    """How the strip kernel divides a matrix.

    Attributes:
        strip, strips: columns of one, and how many.
        tile, steps: rows that a program takes at once, and how often.
        programs: for each strip.
    """

    strip: int
    strips: int
    tile: int
    steps: int
    programs: int

    @classmethod
    def of(cls, count: int, columns: int, elements: int = _TILE, programs: int = _PROGRAMS) -> Strips:
        """For `count` elements in rows of `columns`, so many in a tile, and so many programs in all, about."""
        rows = count // columns
        strip = max(BITS, min(128, 1 << (columns - 1).bit_length()))
        tile = elements // strip
        strips = -(-columns // strip)
        steps = -(-rows // (max(1, programs // strips) * tile))
        return cls(strip, strips, tile, steps, -(-rows // (steps * tile)))


class Plan:
    """What can be known of a chain's launches from types and shapes alone.

    Args:
        y: dense: shape, layout, type and device count.
        bias_dtype, residual_dtype: None = there is none.
        epilogue, dtype: as of `fused_ops.fused_quantize`.
    """

    def __init__(
        self,
        y: Tensor,
        bias_dtype: torch.dtype | None,
        residual_dtype: torch.dtype | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        e = epilogue
        self.device, self.count = y.get_device(), y.numel()
        self.stride, self.dtype, self.y_dtype = y.stride(), dtype, y.dtype
        self.memory_format = torch.channels_last if is_channels_last(y) else torch.contiguous_format
        self.bias_dtype, self.residual_dtype = bias_dtype, residual_dtype
        self.bytes = -(-self.count // BITS)
        self.columns = y.shape[e.bias_dim] if bias_dtype is not None else 0
        axis = -1 if e.axis is None else e.axis % y.dim()
        inner, size = (1, 1) if axis < 0 else (inner_size(y, axis), y.shape[axis])
        even = self.count % BITS == 0
        self._forward = Launch(
            forward_kernel, (triton.cdiv(self.count, BITS * GROUPS),),
            self.count, max(1, self.columns // BITS), inner, size, *bounds_of(e),
            bias_dtype is not None, residual_dtype is not None, axis >= 0, even, *decisive(e), GROUPS,
        )  # fmt: skip
        self._backward = Launch(
            backward_kernel, (triton.cdiv(self.count, BITS * GROUPS),), self.count, even, GROUPS
        )  # fmt: skip
        if self.columns and self.count:
            s = Strips.of(self.count, self.columns)
            self.programs = s.programs
            rows, groups = self.count // self.columns, self.columns // BITS
            self._backward_bias = Launch(
                backward_bias_kernel, (s.strips, s.programs), rows, groups, s.steps, s.tile, s.strip // BITS
            )

    def forward(self, y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor) -> tuple[Tensor, Tensor]:
        """As `fused_ops.forward_torch`; `residual` is laid out as `y`."""
        out = torch.empty_like(y, dtype=self.dtype)
        bits = torch.empty(self.bytes, dtype=torch.uint8, device=y.device)
        if self.count:
            tensors = (y, y if bias is None else bias, y if residual is None else residual, amax, out, bits)
            self._forward(self.device, *tensors)
        return out, bits

    def backward(self, grad: Tensor, bits: Tensor, wants_bias: bool) -> tuple[Tensor, Tensor | None]:
        """(`grad` where the bits are set, its sum for each column, float32, if wanted); `grad` is laid out as `y`."""
        out = torch.empty_like(grad, dtype=self.y_dtype)
        if not self.count:
            return out, torch.zeros(self.columns, device=grad.device) if wants_bias else None
        if not wants_bias:
            tensors: tuple[Tensor, ...] = (grad, bits, out)
            launch, sums = self._backward, None
        else:
            sums = torch.empty((self.programs, self.columns), dtype=torch.float32, device=grad.device)
            tensors = (grad, bits, out, sums)
            launch = self._backward_bias
        launch(self.device, *tensors)
        return out, None if sums is None else sums.sum(0)


def fused_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """As `fused_ops.fused_quantize`; None where the kernels do not fit."""
    plan = plan_of(y, bias, residual, amax, epilogue, dtype)
    if plan is None:
        return None
    return cast(Tensor, _Launched.apply(y, bias, residual, amax, plan))


class _Launched(torch.autograd.Function):
    """Keeps the packed bits only; the result is kept by whichever layer reads it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, plan: Plan) -> Tensor:
        if residual is not None and residual.stride() != plan.stride:
            residual = like(residual, y)
        result, bits = plan.forward(y, bias, residual, amax)
        ctx.save_for_backward(bits)
        ctx.plan = plan
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        plan: Plan = ctx.plan
        refuse_second_derivative(grad)
        if grad.stride() != plan.stride:
            grad = grad.contiguous(memory_format=plan.memory_format)
        _, wants_bias, wants_residual, _, _ = ctx.needs_input_grad
        passed, bias_grad = plan.backward(grad, bits, wants_bias)
        if bias_grad is not None and bias_grad.dtype != plan.bias_dtype:
            bias_grad = bias_grad.to(plan.bias_dtype)
        if not wants_residual:
            return passed, bias_grad, None, None, None
        same = plan.residual_dtype == plan.y_dtype
        return passed, bias_grad, passed if same else passed.to(plan.residual_dtype), None, None
