"""Bias, residual add, activation, fake quantization, and max pooling if it follows, as one differentiable operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.epilogue import Epilogue, Window, activated_torch, backward_torch, forward_torch, max_pool
from compress.kernels.memory_format import BITS_PER_BYTE, along_axis, dense, is_channels_last, like, pack
from compress.kernels.triton import activation as triton_activation
from compress.kernels.triton import pool
from compress.kernels.triton.fake_quantize import (
    LEAST_RANGE,
    LearnedPlan,
    Plan,
    fits,
    forward_compiled,
    learned_plan_of,
    plan_of,
)
from compress.kernels.triton.launch import (
    Kernels,
    refuse_second_derivative,
    use_triton,
    use_triton_compiled,
    use_triton_eager,
)


def fused_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
    recompute_mask: bool = False,
) -> Tensor:
    """Fake quantization of activation(y + bias + residual), in float32 (float64 for float64), laid out as `y`.

    The gradient passes straight through the quantizer; ReLU's is 0 at 0; `amax` has none.

    - `y`: any shape, floating point: the result of a layer without its bias.
    - `amax`: () or (C,): the largest magnitudes kept.
    - `bias`: (C,), C the size of `y` along `epilogue.bias_dim`.
    - `dtype`: of the result; None = that of `y`.
    - `kernels`: None = Triton on a GPU, where layout and type fit.
    - `recompute_mask`: `y` is kept for backward anyway, so a compiled graph computes the mask again from it.
    """
    dtype = dtype or y.dtype
    y = dense(y)
    plan, compiled = None, False
    if use_triton_compiled(y, kernels):
        compiled = epilogue.axis is None and y.numel() > 0 and fits(y, epilogue, bias)
    elif use_triton_eager(y, kernels):
        plan = plan_of(y, bias, residual, amax, epilogue, dtype)
    tensors = (y, bias, residual, amax)
    return _FusedQuantize.apply(*tensors, plan, compiled, *epilogue, dtype, recompute_mask)


class _FusedQuantize(torch.autograd.Function):
    """Keeps the packed bits only, or a mask; the result is kept by the layer that consumes it."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        amax: Tensor,
        plan: Plan | None,
        compiled: bool,
        low: int,
        high: int,
        lower: float,
        upper: float,
        axis: int | None,
        bias_dim: int,
        dtype: torch.dtype,
        recompute_mask: bool,
    ) -> Tensor:
        if residual is not None:
            residual = like(residual, y)
        epilogue = Epilogue(low, high, lower, upper, axis, bias_dim)
        if plan is not None:
            result, mask = plan.forward(y, bias, residual, amax)
        elif compiled:
            result, mask = forward_compiled(y, bias, residual, amax, epilogue, dtype)
        else:
            result, mask = forward_torch(y, bias, residual, amax, epilogue, dtype)
            mask = mask if recompute_mask and torch.compiler.is_compiling() else pack(mask)
        ctx.save_for_backward(mask)
        ctx.plan, ctx.bias_dim, ctx.dtype = plan, bias_dim, y.dtype
        ctx.last = is_channels_last(y)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last if ctx.last else torch.contiguous_format)
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        passed, bias_grad = masked_gradients(grad, mask, ctx.plan, ctx.dtype, ctx.bias_dim, wants_bias)
        return passed, in_type(bias_grad, ctx.bias_dtype), in_type(passed, ctx.residual_dtype), *(None,) * 11


