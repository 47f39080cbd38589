"""Batch norm, a clipping activation and fake quantization as one operation, for images in channels_last."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue
from compress.kernels.memory_format import empty_as, is_channels_last, like
from compress.kernels.triton.fake_quantize import Strips, bounds_of, decisive, on_grid, step_of, steps_of, strip
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

_FORWARD = (2048, 2112)  # elements of a tile, and programs in all, about
_BACKWARD = (2048, 1056)
_WARPS = 8
_FINISHED = (32, 32)  # programs whose sums are added at a time, and channels of a program that adds them
_LARGEST = 2**31  # elements: indices within a tile have 32 bits
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _of_channels(mean_ptr, deviation_ptr, weight_ptr, bias_ptr, column, inside):
    """(mean, reciprocal of the standard deviation, weight times it, bias) of channels, as rows."""
    mean = tl.load(mean_ptr + column, mask=inside, other=0.0)
    deviation = tl.load(deviation_ptr + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return mean[None, :], deviation[None, :], (weight * deviation)[None, :], bias[None, :]


@triton.jit
def sums_kernel(x_ptr, sums_ptr, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the tiles of a strip and their squares, both of differences from the first row."""
    local, column, inside, at = strip(columns, ROWS, COLUMNS)
    first = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = tl.where(there, x - first[None, :], 0.0)
        total += x
        squares += x * x
    sums_ptr += tl.program_id(1) * (2 * columns) + column
    tl.store(sums_ptr, tl.sum(total, axis=0), mask=inside)
    tl.store(sums_ptr + columns, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def statistics_kernel(
    sums_ptr,
    x_ptr,
    mean_ptr,
    deviation_ptr,
    running_mean_ptr,
    running_var_ptr,
    programs,
    rows,
    columns,
    eps,
    momentum,
    RUNNING: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the sums of all programs: mean and reciprocal of the standard deviation."""
    local, column, inside, at = strip(2 * columns, PROGRAMS, COLUMNS)
    inside = column < columns
    total = tl.zeros([PROGRAMS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([PROGRAMS, COLUMNS], dtype=tl.float32)
    for start in range(0, programs, PROGRAMS):
        there = (local < programs - start)[:, None] & inside[None, :]
        total += tl.load(sums_ptr + start * 2 * columns + at, mask=there, other=0.0)
        squares += tl.load(sums_ptr + start * 2 * columns + columns + at, mask=there, other=0.0)
    moved = tl.sum(total, axis=0) / rows
    variance = tl.maximum(tl.sum(squares, axis=0) / rows - moved * moved, 0.0)
    mean = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32) + moved
    deviation = tl.div_rn(tl.full([COLUMNS], 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(mean_ptr + column, mean, mask=inside)
    tl.store(deviation_ptr + column, deviation, mask=inside)
    if RUNNING:
        kept = 1.0 - momentum
        old = tl.load(running_mean_ptr + column, mask=inside, other=0.0)
        tl.store(running_mean_ptr + column, old * kept + mean * momentum, mask=inside)
        old = tl.load(running_var_ptr + column, mask=inside, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_var_ptr + column, old * kept + unbiased * momentum, mask=inside)


@triton.jit
def forward_kernel(
    x_ptr,
    mean_ptr,
    deviation_ptr,
    weight_ptr,
    bias_ptr,
    amax_ptr,
    out_ptr,
    rows,
    columns,
    steps,
    lower,
    upper,
    low,
    high,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the tiles of a strip: normalized, activated and quantized."""
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = strip(columns, ROWS, COLUMNS)
    mean, _, factor, bias = _of_channels(mean_ptr, deviation_ptr, weight_ptr, bias_ptr, column, inside)
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        found = (x - mean) * factor + bias
        found = on_grid(steps_of(found, lower, upper, scale, reciprocal), low, high) * scale
        tl.store(out_ptr + row * columns + at, found.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    grad_ptr,
    x_ptr,
    mean_ptr,
    deviation_ptr,
    weight_ptr,
    bias_ptr,
    amax_ptr,
    sums_ptr,
    out_ptr,
    rows,
    columns,
    steps,
    lower,
    upper,
    least,
    high,
    FROM: tl.constexpr,
    UP_TO: tl.constexpr,
    SUMS: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """SUMS: sum the masked gradient, and times the normalized values; else write that of x."""
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    local, column, inside, at = strip(columns, ROWS, COLUMNS)
    mean, deviation, factor, bias = _of_channels(mean_ptr, deviation_ptr, weight_ptr, bias_ptr, column, inside)
    if SUMS:
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        along = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    elif BATCH:
        total = (tl.load(sums_ptr + column, mask=inside, other=0.0) / rows)[None, :]
        along = (tl.load(sums_ptr + columns + column, mask=inside, other=0.0) / rows)[None, :]
    for step in range(0, steps):
        row = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * columns + at, mask=there, other=0.0).to(tl.float32) - mean
        found = x * factor + bias
        taken = steps_of(found, lower, upper, scale, reciprocal)
        passes = (found > lower if FROM else taken > least) & (taken < high + 0.5)  # `high` is odd: halves round away
        if UP_TO:
            passes = passes & (found < upper)
        grad = tl.where(passes, grad, 0.0)
        x *= deviation
        if SUMS:
            total += grad
            along += grad * x
        else:
            if BATCH:
                grad = grad - total - x * along
            tl.store(out_ptr + row * columns + at, (grad * factor).to(out_ptr.dtype.element_ty), mask=there)
    if SUMS:
        sums_ptr += tl.program_id(1) * (2 * columns) + column
        tl.store(sums_ptr, tl.sum(total, axis=0), mask=inside)
        tl.store(sums_ptr + columns, tl.sum(along, axis=0), mask=inside)


class Running(NamedTuple):
    """Statistics (C,), float32, changed in place with a batch's; `momentum` None = these are used instead."""

    mean: Tensor
    var: Tensor
    momentum: float | None


def fits(x: Tensor) -> bool:
    """Whether the kernels take images (N, C, H, W): type, layout, size."""
    laid_out = x.dtype in _FLOATS and is_channels_last(x)
    return laid_out and x.shape[1] < x.numel() < _LARGEST  # a batch of one number has no variance


def batch_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor, amax: Tensor, running: Running, eps: float, epilogue: Epilogue
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake quantization of the activated batch norm of images (N, C, H, W) for which `fits`, in float32.

    Returns the result, laid out as `x`, and mean and reciprocal of the standard deviation of each channel.
    """
    found = _BatchNormQuantize.apply(x, weight, bias, amax, *running, eps, epilogue)
    return found


def batch_norm_again(
    x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor, amax: Tensor, *, epilogue: Epilogue
) -> Tensor:
    """The result of `batch_norm_quantize`, by its kernel, from its arguments and its other results."""
    to_out, out = empty_as(x, x.dtype)
    columns = x.shape[1]
    s = Strips.of(x.numel(), columns, *_FORWARD)
    lower, upper, _, low, high = bounds_of(epilogue)
    numbers = (x.numel() // columns, columns, s.steps, lower, upper, low, high, s.tile, s.strip)
    tensors = (x, mean, deviation, weight, bias, amax, to_out)
    launch(forward_kernel, (s.strips, s.programs), tensors, numbers, num_warps=_WARPS)
    return out


class _BatchNormQuantize(torch.autograd.Function):
    """Keeps its input, and two numbers for each channel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        amax: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float | None,
        eps: float,
        epilogue: Epilogue,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if momentum is None:
            mean, deviation = running_mean.clone(), torch.rsqrt(running_var + eps)
        else:
            mean, deviation = _statistics(x, Running(running_mean, running_var, momentum), eps)
        out = batch_norm_again(x, mean, deviation, weight, bias, amax, epilogue=epilogue)
        ctx.save_for_backward(x, mean, deviation, weight, bias, amax)
        ctx.batch, ctx.epilogue = momentum is not None, epilogue
        ctx.mark_non_differentiable(mean, deviation)
        ctx.set_materialize_grads(False)  # nobody reads zeros for these two
        return out, mean, deviation

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *statistics: None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        if grad is None:
            return (None,) * 9
        x, *of_channels, amax = ctx.saved_tensors
        grad, columns = like(grad, x), x.shape[1]
        s = Strips.of(x.numel(), columns, *_BACKWARD)
        lower, upper, least, _, high = bounds_of(ctx.epilogue)
        numbers = (x.numel() // columns, columns, s.steps, lower, upper, least, high, *decisive(ctx.epilogue))
        sums = torch.empty((s.programs, 2, columns), dtype=torch.float32, device=x.device)
        tensors = (grad, x, *of_channels, amax)
        grid, tile = (s.strips, s.programs), (s.tile, s.strip)
        launch(backward_kernel, grid, (*tensors, sums, sums), (*numbers, True, False, *tile), num_warps=_WARPS)
        found = sums.sum(0)
        out = None
        if ctx.needs_input_grad[0]:
            to_out, out = empty_as(x, x.dtype)
            constants = (*numbers, False, ctx.batch, *tile)
            launch(backward_kernel, grid, (*tensors, found, to_out), constants, num_warps=_WARPS)
        return out, found[1], found[0], *(None,) * 6


def _statistics(x: Tensor, running: Running, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal of the standard deviation of each channel of a batch; updates the running ones."""
    columns = x.shape[1]
    s = Strips.of(x.numel(), columns, *_BACKWARD)
    sums = torch.empty((s.programs, 2, columns), dtype=torch.float32, device=x.device)
    rows = x.numel() // columns
    numbers = (rows, columns, s.steps, s.tile, s.strip)
    launch(sums_kernel, (s.strips, s.programs), (x, sums), numbers, num_warps=_WARPS)
    mean, deviation = (torch.empty(columns, dtype=torch.float32, device=x.device) for _ in range(2))
    programs, together = _FINISHED
    launch(
        statistics_kernel,
        (-(-columns // together),),
        (sums, x, mean, deviation, running.mean, running.var),
        (s.programs, rows, columns, eps, running.momentum, True, programs, together),
        num_warps=4,
    )
    return mean, deviation
