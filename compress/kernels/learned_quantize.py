"""Bias, residual add, activation and fake quantization with a learned range, as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue, activated_torch
from compress.kernels.fake_quantize import in_type
from compress.kernels.memory_format import along_axis, dense, like
from compress.kernels.triton.launch import Kernels, refuse_second_derivative, use_triton_eager
from compress.kernels.triton.learned_quantize import LEAST_RANGE, LearnedPlan, learned_plan_of


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
    """Compute the fake quantization of activation(y + bias + residual) with a learned range, in float32 or float64.

    The gradient of the range is LSQ's (Esser et al., arXiv 1902.08153, equation 3), for `amax` in place of the step.
    `y` may be a weight; other arguments and errors are those of `fused_quantize`.

    - `amax`: () or (C,): the range; below `LEAST_RANGE` it counts as that, with its whole gradient.
    - `factor`: of the range's gradient.
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
