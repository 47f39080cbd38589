"""The kernel of `fused_triton` inside a graph that torch.compile makes.

The compiler's own kernels for a chain write the result, and read everything again to pack the bits; and they divide
with Triton's slow division. Ours does it in one pass. Backward is left to torch's operations: the compiler masks the
gradient where it adds up two gradients that meet behind a chain, and a kernel of ours would be a border between them.
Called here as it is (no operation of a library around it), it is launched by the compiler's own wrapper, at no cost to
the processor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from compress.kernels.epilogue import (
    BITS,
    Epilogue,
    backward_torch,
    dense,
    empty_as,
    fits,
    is_channels_last,
    like,
)
from compress.kernels.triton.fake_quantize import GROUPS, bounds_of, decisive, forward_kernel


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
        to_out, out = empty_as(y, dtype)
        bits = torch.empty((n + 7) // 8, dtype=torch.uint8, device=y.device)
        columns = 0 if bias is None else y.shape[bias_dim]
        epilogue = Epilogue(low, high, lower, upper)
        from_, up_to = decisive(epilogue)
        forward_kernel[((n + BITS * GROUPS - 1) // (BITS * GROUPS),)](
            y, amax if bias is None else bias, amax if residual is None else like(residual, y), amax, to_out, bits,
            n, max(1, columns // BITS), 1, 1, *bounds_of(epilogue),
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PER_CHANNEL=False,
            EVEN=n % BITS == 0, FROM=from_, UP_TO=up_to, GROUPS=GROUPS,
        )  # fmt: skip
        ctx.save_for_backward(bits)
        ctx.last, ctx.bias_dim, ctx.dtype = last, bias_dim, y.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last if ctx.last else torch.contiguous_format)
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        passed, bias_grad = backward_torch(grad, bits, ctx.dtype, ctx.bias_dim, wants_bias)
        residual_grad = None
        if ctx.residual_dtype is not None:
            residual_grad = passed if ctx.residual_dtype == passed.dtype else passed.to(ctx.residual_dtype)
        return passed, bias_grad.to(ctx.bias_dtype) if wants_bias else None, residual_grad, *(None,) * 7
