"""Layer norm and fake quantization as one operation, with one Triton kernel each way."""

# ruff: noqa: ANN001, ANN201, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue, IntegerGrid, forward_torch, rounding_threshold
from compress.kernels.triton.fake_quantize import bounds_of, on_grid, step_of, steps_of
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

# Largest number of elements of a row.
WIDEST = 2048
_PROGRAMS = 1056  # 8 on each of 132 multiprocessors
_ELEMENTS = 1024  # that a program takes at a time; backward two rows at least: narrow ones would leave memory idle
_WARPS = 1


@triton.jit
def forward_kernel(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    amax_ptr,
    total_ptr,
    out_ptr,
    mean_ptr,
    deviation_ptr,
    rows,
    eps,
    lower,
    upper,
    low,
    high,
    WIDE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    AGAIN: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compute rows of x + added, their mean, the reciprocal of their standard deviation, and the quantized norm.

    AGAIN: mean and reciprocal are read, so that the result has the bits of the first time whatever the order of sums.
    """
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    column = tl.arange(0, PADDED)
    inside = column < WIDE
    row = tl.program_id(0).to(tl.int64) * ROWS
    local = tl.arange(0, ROWS)
    known = local < rows - row
    there = known[:, None] & inside[None, :]
    at = local[:, None] * WIDE + column[None, :]
    x = tl.load(x_ptr + row * WIDE + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added_ptr + row * WIDE + at, mask=there, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDE + at, total, mask=there)
        x = total.to(tl.float32)
    if AGAIN:
        x = tl.where(there, x - tl.load(mean_ptr + row + local, mask=known, other=0.0)[:, None], 0.0)
        deviation = tl.load(deviation_ptr + row + local, mask=known, other=0.0)
    else:
        mean = tl.sum(x, axis=1) / WIDE
        x = tl.where(there, x - mean[:, None], 0.0)
        deviation = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(tl.sum(x * x, axis=1) / WIDE + eps))
        tl.store(mean_ptr + row + local, mean, mask=known)
        tl.store(deviation_ptr + row + local, deviation, mask=known)
    found = x * deviation[:, None] * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        found += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = on_grid(steps_of(found, lower, upper, scale, reciprocal), low, high) * scale
    tl.store(out_ptr + row * WIDE + at, found.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    grad_ptr,
    around_ptr,
    x_ptr,
    mean_ptr,
    deviation_ptr,
    weight_ptr,
    bias_ptr,
    amax_ptr,
    out_ptr,
    copy_ptr,
    sums_ptr,
    rows,
    steps,
    least,
    high,
    WIDE: tl.constexpr,
    AROUND: tl.constexpr,
    COPY: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compute rows of the gradient through quantizer and norm, plus `around`; COPY: written twice, in two types.

    `around` reaches the norm's input from its other consumers; `sums` (programs, 2, WIDE) are of weight and bias.
    """
    least = tl.cast(least, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    _, reciprocal = step_of(tl.load(amax_ptr), high)
    column = tl.arange(0, PADDED)
    inside = column < WIDE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    of_bias = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    local = tl.arange(0, ROWS)
    at = local[:, None] * WIDE + column[None, :]
    for step in tl.range(0, steps, num_stages=2):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS
        known = local < rows - row
        there = known[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * WIDE + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * WIDE + at, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row + local, mask=known, other=0.0)
        deviation = tl.load(deviation_ptr + row + local, mask=known, other=0.0)
        x = (x - mean[:, None]) * deviation[:, None]
        found = x * weight
        if BIAS:
            found += bias
        found *= reciprocal
        grad = tl.where((found > least) & (found < high + 0.5), grad, 0.0)  # `high` is odd: halves round away from it
        of_bias += grad
        of_weight += grad * x
        grad *= weight
        straight = tl.sum(grad, axis=1) / WIDE
        along = tl.sum(grad * x, axis=1) / WIDE
        result = (grad - straight[:, None] - x * along[:, None]) * deviation[:, None]
        if AROUND:
            result += tl.load(around_ptr + row * WIDE + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * WIDE + at, result.to(out_ptr.dtype.element_ty), mask=there)
        if COPY:
            tl.store(copy_ptr + row * WIDE + at, result.to(copy_ptr.dtype.element_ty), mask=there)
    sums_ptr += tl.program_id(0) * (2 * WIDE)
    tl.store(sums_ptr + column, tl.sum(of_weight, axis=0), mask=inside)
    tl.store(sums_ptr + WIDE + column, tl.sum(of_bias, axis=0), mask=inside)


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: IntegerGrid,
    *,
    eps: float,
    dtype: torch.dtype,
    added: Tensor | None = None,
    keep_sum: bool = False,
    keep_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """Fake quantization of the layer norm of x + added, (..., C), over the last axis, in `dtype`.

    `keep_sum`: x + added is a result too; `keep_statistics`: mean and reciprocal of the deviation are the last.
    """
    numbers = (eps, grid.low, grid.high, dtype, keep_sum, keep_statistics)
    results = _NormQuantize.apply(x, added, weight, bias, grid.amax, *numbers)
    return results if keep_sum or keep_statistics else (results,)


def norm_again(
    total: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    amax: Tensor,
    bias: Tensor | None = None,
    *,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    """The quantized norm of `norm_quantize` once more, to the last bit, from what it keeps."""
    result = torch.empty_like(total, dtype=dtype)
    tensors = (total, total, weight, weight if bias is None else bias, amax, total, result, mean, deviation)
    _launch_forward(tensors, 0.0, Epilogue(low, high), (False, bias is not None, True))
    return result


class _NormQuantize(torch.autograd.Function):
    """Keeps the sum, and two numbers per row; the result is kept by the layer that consumes it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        amax: Tensor,
        eps: float,
        low: int,
        high: int,
        dtype: torch.dtype,
        keep_sum: bool,
        keep_statistics: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        run = _forward_compiled if torch.compiler.is_compiling() else _forward
        result, total, mean, deviation = run(x, added, weight, bias, amax, eps, Epilogue(low, high), dtype)
        ctx.save_for_backward(total, mean, deviation, weight, amax, *([] if bias is None else [bias]))
        ctx.dtypes = (x.dtype, None if added is None else added.dtype)
        ctx.high, ctx.threshold, ctx.keep_sum = float(high), rounding_threshold(low), keep_sum
        results = (result, total) if keep_sum else (result,)
        if not keep_statistics:
            return results if keep_sum else result
        ctx.mark_non_differentiable(mean, deviation)
        ctx.set_materialize_grads(False)  # nobody reads zeros for these two
        return (*results, mean, deviation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        around = others[0] if ctx.keep_sum else None
        refuse_second_derivative(grad, around)
        total, mean, deviation, weight, amax, *rest = ctx.saved_tensors
        bias = rest[0] if len(rest) else None
        width = weight.numel()
        rows = total.numel() // width
        padded = 1 << (width - 1).bit_length()
        at_once = max(2, _ELEMENTS // padded)
        steps = -(-rows // (_PROGRAMS * at_once))
        programs = -(-rows // (steps * at_once))
        of_x, of_added = ctx.dtypes
        other = of_x if of_x != total.dtype else of_added  # a sum has the type of one of its terms
        copies = other is not None and other != total.dtype
        out = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        copy = torch.empty(total.shape, dtype=other, device=total.device) if copies else out
        sums = torch.empty((programs, 2, width), dtype=torch.float32, device=total.device)
        grad = torch.zeros_like(total) if grad is None else grad.contiguous()
        around = None if around is None else around.contiguous()
        launch(
            backward_kernel,
            (programs,),
            (
                grad,
                grad if around is None else around,
                total,
                mean,
                deviation,
                weight,
                weight if bias is None else bias,
                amax,
                out,
                copy,
                sums,
            ),
            (
                rows,
                steps,
                ctx.threshold,
                ctx.high,
                width,
                around is not None,
                copies,
                bias is not None,
                at_once,
                padded,
            ),
            num_warps=_WARPS,
        )
        found = sums.sum(0)
        of_bias = None if bias is None else found[1].to(bias.dtype)
        return (
            out if of_x == total.dtype else copy,
            None if of_added is None else out if of_added == total.dtype else copy,
            found[0].to(weight.dtype),
            of_bias,
            *(None,) * 7,
        )


# Quantized norm, sum, and the mean and the reciprocal of the standard deviation of each of its rows.
_Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    amax: Tensor,
    eps: float,
    epilogue: Epilogue,
    dtype: torch.dtype,
) -> _Forward:
    total = x if added is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, added.dtype))
    result = torch.empty_like(x, dtype=dtype)
    rows = x.numel() // weight.numel()
    mean, deviation = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    other, shift = x if added is None else added, weight if bias is None else bias
    tensors = (x, other, weight, shift, amax, total, result, mean, deviation)
    _launch_forward(tensors, eps, epilogue, (added is not None, bias is not None, False))
    return result, total, mean, deviation


def _launch_forward(
    tensors: tuple[Tensor, ...], eps: float, epilogue: Epilogue, constants: tuple[bool, bool, bool]
) -> None:
    x, _, weight, *_ = tensors
    width = weight.numel()
    rows, padded = x.numel() // width, 1 << (width - 1).bit_length()
    at_once = max(1, _ELEMENTS // padded)
    lower, upper, _, low, high = bounds_of(epilogue)
    numbers = (rows, eps, lower, upper, low, high, width, *constants, at_once, padded)
    launch(forward_kernel, (-(-rows // at_once),), tensors, numbers, num_warps=_WARPS)


def _forward_compiled(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    amax: Tensor,
    eps: float,
    epilogue: Epilogue,
    dtype: torch.dtype,
) -> _Forward:
    """By torch's operations; a mask has no consumer in the graph, and is not computed."""
    total = x if added is None else x + added
    tensors = (_wide(weight), None if bias is None else _wide(bias))
    y, mean, deviation = torch.native_layer_norm(_wide(total), weight.shape, *tensors, eps)
    return forward_torch(y, None, None, amax, epilogue, dtype)[0], total, mean, deviation


def _wide(x: Tensor) -> Tensor:
    """`x` in float32; torch 2.11's compiler loses the gradient of a tensor through a `.float()` of the same type."""
    return x if x.dtype == torch.float32 else x.float()
