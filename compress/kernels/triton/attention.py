"""The kernels of attention with quantized probabilities: softmax(s q k^T), quantized, times v; no score is stored."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from compress.kernels.triton.fake_quantize import below, on_grid, step_of, steps_of
from compress.kernels.triton.language import tl, triton


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
    q_ptr, k_ptr, v_ptr, amax_ptr, out_amax_ptr, out_ptr, sums_ptr, out_bits_ptr,
    tokens, padded, keys, blocks, heads, row, v_row, out_row, k_at, v_at, factor, high, out_least, out_low, out_high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    p = tl.exp2(tl.minimum(_scores(q, k, factor) - logs[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
    passed = tl.dot(grad, tl.trans(v), input_precision="ieee")
    return p, tl.where(p < limit, passed, 0.0)  # none is below 0, the least integer


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, amax_ptr, bits_ptr, grad_bits_ptr, out_ptr, deltas_ptr, passed_ptr,
    tokens, padded, keys, blocks, heads, row, v_row, out_row, k_at, v_at, factor, scaling, high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    ROUNDED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    logs = tl.load(sums_ptr + sums_at, mask=query < tokens, other=0.0)
    if WHOLE:
        k = _rows(k_ptr, 0, keys, row, DEEP, COLUMNS, DEPTH)
        v = _rows(v_ptr, 0, keys, v_row, WIDE, COLUMNS, WIDTH)
        p, passed = _grads(q, grad, k, v, logs, factor, limit)
        deltas = tl.sum(p * passed, axis=1)
        total = tl.dot((p * (passed - deltas[:, None])).to(k.dtype), k, input_precision="ieee")
    else:
        deltas = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            k = _rows(k_ptr, first, keys, row, DEEP, COLUMNS, DEPTH)
            v = _rows(v_ptr, first, keys, v_row, WIDE, COLUMNS, WIDTH)
            p, passed = _grads(q, grad, k, v, logs, factor, limit)
            deltas += tl.sum(p * passed, axis=1)
        total = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            k = _rows(k_ptr, first, keys, row, DEEP, COLUMNS, DEPTH)
            v = _rows(v_ptr, first, keys, v_row, WIDE, COLUMNS, WIDTH)
            p, passed = _grads(q, grad, k, v, logs, factor, limit)
            total = tl.dot((p * (passed - deltas[:, None])).to(k.dtype), k, total, input_precision="ieee")
    start = batch * tokens * row + head * DEEP
    total *= scaling
    if MASKED:
        total = _masked(total, bits_ptr + start // 8, first_row, tokens, row, DEEP, ROWS, DEPTH)
    _put(out_ptr + start, total, first_row, tokens, row, DEEP, ROWS, DEPTH)
    tl.store(deltas_ptr + sums_at, deltas, mask=query < tokens)


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, deltas_ptr, amax_ptr, bits_ptr, out_ptr,
    tokens, padded, keys, blocks, heads, row, v_row, out_row, k_at, v_at, k_to, v_to, factor, scaling, high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
