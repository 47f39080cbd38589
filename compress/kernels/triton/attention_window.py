"""Attention within windows of few tokens, whose scores have a table added: a program holds whole heads."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compress.kernels.epilogue import IntegerGrid, rounding_threshold
from compress.kernels.triton.attention import _put, _rows
from compress.kernels.triton.attention_packed import packed_fits
from compress.kernels.triton.fake_quantize import below, on_grid, step_of, steps_of
from compress.kernels.triton.language import tl, triton
from compress.kernels.triton.launch import launch, refuse_second_derivative

_MOST = 64  # tokens of a window, and width of a head
_PROGRAMS = 2112  # about
_LOG2_E = math.log2(math.e)


@triton.jit
def _rounded(ptr, amax_ptr, tokens, row, low, high, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """(a part of a window, quantized; its steps of the grid)."""
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    x = _rows(ptr, 0, tokens, row, WIDE, ROWS, PADDED)
    steps = steps_of(x.to(tl.float32), float("-inf"), float("inf"), scale, reciprocal)
    return (on_grid(steps, low, high) * scale).to(x.dtype), steps


@triton.jit
def _passes(steps, least, high):
    return (steps > least) & (steps < high + 0.5)  # `high` is odd: halves round away from it


@triton.jit
def _table(table_ptr, tokens, ROWS: tl.constexpr):
    """A (tokens, tokens) table in the exponent of two; minus infinity past the last column."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    there = (row < tokens) & (column < tokens)
    found = tl.load(table_ptr + row * tokens + column, mask=there, other=0.0).to(tl.float32)
    return tl.where(column < tokens, found * 1.4426950408889634, float("-inf"))


@triton.jit
def _attend(q, k, v, table, amax_ptr, factor, high):
    """(probabilities, their steps, the attended values)."""
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * factor + table
    p = tl.exp2(x - tl.max(x, axis=1)[:, None])
    p *= tl.div_rn(tl.full(p.shape, 1.0, tl.float32), tl.broadcast_to(tl.sum(p, axis=1)[:, None], p.shape))
    steps = p * reciprocal
    return p, steps, tl.dot(below(steps, high).to(v.dtype), v, input_precision="ieee") * scale


