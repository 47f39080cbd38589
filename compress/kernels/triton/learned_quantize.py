"""Kernels of fake quantization with a learned range; the order of programs does not change a result."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue
from compress.kernels.memory_format import inner_size
from compress.kernels.triton.fake_quantize import on_grid, step_of, steps_of
from compress.kernels.triton.language import tl, triton
from compress.kernels.triton.launch import BoundedCache, Launch

LEAST_RANGE = 2.0**-100
"""Lower bound of ranges: one that training has driven below it counts as this, until it grows again."""
_LEAST = tl.constexpr(LEAST_RANGE)
_MOST_BLOCK = 2048
_MOST_ROWS = 65535  # programs along the second axis of a grid


@triton.jit
def _values(y_ptr, bias_ptr, residual_ptr, at, there, bias_inner, bias_size, HAS_BIAS, HAS_RESIDUAL):
    x = tl.load(y_ptr + at, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + (at // bias_inner) % bias_size, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    return x


@triton.jit
def _forward_kernel(
    y_ptr,
    bias_ptr,
    residual_ptr,
    amax_ptr,
    out_ptr,
    inner,
    bias_inner,
    bias_size,
    lower,
    upper,
    low,
    high,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = local < inner
    at = tl.program_id(1) * inner + local
    x = _values(y_ptr, bias_ptr, residual_ptr, at, there, bias_inner, bias_size, HAS_BIAS, HAS_RESIDUAL)
    scale, reciprocal = step_of(tl.maximum(tl.load(amax_ptr + tl.program_id(1)).to(tl.float32), _LEAST), high)
    steps = steps_of(x, lower, upper, scale, reciprocal)
    tl.store(out_ptr + at, (on_grid(steps, low, high) * scale).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _backward_kernel(
    grad_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    amax_ptr,
    out_ptr,
    sums_ptr,
    inner,
    bias_inner,
    bias_size,
    lower,
    upper,
    low,
    high,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = local < inner
    at = tl.program_id(1) * inner + local
    x = _values(y_ptr, bias_ptr, residual_ptr, at, there, bias_inner, bias_size, HAS_BIAS, HAS_RESIDUAL)
    scale, reciprocal = step_of(tl.maximum(tl.load(amax_ptr + tl.program_id(1)).to(tl.float32), _LEAST), high)
    steps = steps_of(x, lower, upper, scale, reciprocal)
    inside = (steps > low) & (steps < high)
    grad = tl.load(grad_ptr + at, mask=there, other=0.0).to(tl.float32)
    passed = tl.where(inside & (x > lower) & (x < upper), grad, 0.0)
    tl.store(out_ptr + at, passed.to(out_ptr.dtype.element_ty), mask=there)
    slope = on_grid(steps, low, high) - tl.where(inside, steps, 0.0)  # outside, the nearest integer is the bound
    total = tl.sum(tl.where(there, slope * grad, 0.0), axis=0)
    tl.store(sums_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


def learned_plan_of(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor, epilogue: Epilogue
) -> LearnedPlan | None:
    """The plan for tensors of these types and shapes, `y` dense; None where the kernels do not fit."""
    bias_dtype = None if bias is None else bias.dtype
    residual_dtype = None if residual is None else residual.dtype
    key = (y.shape, y.stride(), y.dtype, y.get_device(), bias_dtype, residual_dtype, amax.dtype, epilogue)
    if key not in _PLANS:
        rows = 1 if epilogue.axis is None else amax.numel()
        outermost = epilogue.axis is None or epilogue.axis % y.dim() == 0
        fits = y.dtype != torch.float64 and outermost and 0 < y.numel() < 2**31 and rows <= _MOST_ROWS
        _PLANS[key] = LearnedPlan(y, bias is not None, residual is not None, rows, epilogue) if fits else None
    return _PLANS[key]


_PLANS = BoundedCache()


class LearnedPlan:
    """Launches for tensors of the same types and shapes.

    Args:
        y: dense; its shape, layout, type and device matter, its values do not.
        rows: ranges; each holds as many neighbours in memory.
    """

    def __init__(self, y: Tensor, has_bias: bool, has_residual: bool, rows: int, epilogue: Epilogue) -> None:
        e, inner = epilogue, y.numel() // rows
        block = min(_MOST_BLOCK, max(128, triton.next_power_of_2(inner)))
        self.device, self._rows, self._tiles = y.get_device(), rows, triton.cdiv(inner, block)
        bias_inner, bias_size = (inner_size(y, e.bias_dim), y.shape[e.bias_dim]) if has_bias else (1, 1)
        constants = (
            inner,
            bias_inner,
            bias_size,
            e.lower,
            e.upper,
            float(e.low),
            float(e.high),
            has_bias,
            has_residual,
            block,
        )
        grid = (self._tiles, rows)
        self._forward = Launch(_forward_kernel, grid, *constants)
        self._backward = Launch(_backward_kernel, grid, *constants)

    def forward(self, y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor) -> Tensor:
        """The quantized tensor; `residual` is laid out as `y`."""
        out = torch.empty_like(y)
        self._forward(self.device, y, y if bias is None else bias, y if residual is None else residual, amax, out)
        return out

    def backward(
        self, grad: Tensor, y: Tensor, bias: Tensor | None, residual: Tensor | None, amax: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(the gradient of `y`, the sum (rows,) for each range without its factor); `grad` is laid out as `y`."""
        out = torch.empty_like(y)
        sums = torch.empty((self._rows, self._tiles), dtype=torch.float32, device=y.device)
        others = (y, y if bias is None else bias, y if residual is None else residual, amax)
        self._backward(self.device, grad, *others, out, sums)
        return out, sums.squeeze(1) if self._tiles == 1 else sums.sum(1)
