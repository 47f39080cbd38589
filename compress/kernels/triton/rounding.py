"""Rounding to a quantizer's integers inside Triton kernels, to the last bit as `fake_quantize`, in few instructions."""

# ruff: noqa: ANN001, ANN201  (kernels: Triton gives their parameters types)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from compress.kernels.triton.language import tl, triton

_FAR = tl.constexpr(4096.0)  # steps: beyond every grid of at most 12 bits
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction bits, so it rounds half to even


@triton.jit
def divide(x, by, reciprocal):
    """The quotient, rounded correctly where it is finite and not subnormal (Markstein, IBM J. Res. Dev. 34, 1990).

    - `reciprocal`: 1 / by, rounded correctly.
    """
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, by, x), reciprocal, quotient)


@triton.jit
def step_of(amax, high):
    """(one step of a grid, its reciprocal), of a range that ends at the integer `high`, each rounded correctly."""
    scale = tl.div_rn(amax.to(tl.float32), high)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def steps_of(x, lower, upper, scale, reciprocal):
    """Clip `x` to the bounds of an activation and divide it by the scale; far values are clipped too. Keeps NaN.

    - `x`: float32.
    - `scale`: one step; positive.
    - `reciprocal`: of `scale`, rounded correctly.
    """
    most = tl.minimum(upper, _FAR * scale)
    least = tl.maximum(lower, -_FAR * scale)
    x = tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    return divide(x, scale, reciprocal)


@triton.jit
def on_grid(steps, low, high):
    """The nearest integers from `low` to `high`, half to even, as float32. Keeps NaN."""
    steps = tl.minimum(steps, high, propagate_nan=tl.PropagateNan.ALL)
    steps = tl.maximum(steps, low, propagate_nan=tl.PropagateNan.ALL)
    return (steps + _ROUNDS) - _ROUNDS


@triton.jit
def below(steps, high):
    """`on_grid` of values that are never below the smallest integer."""
    return (tl.minimum(steps, high, propagate_nan=tl.PropagateNan.ALL) + _ROUNDS) - _ROUNDS
