"""Attention with quantized probabilities: of separate q, k and v, of packed ones, and within windows of few tokens."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import IntegerGrid, rounding_threshold
from compress.kernels.memory_format import BITS_PER_BYTE
from compress.kernels.triton.fake_quantize import below, on_grid, step_of, steps_of
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton


@triton.jit
def _rows(ptr, first, count, stride, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a (count, WIDE) matrix from `first` on, `stride` apart, zeros around them."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    there = (row < count)[:, None]
    if PADDED > WIDE:
        there = there & (column < WIDE)[None, :]
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _put(ptr, value, first, count, stride, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    there = (row < count)[:, None]
    if PADDED > WIDE:
        there = there & (column < WIDE)[None, :]
    tl.store(ptr + row[:, None] * stride + column[None, :], value.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def _masked(value, bits_ptr, first, count, stride, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """`value`, 0 where the quantizer saturated, by its bits. Row starts are multiples of eight elements."""
    row = first + tl.arange(0, ROWS)
    group = tl.arange(0, PADDED // 8)
    there = (row < count)[:, None] & (group < WIDE // 8)[None, :]
    bits = tl.load(bits_ptr + row[:, None] * (stride // 8) + group[None, :], mask=there, other=0).to(tl.int32)
    bits = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.where(tl.reshape(bits, (ROWS, PADDED)) != 0, value, 0.0)


@triton.jit
def _put_bits(ptr, passes, first, count, stride, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    group = tl.arange(0, PADDED // 8)
    lane = tl.arange(0, 8)
    there = (row < count)[:, None] & (group < WIDE // 8)[None, :]
    bits = tl.sum(tl.reshape(passes.to(tl.int32), (ROWS, PADDED // 8, 8)) << lane[None, None, :], axis=2)
    tl.store(ptr + row[:, None] * (stride // 8) + group[None, :], bits.to(tl.uint8), mask=there)


@triton.jit
def round_kernel(
    x_ptr,
    q_amax_ptr,
    k_amax_ptr,
    v_amax_ptr,
    out_ptr,
    bits_ptr,
    rows,
    groups,
    strips,
    tiles,
    least,
    low,
    high,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Quantize tiles of q, of k or of v, which lie side by side in each row, and store their bits, 0 if saturated.

    groups: of eight elements, in a part of a row; strips: of GROUPS groups.
    """
    least = tl.cast(least, tl.float32)
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    part = tl.program_id(1) // strips
    k_or_v = tl.where(part == 1, tl.load(k_amax_ptr), tl.load(v_amax_ptr))
    amax = tl.where(part == 0, tl.load(q_amax_ptr), k_or_v)
    scale, reciprocal = step_of(amax, high)
    group = tl.program_id(1) % strips * GROUPS + tl.arange(0, GROUPS)
    local = tl.arange(0, ROWS)
    lane = tl.arange(0, 8)
    bits_at = local[:, None] * (3 * groups) + (part * groups + group)[None, :]
    at = bits_at[:, :, None] * 8 + lane[None, None, :]
    for tile in range(0, tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS
        start = row * (3 * groups)
        whole = (local < rows - row)[:, None] & (group < groups)[None, :]
        there = tl.broadcast_to(whole[:, :, None], (ROWS, GROUPS, 8))
        x = tl.load(x_ptr + start * 8 + at, mask=there, other=0.0).to(tl.float32)
        steps = steps_of(x, float("-inf"), float("inf"), scale, reciprocal)
        passes = (steps > least) & (steps < high + 0.5)  # `high` is odd: halves round away from it
        rounded = on_grid(steps, low, high) * scale
        tl.store(out_ptr + start * 8 + at, rounded.to(out_ptr.dtype.element_ty), mask=there)
        bits = tl.sum(tl.where(passes, (1 << lane)[None, None, :], 0), axis=2)
        tl.store(bits_ptr + start + bits_at, bits.to(tl.uint8), mask=whole)


@triton.jit
def _program(blocks, heads, ROWS: tl.constexpr):
    """(index of the head over all batches, first row of the block, batch, head within it) of a program."""
    index = tl.program_id(0) // blocks
    return index, tl.program_id(0) % blocks * ROWS, (index // heads).to(tl.int64), index % heads


@triton.jit
def _scores(q, k, factor):
    """Products of queries and keys, in the exponent of two; 0 for columns past the last key."""
    return tl.dot(q, tl.trans(k), input_precision="ieee") * factor


@triton.jit
def _edge(first, keys, COLUMNS: tl.constexpr):
    """Minus infinity for columns past the last key, 0 for others: added to scores, it takes them out of the softmax."""
    return tl.where(first + tl.arange(0, COLUMNS) < keys, 0.0, float("-inf"))[None, :]


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    amax_ptr,
    out_amax_ptr,
    out_ptr,
    sums_ptr,
    out_bits_ptr,
    tokens,
    padded,
    keys,
    blocks,
    heads,
    row,
    v_row,
    out_row,
    k_at,
    v_at,
    factor,
    high,
    out_least,
    out_low,
    out_high,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a block of the result, and the binary logarithms of its rows' sums (arXiv 1805.02867 and 2205.14135).

    ROUNDED: the result is quantized, with a bit for each element. WHOLE: one block of columns holds all keys.
    """
    factor = tl.cast(factor, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    index, first_row, batch, head = _program(blocks, heads, ROWS)
    k_ptr += batch * keys * row + head * DEEP + k_at
    v_ptr += batch * keys * v_row + head * WIDE + v_at
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    q = _rows(q_ptr + batch * tokens * row + head * DEEP, first_row, tokens, row, DEEP, ROWS, DEPTH)
    if WHOLE:
        x = _scores(q, _rows(k_ptr, 0, keys, row, DEEP, COLUMNS, DEPTH), factor) + _edge(0, keys, COLUMNS)
        most = tl.max(x, axis=1)
        p = tl.exp2(x - most[:, None])
        sums = tl.sum(p, axis=1)
        logs = most + tl.log2(sums)
        steps = p * tl.div_rn(reciprocal, sums)[:, None]
        v = _rows(v_ptr, 0, keys, v_row, WIDE, COLUMNS, WIDTH)
        total = tl.dot(below(steps, high).to(v.dtype), v, input_precision="ieee")
    else:
        most = tl.full([ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            x = _scores(q, _rows(k_ptr, first, keys, row, DEEP, COLUMNS, DEPTH), factor) + _edge(first, keys, COLUMNS)
            higher = tl.maximum(most, tl.max(x, axis=1))
            sums = sums * tl.exp2(most - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
            most = higher
        logs = most + tl.log2(sums)
        total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            x = _scores(q, _rows(k_ptr, first, keys, row, DEEP, COLUMNS, DEPTH), factor)
            steps = tl.exp2(x - logs[:, None]) * reciprocal  # past the last key, values are 0
            v = _rows(v_ptr, first, keys, v_row, WIDE, COLUMNS, WIDTH)
            total = tl.dot(below(steps, high).to(v.dtype), v, total, input_precision="ieee")
    start = batch * tokens * out_row + head * WIDE
    total *= scale
    if ROUNDED:
        out_least = tl.cast(out_least, tl.float32)
        out_low = tl.cast(out_low, tl.float32)
        out_high = tl.cast(out_high, tl.float32)
        out_scale, out_reciprocal = step_of(tl.load(out_amax_ptr), out_high)
        steps = steps_of(total, float("-inf"), float("inf"), out_scale, out_reciprocal)
        passes = (steps > out_least) & (steps < out_high + 0.5)
        _put_bits(out_bits_ptr + start // 8, passes, first_row, tokens, out_row, WIDE, ROWS, WIDTH)
        total = on_grid(steps, out_low, out_high) * out_scale
    _put(out_ptr + start, total, first_row, tokens, out_row, WIDE, ROWS, WIDTH)
    tl.store(sums_ptr + index * padded + first_row + tl.arange(0, ROWS), logs)


@triton.jit
def _grads(q, grad, k, v, logs, factor, limit):
    """(the probabilities of a block, their gradients, 0 where the quantizer saturated: from `limit` on)."""
    p = tl.exp2(tl.minimum(_scores(q, k, factor) - logs, 0.0, propagate_nan=tl.PropagateNan.ALL))
    passed = tl.dot(grad, tl.trans(v), input_precision="ieee")
    return p, tl.where(p < limit, passed, 0.0)  # none is below 0, the least integer


@triton.jit
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    sums_ptr,
    amax_ptr,
    bits_ptr,
    grad_bits_ptr,
    out_ptr,
    deltas_ptr,
    passed_ptr,
    tokens,
    padded,
    keys,
    blocks,
    heads,
    row,
    v_row,
    out_row,
    k_at,
    v_at,
    factor,
    scaling,
    high,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a block of the gradient of q, and sum(dP * P) of its rows. WHOLE: as in `forward_kernel`.

    MASKED, ROUNDED: q, k and v, and the result, were quantized. `passed` gets the masked gradient.
    """
    factor = tl.cast(factor, tl.float32)
    scaling = tl.cast(scaling, tl.float32)
    high = tl.cast(high, tl.float32)
    index, first_row, batch, head = _program(blocks, heads, ROWS)
    k_ptr += batch * keys * row + head * DEEP + k_at
    v_ptr += batch * keys * v_row + head * WIDE + v_at
    limit = (high + 0.5) * step_of(tl.load(amax_ptr), high)[0]
    q = _rows(q_ptr + batch * tokens * row + head * DEEP, first_row, tokens, row, DEEP, ROWS, DEPTH)
    start = batch * tokens * out_row + head * WIDE
    grad = _rows(grad_ptr + start, first_row, tokens, out_row, WIDE, ROWS, WIDTH)
    if ROUNDED:
        grad = _masked(grad, grad_bits_ptr + start // 8, first_row, tokens, out_row, WIDE, ROWS, WIDTH)
        _put(passed_ptr + start, grad, first_row, tokens, out_row, WIDE, ROWS, WIDTH)
    query = first_row + tl.arange(0, ROWS)
    sums_at = index.to(tl.int64) * padded + query  # without masks more than 128 registers: three programs for four
    logs = tl.load(sums_ptr + sums_at, mask=query < tokens, other=0.0)[:, None]
    if WHOLE:
        k = _rows(k_ptr, 0, keys, row, DEEP, COLUMNS, DEPTH)
        v = _rows(v_ptr, 0, keys, v_row, WIDE, COLUMNS, WIDTH)
        p, passed = _grads(q, grad, k, v, logs, factor, limit)
        deltas = tl.sum(p * passed, axis=1)
        total = tl.dot((p * (passed - deltas[:, None])).to(k.dtype), k, input_precision="ieee")
    else:
        total = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        weighted = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        rest = tl.zeros([ROWS], dtype=tl.float32)
        about = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            k = _rows(k_ptr, first, keys, row, DEEP, COLUMNS, DEPTH)
            v = _rows(v_ptr, first, keys, v_row, WIDE, COLUMNS, WIDTH)
            p, passed = _grads(q, grad, k, v, logs - _edge(first, keys, COLUMNS), factor, limit)
            if first == 0:  # a guess, so that little is left to cancel in half precision
                about = tl.sum(p * passed, axis=1) / tl.maximum(tl.sum(p, axis=1), 1e-30)
            passed = p * (passed - about[:, None])
            rest += tl.sum(passed, axis=1)
            total = tl.dot(passed.to(k.dtype), k, total, input_precision="ieee")
            weighted = tl.dot(p.to(k.dtype), k, weighted, input_precision="ieee")
        total -= rest[:, None] * weighted
        deltas = about + rest  # sum(P) is 1
    start = batch * tokens * row + head * DEEP
    total *= scaling
    if MASKED:
        total = _masked(total, bits_ptr + start // 8, first_row, tokens, row, DEEP, ROWS, DEPTH)
    _put(out_ptr + start, total, first_row, tokens, row, DEEP, ROWS, DEPTH)
    tl.store(deltas_ptr + sums_at, deltas, mask=query < tokens)


@triton.jit
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    sums_ptr,
    deltas_ptr,
    amax_ptr,
    bits_ptr,
    out_ptr,
    tokens,
    padded,
    keys,
    blocks,
    heads,
    row,
    v_row,
    out_row,
    k_at,
    v_at,
    k_to,
    v_to,
    factor,
    scaling,
    high,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a block of the gradients of k and v; rows are keys."""
    factor = tl.cast(factor, tl.float32)
    scaling = tl.cast(scaling, tl.float32)
    high = tl.cast(high, tl.float32)
    index, first_key, batch, head = _program(blocks, heads, ROWS)
    q_ptr += batch * tokens * row + head * DEEP
    grad_ptr += batch * tokens * out_row + head * WIDE
    sums_ptr += index * padded
    deltas_ptr += index * padded
    k_start = batch * keys * row + head * DEEP
    v_start = batch * keys * v_row + head * WIDE
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    k = _rows(k_ptr + k_at + k_start, first_key, keys, row, DEEP, ROWS, DEPTH)
    v = _rows(v_ptr + v_at + v_start, first_key, keys, v_row, WIDE, ROWS, WIDTH)
    k_total = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    v_total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for first in range(0, tokens, COLUMNS):
        q = _rows(q_ptr, first, tokens, row, DEEP, COLUMNS, DEPTH)
        grad = _rows(grad_ptr, first, tokens, out_row, WIDE, COLUMNS, WIDTH)
        query = first + tl.arange(0, COLUMNS)
        logs = tl.load(sums_ptr + query)
        deltas = tl.load(deltas_ptr + query, mask=query < tokens, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * factor - logs[None, :])
        steps = p * reciprocal
        v_total = tl.dot(below(steps, high).to(grad.dtype), grad, v_total, input_precision="ieee")
        passed = tl.dot(v, tl.trans(grad), input_precision="ieee")
        passed = tl.where(steps < high + 0.5, passed, 0.0)
        k_total = tl.dot((p * (passed - deltas[None, :])).to(q.dtype), q, k_total, input_precision="ieee")
    k_total *= scaling  # one after the other: both at a time would take the registers of a third program
    if MASKED:
        k_total = _masked(k_total, bits_ptr + (k_to + k_start) // 8, first_key, keys, row, DEEP, ROWS, DEPTH)
    _put(out_ptr + k_to + k_start, k_total, first_key, keys, row, DEEP, ROWS, DEPTH)
    v_total *= scale
    if MASKED:
        v_total = _masked(v_total, bits_ptr + (v_to + v_start) // 8, first_key, keys, v_row, WIDE, ROWS, WIDTH)
    _put(out_ptr + v_to + v_start, v_total, first_key, keys, v_row, WIDE, ROWS, WIDTH)


# Largest width of a query or of a value.
WIDEST = 256
# Elements of a head, or of the rows of a batch: indices have 32 bits.
LARGEST = 2**31
_LOG2_E = math.log2(math.e)
_MOST = 128  # rows or columns of a tile


class AttentionTile(NamedTuple):
    """The block that a program holds at a time; in `keys_kernel` rows are keys and columns queries, else the reverse.

    Attributes:
        whole: one block of columns holds them all.
        stages: blocks of columns whose loads are in flight.
    """

    rows: int
    columns: int
    whole: bool
    warps: int
    stages: int


class AttentionTiles(NamedTuple):
    """One tile for each kernel; powers of two, at most `_MOST`, and `keys.columns` at most `forward.rows`."""

    forward: AttentionTile
    queries: AttentionTile
    keys: AttentionTile


class HeadLayout(NamedTuple):
    """Sizes and memory layout of heads, in elements.

    Attributes:
        total: heads, of all batches; `heads` lie side by side in a row.
        row, v_row, out_row: from one row of q and k, of v, of the result to the next.
        k_at, v_at: from q to k and v; 0 for separate tensors.
        k_to, v_to: from the gradient of q to those of k and v.
        deep, wide: widths of a query and of a value.
    """

    total: int
    tokens: int
    keys: int
    heads: int
    row: int
    v_row: int
    out_row: int
    k_at: int
    v_at: int
    k_to: int
    v_to: int
    deep: int
    wide: int


def default_tiles(tokens: int, keys: int, width: int, dtype: torch.dtype) -> AttentionTiles:
    half = dtype.itemsize == 2
    if half and width <= 64:  # steps of 32 with three in flight: the fastest of seven tiles on an H200 (197 tokens)
        rows, columns = min(64, _padded(tokens)), min(64, _padded(keys))
        ahead = AttentionTile(rows, 32, False, 4, 3) if keys > 64 else AttentionTile(rows, columns, True, 4, 2)
        return AttentionTiles(ahead, ahead, AttentionTile(columns, min(32, _padded(tokens)), False, 4, 3))
    most = 64 if half and width <= 128 else 32 if half or width <= 64 else 16
    rows, columns = min(most, _padded(tokens)), min(most, _padded(keys))
    whole = keys <= columns
    ahead = AttentionTile(rows, columns, whole, 4, 2)
    step = min(most, 32 if half else 16, _padded(tokens))
    return AttentionTiles(ahead, ahead, AttentionTile(columns, step, False, 4, 2))


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these types and shapes: (..., T, D), (..., S, D), (..., S, E)."""
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    shaped = q.dim() >= 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not alike or not shaped or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    widest = max(q.shape[-1], v.shape[-1])
    longest = max(q.shape[-2], k.shape[-2])
    return widest <= WIDEST and widest * longest < LARGEST and min(q.numel(), k.numel(), v.numel()) > 0


def attention(
    q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float, high: int, tiles: AttentionTiles | None = None
) -> Tensor:
    """fake_quantize(softmax(scaling * q k^T)) v, (..., T, E), contiguous, of tensors for which `fits`.

    `amax` is (), the range of the probabilities; one step is amax / high, odd and at most 255.
    """
    if tiles is None:
        tiles = default_tiles(q.shape[-2], k.shape[-2], max(q.shape[-1], v.shape[-1]), q.dtype)
    return _Attention.apply(q, k, v, amax, scaling, high, *flat(tiles))


class _Attention(torch.autograd.Function):
    """Keeps its inputs and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float, high: int, *tiles: Any
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty((*q.shape[:-2], room_for(q.shape[-2])), dtype=torch.float32, device=q.device)
        run_forward((q, k, v, amax, out, sums), _apart(q, k, v), (scaling, high), AttentionTile(*tiles[:5]))
        ctx.save_for_backward(q, k, v, amax, sums)
        ctx.numbers, ctx.tiles = (scaling, high), tiles[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        q, k, v, amax, sums = ctx.saved_tensors
        layout = _apart(q, k, v)
        grads = torch.empty(q.numel() + k.numel() + v.numel(), dtype=q.dtype, device=q.device)
        run_backward((q, k, v, amax, sums, grad.contiguous()), grads, layout, ctx.numbers, ctx.tiles)
        q_grad, k_grad, v_grad = grads.split([q.numel(), k.numel(), v.numel()])
        return q_grad.view(q.shape), k_grad.view(k.shape), v_grad.view(v.shape), *(None,) * 18


def run_forward(
    tensors: tuple[Tensor, ...],
    layout: HeadLayout,
    numbers: tuple[float, int],
    tile: AttentionTile,
    bounds: tuple[int, int] = (0, 0),
    rounded: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the result and the logarithms of the sums.

    - `tensors`: q, k, v, the range of the probabilities, the result, the sums.
    - `numbers`: factor of the scores, and the largest integer of a probability.
    - `bounds`: smallest and largest integer of the result, if it is quantized.
    - `rounded`: range of the result and its bits, which are written; None = it is not quantized.
    """
    scaling, high = numbers
    amax = tensors[3]
    out_amax, out_bits = rounded or (amax, amax)
    blocks = -(-layout.tokens // tile.rows)
    launch(
        forward_kernel,
        (blocks * layout.total,),
        (*tensors[:4], out_amax, *tensors[4:], out_bits),
        (
            layout.tokens,
            tensors[5].shape[-1],
            layout.keys,
            blocks,
            *layout[3:9],
            scaling * _LOG2_E,
            float(high),
            rounding_threshold(bounds[0]),
            float(bounds[0]),
            float(bounds[1]),
            *_sizes(layout),
            rounded is not None,
            tile.whole,
            tile.rows,
            tile.columns,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def run_backward(
    tensors: tuple[Tensor, ...],
    grads: Tensor,
    layout: HeadLayout,
    numbers: tuple[float, int],
    tiles: tuple[Any, ...],
    bits: Tensor | None = None,
    out_bits: Tensor | None = None,
) -> None:
    """Write the gradients of q, k and v into `grads`.

    - `tensors`: q, k, v, the range of the probabilities, the sums, the gradient of the result.
    - `bits`, `out_bits`: of q, k and v and of the result, if quantized.
    """
    factors = (numbers[0] * _LOG2_E, numbers[0], float(numbers[1]))
    q, k, v, amax, sums, grad = tensors
    by_queries, by_keys = AttentionTile(*tiles[:5]), AttentionTile(*tiles[5:])
    sizes = (*_sizes(layout), bits is not None)
    masks, grad_masks = [amax if found is None else found for found in (bits, out_bits)]
    passed = grad if out_bits is None else torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    deltas = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
    blocks = -(-layout.tokens // by_queries.rows)
    launch(
        queries_kernel,
        (blocks * layout.total,),
        (q, k, v, grad, sums, amax, masks, grad_masks, grads, deltas, passed),
        (
            *(layout.tokens, sums.shape[-1], layout.keys, blocks),
            *layout[3:9],
            *factors,
            *sizes,
            out_bits is not None,
            by_queries.whole,
            by_queries.rows,
            by_queries.columns,
        ),
        num_warps=by_queries.warps,
        num_stages=by_queries.stages,
    )
    blocks = -(-layout.keys // by_keys.rows)
    launch(
        keys_kernel,
        (blocks * layout.total,),
        (q, k, v, passed, sums, deltas, amax, masks, grads),
        (
            *(layout.tokens, sums.shape[-1], layout.keys, blocks),
            *layout[3:11],
            *factors,
            *sizes,
            by_keys.rows,
            by_keys.columns,
        ),
        num_warps=by_keys.warps,
        num_stages=by_keys.stages,
    )


def room_for(tokens: int) -> int:
    """Elements allocated for the rows of a head: whole blocks, which are written and read without a mask."""
    return -(-tokens // _MOST) * _MOST


def flat(tiles: AttentionTiles) -> tuple[Any, ...]:
    """All fields in one tuple, as an `autograd.Function` takes them."""
    return tuple(number for tile in tiles for number in tile)


def _apart(q: Tensor, k: Tensor, v: Tensor) -> HeadLayout:
    deep, wide = q.shape[-1], v.shape[-1]
    total = q.numel() // (q.shape[-2] * deep)
    ends = (q.numel(), q.numel() + k.numel())
    return HeadLayout(total, q.shape[-2], k.shape[-2], 1, deep, wide, wide, 0, 0, *ends, deep, wide)


def _sizes(layout: HeadLayout) -> tuple[int, int, int, int]:
    return layout.deep, layout.wide, _padded(layout.deep), _padded(layout.wide)


def _padded(count: int) -> int:
    """The next power of two, 16 or more; `count` may be a symbolic size."""
    size = 16
    while size < count:
        size *= 2
    return size


_ROUND_TILE = (4, 16)  # rows, and groups of eight columns, of `round_kernel`
_ROUND_TILES = 8  # of a program of it
_ROUND_WARPS = 1


def packed_fits(qkv: Tensor) -> bool:
    """Whether `packed_attention` takes q, k and v: (B, T, 3, H, D), contiguous, D a multiple of eight."""
    if qkv.dim() != 5 or qkv.shape[2] != 3 or qkv.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    (_, tokens, _, heads, width), count = qkv.shape, qkv.numel()
    small = width <= WIDEST and 3 * heads * width * tokens < LARGEST
    return small and width % BITS_PER_BYTE == 0 and count > 0 and qkv.is_contiguous()


def packed_attention(
    qkv: Tensor,
    weights: IntegerGrid,
    scaling: float,
    parts: tuple[IntegerGrid, IntegerGrid, IntegerGrid] | None = None,
    result: IntegerGrid | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Softmax(scaling * q k^T), quantized to `weights`, times v, (B, T, H, D), contiguous; `qkv` `packed_fits`.

    `parts`: grids of q, k and v, with the same integers, `result`: of the result; None = not quantized.
    """
    if tiles is None:
        tiles = default_tiles(qkv.shape[1], qkv.shape[1], qkv.shape[4], qkv.dtype)
    q_amax, k_amax, v_amax = [None] * 3 if parts is None else [part.amax for part in parts]
    bounds = (0, 0) if parts is None else (parts[0].low, parts[0].high)
    out_amax, *out_bounds = (None, 0, 0) if result is None else result[:3]
    ranges = (weights.amax, q_amax, k_amax, v_amax, out_amax)
    numbers = (scaling, weights.high, *bounds, *out_bounds)
    return _PackedAttention.apply(qkv, *ranges, *numbers, *flat(tiles))


class _PackedAttention(torch.autograd.Function):
    """Keeps its input, a bit for each quantized element, and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        amax: Tensor,
        q_amax: Tensor | None,
        k_amax: Tensor | None,
        v_amax: Tensor | None,
        out_amax: Tensor | None,
        scaling: float,
        high: int,
        part_low: int,
        part_high: int,
        out_low: int,
        out_high: int,
        *tiles: Any,
    ) -> Tensor:
        batch, tokens, _, heads, width = qkv.shape
        bits: list[Tensor] = []
        if q_amax is not None and k_amax is not None and v_amax is not None:
            qkv, part_bits = _quantized_parts(qkv, (q_amax, k_amax, v_amax), part_low, part_high)
            bits.append(part_bits)
        ctx.rounded = (q_amax is not None, out_amax is not None)
        out = torch.empty((batch, tokens, heads, width), dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty((batch, heads, room_for(tokens)), dtype=torch.float32, device=qkv.device)
        rounded = None
        if out_amax is not None:
            bits.append(torch.empty(out.numel() // BITS_PER_BYTE, dtype=torch.uint8, device=qkv.device))
            rounded = (out_amax, bits[-1])
        ctx.numbers, ctx.tiles = (scaling, high), tiles[5:]
        tensors = (qkv, qkv, qkv, amax, out, sums)
        run_forward(tensors, _packed_layout(qkv), ctx.numbers, AttentionTile(*tiles[:5]), (out_low, out_high), rounded)
        ctx.save_for_backward(qkv, amax, sums, *bits)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        qkv, amax, sums, *found = ctx.saved_tensors
        bits, out_bits = [found[i] if there else None for i, there in zip((0, -1), ctx.rounded, strict=True)]
        grads = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        tensors = (qkv, qkv, qkv, amax, sums, grad.contiguous())
        run_backward(tensors, grads, _packed_layout(qkv), ctx.numbers, ctx.tiles, bits, out_bits)
        return grads, *(None,) * 26


def _quantized_parts(qkv: Tensor, ranges: tuple[Tensor, Tensor, Tensor], low: int, high: int) -> tuple[Tensor, Tensor]:
    """(q, k and v quantized, a bit for each element: 0 where it saturated)."""
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    bits = torch.empty(qkv.numel() // BITS_PER_BYTE, dtype=torch.uint8, device=qkv.device)
    rows = qkv.shape[0] * qkv.shape[1]
    groups = qkv.shape[3] * qkv.shape[4] // BITS_PER_BYTE
    row_tile, group_tile = _ROUND_TILE
    strips = -(-groups // group_tile)
    launch(
        round_kernel,
        (-(-rows // (row_tile * _ROUND_TILES)), 3 * strips),
        (qkv, *ranges, out, bits),
        (rows, groups, strips, _ROUND_TILES, rounding_threshold(low), float(low), float(high), row_tile, group_tile),
        num_warps=_ROUND_WARPS,
    )
    return out, bits


def _packed_layout(qkv: Tensor) -> HeadLayout:
    batch, tokens, _, heads, width = qkv.shape
    part = heads * width
    starts = (part, 2 * part)
    return HeadLayout(batch * heads, tokens, tokens, heads, 3 * part, 3 * part, part, *starts, *starts, width, width)


_WINDOW_MOST = 64  # tokens of a window, and width of a head
_PROGRAMS = 2112  # about


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
    qkv_ptr,
    table_ptr,
    mask_ptr,
    amax_ptr,
    q_amax_ptr,
    k_amax_ptr,
    v_amax_ptr,
    out_amax_ptr,
    out_ptr,
    count,
    masks,
    tokens,
    heads,
    steps,
    factor,
    high,
    low,
    most,
    out_low,
    out_high,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compute the quantized results of a head of some windows.

    MASKED: a second table, of the window modulo `masks`. A program's windows share theirs: to load it for each window
    was 2.9 times as slow (8,192 windows of 49 tokens, 64 masks, an H200).
    """
    factor = tl.cast(factor, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    low = tl.cast(low, tl.float32)
    most = tl.cast(most, tl.float32)
    out_low = tl.cast(out_low, tl.float32)
    out_high = tl.cast(out_high, tl.float32)
    head = tl.program_id(0)
    table = _table(table_ptr + head * tokens * tokens, tokens, ROWS)
    out_scale, out_reciprocal = step_of(tl.load(out_amax_ptr), out_high)
    part, mask = tl.program_id(1) // masks, tl.program_id(1) % masks
    if MASKED:
        table += _table(mask_ptr + mask * tokens * tokens, tokens, ROWS)
    for index in range(part * steps, tl.minimum((part + 1) * steps, (count - mask + masks - 1) // masks)):
        window = index * masks + mask
        start = qkv_ptr + tl.cast(window, tl.int64) * tokens * (3 * heads * WIDE) + head * WIDE
        q, _ = _rounded(start, q_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        k, _ = _rounded(start + heads * WIDE, k_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        v, _ = _rounded(start + 2 * heads * WIDE, v_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        _, _, total = _attend(q, k, v, table, amax_ptr, factor, high)
        found = steps_of(total, float("-inf"), float("inf"), out_scale, out_reciprocal)
        found = on_grid(found, out_low, out_high) * out_scale
        to = out_ptr + tl.cast(window, tl.int64) * tokens * (heads * WIDE) + head * WIDE
        _put(to, found, 0, tokens, heads * WIDE, WIDE, ROWS, PADDED)


@triton.jit
def window_gradient_kernel(
    qkv_ptr,
    table_ptr,
    mask_ptr,
    amax_ptr,
    q_amax_ptr,
    k_amax_ptr,
    v_amax_ptr,
    out_amax_ptr,
    grad_ptr,
    out_ptr,
    sums_ptr,
    count,
    masks,
    tokens,
    heads,
    steps,
    factor,
    high,
    low,
    most,
    out_low,
    out_high,
    least,
    out_least,
    scaling,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
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
    part, mask = tl.program_id(1) // masks, tl.program_id(1) % masks
    if MASKED:
        table += _table(mask_ptr + mask * tokens * tokens, tokens, ROWS)
    for index in range(part * steps, tl.minimum((part + 1) * steps, (count - mask + masks - 1) // masks)):
        window = index * masks + mask
        at = tl.cast(window, tl.int64) * tokens * (3 * heads * WIDE) + head * WIDE
        start = qkv_ptr + at
        q, q_steps = _rounded(start, q_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        start += heads * WIDE
        k, k_steps = _rounded(start, k_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        start += heads * WIDE
        v, v_steps = _rounded(start, v_amax_ptr, tokens, 3 * heads * WIDE, low, most, WIDE, ROWS, PADDED)
        p, found, total = _attend(q, k, v, table, amax_ptr, factor, high)
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
    """As `packed_fits`, of at most 64 tokens and 64 columns; in float32 32 of each, for shared memory."""
    most = _WINDOW_MOST if qkv.dtype.itemsize == 2 else _WINDOW_MOST // 2
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
    - `mask`: of W * T * T elements, where window b has the part b modulo W; it gets no gradient.
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
        grid, sizes, constants = _window_sizes(tensors[0], tensors[2], ctx.kept)
        launch(window_kernel, grid, (*tensors, out), (*sizes, *ctx.numbers[0], *constants), num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        tensors = ctx.saved_tensors
        qkv, table = tensors[0], tensors[1]
        grid, sizes, constants = _window_sizes(qkv, tensors[2], ctx.kept)
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


def _window_sizes(qkv: Tensor, mask: Tensor, masked: bool) -> tuple[tuple[int, int], tuple[int, ...], tuple[Any, ...]]:
    batch, tokens, _, heads, width = qkv.shape
    masks = mask.numel() // (tokens * tokens) if masked else 1
    of_mask = -(-batch // masks)
    steps = -(-of_mask // max(1, _PROGRAMS // (heads * masks)))
    rows, padded = (max(16, 1 << (size - 1).bit_length()) for size in (tokens, width))
    grid = (heads, -(-of_mask // steps) * masks)
    return grid, (batch, masks, tokens, heads, steps), (width, masked, rows, padded)