@triton.jit
def window_kernel(
    qkv_ptr, table_ptr, mask_ptr, amax_ptr, q_amax_ptr, k_amax_ptr, v_amax_ptr, out_amax_ptr, out_ptr,
    count, masks, tokens, heads, steps, factor, high, low, most, out_low, out_high,
    WIDE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute the quantized results of a head of some windows. MASKED: a second table, of the window modulo `masks`."""
    factor = tl.cast(factor, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    low = tl.cast(low, tl.float32)
    most = tl.cast(most, tl.float32)
    out_low = tl.cast(out_low, tl.float32)
    out_high = tl.cast(out_high, tl.float32)
    head = tl.program_id(0)
    table = _table(table_ptr + head * tokens * tokens, tokens, ROWS)
    out_scale, out_reciprocal = step_of(tl.load(out_amax_ptr), out_high)
    first = tl.program_id(1) * steps
    for window in range(first, tl.minimum(first + steps, count)):
        start = qkv_ptr + tl.cast(window, tl.int64) * tokens * (3 * heads * WIDE) + head * WIDE
        q, _ = _rounded(start, q_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        k, _ = _rounded(start + heads * WIDE, k_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        v, _ = _rounded(start + 2 * heads * WIDE, v_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        scores = table
        if MASKED:
            scores += _table(mask_ptr + window % masks * tokens * tokens, tokens, ROWS)
        _, _, total = _attend(q, k, v, scores, amax_ptr, factor, high)
        found = steps_of(total, float("-inf"), float("inf"), out_scale, out_reciprocal)
        found = on_grid(found, out_low, out_high) * out_scale
        to = out_ptr + tl.cast(window, tl.int64) * tokens * (heads * WIDE) + head * WIDE
        _put(to, found, 0, tokens, heads * WIDE, WIDE, ROWS, PADDED)


@triton.jit
def window_gradient_kernel(
    qkv_ptr, table_ptr, mask_ptr, amax_ptr, q_amax_ptr, k_amax_ptr, v_amax_ptr, out_amax_ptr, grad_ptr, out_ptr,
    sums_ptr, count, masks, tokens, heads, steps, factor, high, low, most, out_low, out_high, least, out_least, scaling,
    WIDE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a head of some windows, and their sum for the table; all is computed again from q, k, v.

    MASKED: as in `window_kernel`.
    """
    factor = tl.cast(factor, tl.float32)
    high = tl.cast(high, tl.float32)
    low = tl.cast(low, tl.float32)
    most = tl.cast(most, tl.float32)
    out_low = tl.cast(out_low, tl.float32)
    out_high = tl.cast(out_high, tl.float32)
    least = tl.cast(least, tl.float32)
    out_least = tl.cast(out_least, tl.float32)
    scaling = tl.cast(scaling, tl.float32)
    head = tl.program_id(0)
    table = _table(table_ptr + head * tokens * tokens, tokens, ROWS)
    out_scale, out_reciprocal = step_of(tl.load(out_amax_ptr), out_high)
    scale, _ = step_of(tl.load(amax_ptr), high)
    of_table = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    first = tl.program_id(1) * steps
    for window in range(first, tl.minimum(first + steps, count)):
        at = tl.cast(window, tl.int64) * tokens * (3 * heads * WIDE) + head * WIDE
        start = qkv_ptr + at
        q, q_steps = _rounded(start, q_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        start += heads * WIDE
        k, k_steps = _rounded(start, k_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        start += heads * WIDE
        v, v_steps = _rounded(start, v_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        scores = table
        if MASKED:
            scores += _table(mask_ptr + window % masks * tokens * tokens, tokens, ROWS)
        p, found, total = _attend(q, k, v, scores, amax_ptr, factor, high)
        out_steps = steps_of(total, float("-inf"), float("inf"), out_scale, out_reciprocal)
        grad_at = tl.cast(window, tl.int64) * tokens * (heads * WIDE) + head * WIDE
        grad = _rows(grad_ptr + grad_at, 0, tokens, heads * WIDE, WIDE, ROWS, PADDED)
        grad = tl.where(_passes(out_steps, out_least, out_high), grad, 0.0).to(v.dtype)
        of_v = tl.dot(tl.trans(below(found, high).to(v.dtype)), grad, input_precision="ieee") * scale
        of_v = tl.where(_passes(v_steps, least, most), of_v, 0.0)
        to = out_ptr + at
        _put(to + 2 * heads * WIDE, of_v, 0, tokens, 3 * heads * WIDE, WIDE, ROWS, PADDED)
        passed = tl.dot(grad, tl.trans(v), input_precision="ieee")
        passed = tl.where(found < high + 0.5, passed, 0.0)  # none is below 0, the least integer
        passed = p * (passed - tl.sum(p * passed, axis=1)[:, None])
        of_table += passed
        narrow = passed.to(v.dtype)
        of_q = tl.dot(narrow, k, input_precision="ieee") * scaling
        of_q = tl.where(_passes(q_steps, least, most), of_q, 0.0)
        _put(to, of_q, 0, tokens, 3 * heads * WIDE, WIDE, ROWS, PADDED)
        of_k = tl.dot(tl.trans(narrow), q, input_precision="ieee") * scaling
        of_k = tl.where(_passes(k_steps, least, most), of_k, 0.0)
        _put(to + heads * WIDE, of_k, 0, tokens, 3 * heads * WIDE, WIDE, ROWS, PADDED)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    sums_ptr += (tl.program_id(1) * heads + head) * tokens * tokens
    tl.store(sums_ptr + row * tokens + column, of_table, mask=(row < tokens) & (column < tokens))


def window_fits(qkv: Tensor) -> bool:
    """True if `window_attention` takes q, k and v: as `packed_fits`, of at most 64 tokens and 64 columns.

    In float32 at most 32 of each: more do not fit into shared memory.
    """
    most = _MOST if qkv.dtype.itemsize == 2 else _MOST // 2
    return packed_fits(qkv) and qkv.shape[1] <= most and qkv.shape[4] <= most


def window_attention(
    qkv: Tensor,
    table: Tensor,
    mask: Tensor | None,
    weights: IntegerGrid,
    parts: tuple[IntegerGrid, IntegerGrid, IntegerGrid],
    result: IntegerGrid,
    scaling: float,
) -> Tensor:
    """Softmax(scaling * q k^T + table + mask), quantized, times v, quantized: (B, T, H, D), contiguous.

    - `qkv`: (B, T, 3, H, D), `window_fits`; q, k and v are quantized, with the same integers.
    - `table`: (H, T, T) or (1, H, T, T).
    - `mask`: of W * T * T elements, where window b has the part b modulo W; it gets no gradient. None = there is none.
    - `weights`: of the probabilities; their smallest integer is 0 or less.
    """
    ranges = (weights.amax, *(part.amax for part in parts), result.amax)
    numbers = (weights.high, parts[0].low, parts[0].high, result.low, result.high)
    return _WindowAttention.apply(qkv, table, mask, *ranges, scaling, *numbers)


class _WindowAttention(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, table: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        ranges, scaling, integers = rest[:5], rest[5], rest[6:]
        batch, tokens, _, heads, width = qkv.shape
        ctx.numbers = (scaling * _LOG2_E, *[float(integer) for integer in integers]), scaling
        ctx.least = rounding_threshold(integers[1]), rounding_threshold(integers[3])
        ctx.kept = mask is not None
        out = torch.empty((batch, tokens, heads, width), dtype=qkv.dtype, device=qkv.device)
        tensors = (qkv, table.contiguous(), table if mask is None else mask.contiguous(), *ranges)
        ctx.save_for_backward(*tensors)
        grid, sizes, constants = _sizes(tensors[0], tensors[2], ctx.kept)
        launch(window_kernel, grid, (*tensors, out), (*sizes, *ctx.numbers[0], *constants), num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        tensors = ctx.saved_tensors
        qkv, table = tensors[0], tensors[1]
        grid, sizes, constants = _sizes(qkv, tensors[2], ctx.kept)
        out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty((grid[1], *table.shape), dtype=torch.float32, device=qkv.device)
        numbers, scaling = ctx.numbers
        launch(
            window_gradient_kernel,
            grid,
            (*tensors, grad.contiguous(), out, sums),
            (*sizes, *numbers, *ctx.least, scaling, *constants),
            num_warps=4,
        )
        return out, sums.sum(0).to(table.dtype), *(None,) * 12


def _sizes(qkv: Tensor, mask: Tensor, masked: bool) -> tuple[tuple[int, int], tuple[int, ...], tuple[Any, ...]]:
    """(programs, sizes, constexprs) of both kernels."""
    batch, tokens, _, heads, width = qkv.shape
    steps = -(-batch // max(1, _PROGRAMS // heads))
    masks = mask.numel() // (tokens * tokens) if masked else 1
    rows, padded = (max(16, 1 << (size - 1).bit_length()) for size in (tokens, width))
    return (heads, -(-batch // steps)), (batch, masks, tokens, heads, steps), (width, masked, rows, padded)