def masked_gradients(
    grad: Tensor, mask: Tensor, plan: Plan | None, dtype: torch.dtype, bias_dim: int, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """(`grad` where the mask is set, its sum for the bias if wanted), by Triton's kernel if there is a plan."""
    if plan is None:
        return backward_torch(grad, mask, dtype, bias_dim, wants_bias)
    refuse_second_derivative(grad)
    return plan.backward(grad, mask, wants_bias)


def in_type(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if grad is None or dtype is None:
        return None
    return grad if grad.dtype == dtype else grad.to(dtype)


def pooled_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    window: Window,
    *,
    bias: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Max pooling of `fused_quantize` for (N, C, H, W); one kernel on a GPU where layout and type fit."""
    if use_triton(y, kernels) and pool.fits(y) and epilogue.axis is None:
        return pool.pooled_quantize(y, amax, epilogue, window, bias, y.dtype)
    return max_pool(fused_quantize(y, amax, epilogue, bias=bias, kernels=kernels), window)


# Torch's functions by the names that the kernels use.
SMOOTH_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def smooth_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    activation: str,
    *,
    bias: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Fake quantization of activation(y + bias), a key of `SMOOTH_ACTIVATIONS`; else as `fused_quantize`.

    In half precision GELU uses Abramowitz and Stegun, formula 7.1.26 (error at most 7.5e-8).
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
    """As `fits`, with one range, and a multiple of eight elements."""
    return epilogue.axis is None and y.numel() > 0 and y.numel() % BITS_PER_BYTE == 0 and fits(y, epilogue, bias)


def learned_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    factor: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """`fused_quantize` with a learned range, whose gradient is LSQ's (arXiv 1902.08153, equation 3), times `factor`.

    `amax`, () or (C,), counts as `LEAST_RANGE` where it is below, with its whole gradient. `y` may be a weight.
    """
    y = dense(y)
    plan = learned_plan_of(y, bias, residual, amax, epilogue) if use_triton_eager(y, kernels) else None
    return _LearnedQuantize.apply(y, amax, bias, residual, plan, factor, *epilogue)


class _LearnedQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        amax: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        plan: LearnedPlan | None,
        factor: float,
        low: int,
        high: int,
        lower: float,
        upper: float,
        axis: int | None,
        bias_dim: int,
    ) -> Tensor:
        if residual is not None:
            residual = like(residual, y)
        ctx.save_for_backward(y, amax, bias, residual)
        ctx.plan, ctx.factor, ctx.epilogue = plan, factor, (low, high, lower, upper, axis, bias_dim)
        if plan is not None:
            return plan.forward(y, bias, residual, amax)
        steps, scale, _ = _steps(y, amax, bias, residual, Epilogue(low, high, lower, upper, axis, bias_dim))
        result = steps.round().clamp(low, high) * scale
        return result if result.dtype == y.dtype else result.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, amax, bias, residual = ctx.saved_tensors
        epilogue = Epilogue(*ctx.epilogue)
        grad = like(grad, y)
        if ctx.plan is not None:
            refuse_second_derivative(grad)
            passed, sums = ctx.plan.backward(grad, y, bias, residual, amax)
        else:
            passed, sums = _gradients(grad, y, amax, bias, residual, epilogue)
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            dims = [d for d in range(y.dim()) if d != epilogue.bias_dim % y.dim()]
            grad_bias = in_type(passed.sum(dims, dtype=_work(y)), bias.dtype)
        grad_residual = None if residual is None else in_type(passed, residual.dtype)
        grad_amax = (sums * ctx.factor).reshape(amax.shape).to(amax.dtype) if ctx.needs_input_grad[1] else None
        return passed, grad_amax, grad_bias, grad_residual, *(None,) * 8


def _work(y: Tensor) -> torch.dtype:
    return torch.float64 if y.dtype == torch.float64 else torch.float32


def _steps(
    y: Tensor, amax: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> tuple[Tensor, Tensor, Tensor]:
    """(the activated values in steps of the grid, the step, where the activation passes its gradient)."""
    work, passes = activated_torch(y, bias, residual, epilogue)
    scale = along_axis((amax.clamp_min(LEAST_RANGE) / epilogue.high).to(work.dtype), y, epilogue.axis)
    return work / scale, scale, passes


def _gradients(
    grad: Tensor, y: Tensor, amax: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> tuple[Tensor, Tensor]:
    """(the gradient of `y`, the sum for the range without its factor)."""
    steps, _, passes = _steps(y, amax, bias, residual, epilogue)
    inside = (steps > epilogue.low) & (steps < epilogue.high)
    slope = torch.where(inside, steps.round() - steps, steps.clamp(epilogue.low, epilogue.high)) * grad.to(steps.dtype)
    axis = None if epilogue.axis is None else epilogue.axis % y.dim()
    dims = [d for d in range(y.dim()) if d != axis]
    # torch.compile of 2.11 gives a `.to` of the same type as a result of an autograd.Function a gradient of zero
    passed = torch.where(inside & passes, grad, 0.0)
    return (passed if passed.dtype == y.dtype else passed.to(y.dtype)), slope.sum(dims) if dims else slope
