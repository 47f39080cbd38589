"""The kernels of `fused_triton` inside a graph that torch.compile makes, where they were asked for.

The compiler's own kernels for a chain write the result, and read everything again to pack the bits; and sum the
bias's gradient in a pass of its own. Ours do both on the way, at the price of a border that the compiler cannot fuse
across: the sum of two gradients that meet behind a chain is written to memory first. Called here as they are (no
operation of a library around them), they are launched by the compiler's own wrapper, at no cost to the processor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from compress.quantization.fused_ops import BITS, Epilogue, dense, is_channels_last, like
from compress.quantization.fused_triton import (
    GROUPS,
    Strips,
    backward_bias_kernel,
    backward_kernel,
    fits,
    forward_kernel,
)


def fused_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """As `fused_ops.fused_quantize`, per tensor; None where the kernels do not fit."""
    y = dense(y)
    if epilogue.axis is not None or y.numel() == 0 or not fits(y, epilogue, bias):
        return None
    e = epilogue
    numbers = (e.low, e.high, e.lower, e.upper, e.bias_dim)
    return cast(Tensor, _Traced.apply(y, bias, residual, amax, *numbers, dtype))


class _Traced(torch.autograd.Function):
    """Keeps the packed bits only; the result is kept by whichever layer reads it."""

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
        bias_dim: int,
        dtype: torch.dtype,
    ) -> Tensor:
        n = y.numel()
        last = is_channels_last(y)
        out = torch.empty_like(y, dtype=dtype)
        bits = torch.empty((n + 7) // 8, dtype=torch.uint8, device=y.device)
        columns = 0 if bias is None else y.shape[bias_dim]
        forward_kernel[((n + BITS * GROUPS - 1) // (BITS * GROUPS),)](
            y, amax if bias is None else bias, amax if residual is None else like(residual, y), amax, out, bits,
            n, max(1, columns // BITS), 1, 1, lower, upper, float(low), float(high),
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PER_CHANNEL=False,
            EVEN=n % BITS == 0, GROUPS=GROUPS,
        )  # fmt: skip
        ctx.save_for_backward(bits)
        ctx.last, ctx.columns, ctx.dtype = last, columns, y.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last if ctx.last else torch.contiguous_format)
        n = grad.numel()
        out = torch.empty_like(grad, dtype=ctx.dtype)
        bias_grad = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            s = Strips.of(n, ctx.columns)
            sums = torch.empty((s.programs, ctx.columns), dtype=torch.float32, device=grad.device)
            backward_bias_kernel[(s.strips, s.programs)](
                grad, bits, out, sums, n // ctx.columns, ctx.columns // BITS, s.steps, ROWS=s.tile, COLUMNS=s.strip
            )
            bias_grad = sums.sum(0).to(ctx.bias_dtype)
        else:
            backward_kernel[((n + BITS * GROUPS - 1) // (BITS * GROUPS),)](
                grad, bits, out, n, EVEN=n % BITS == 0, GROUPS=GROUPS
            )
        residual_grad = None
        if ctx.residual_dtype is not None:
            residual_grad = out if ctx.residual_dtype == out.dtype else out.to(ctx.residual_dtype)
        return out, bias_grad, residual_grad, *(None,) * 7
