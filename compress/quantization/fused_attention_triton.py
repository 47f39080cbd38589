"""Triton kernels of `fused_attention`: softmax(s q k^T), rounded to a quantizer's grid, times v; no score is written.

A program takes a block of queries of one head. A probability must be whole before it is rounded, so the sum of a row is
known before the first is: either one block holds all keys (up to 256), or the keys are gone through twice, first for
the maximum and the sum (Milakov and Gimelshein, arXiv 1805.02867), then for the products. For backward it keeps q, k, v
and a number a row, the logarithm of its sum, and computes the probabilities again (Dao et al., "FlashAttention", arXiv
2205.14135, section 3 and appendix B).

The gradient of a row's softmax needs sum(dP * P) of the row. Flash attention takes it from the output, sum(dO * O).
With rounding between P and O they are not the same, so the kernel of dq computes it, and that of dk and dv reads it.

The second product is one of integers, which half precision holds exactly up to 256; their step is applied to the sum.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.errors import QuantizationError
from compress.quantization.fused_attention import WIDEST
from compress.quantization.launch import launch
from compress.quantization.rounding_triton import divide, on_grid

_LARGEST = 2**31  # numbers of a head that 32 bits count
_LOG2_E = math.log2(math.e)


@triton.jit
def _rows(ptr, first, count, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a (count, WIDE) matrix from `first` on, zeros around them."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    there = (row < count)[:, None]
    if PADDED > WIDE:
        there = there & (column < WIDE)[None, :]
    return tl.load(ptr + row[:, None] * WIDE + column[None, :], mask=there, other=0.0)


@triton.jit
def _put(ptr, value, first, count, WIDE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The reverse of `_rows`."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    there = (row < count)[:, None]
    if PADDED > WIDE:
        there = there & (column < WIDE)[None, :]
    tl.store(ptr + row[:, None] * WIDE + column[None, :], value.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def _scores(q, k, first, keys, factor, COLUMNS: tl.constexpr):
    """Products of queries and keys, as powers of two; minus infinity for columns behind the last key."""
    inside = first + tl.arange(0, COLUMNS) < keys
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    return tl.where(inside[None, :], x, float("-inf"))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, amax_ptr, out_ptr, sums_ptr,
    tokens, keys, blocks, factor, low, high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of the result, and the logarithms (to the base of two) of the sums of its rows.

    WHOLE: one block of columns holds all keys.
    """
    factor = tl.cast(factor, tl.float32)  # the compiler of torch.compile hands Python's numbers over in float64
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_row = tl.program_id(0) % blocks * ROWS
    k_ptr += head * keys * DEEP
    v_ptr += head * keys * WIDE
    scale = tl.div_rn(tl.load(amax_ptr).to(tl.float32), high)
    reciprocal = tl.div_rn(1.0, scale)
    q = _rows(q_ptr + head * tokens * DEEP, first_row, tokens, DEEP, ROWS, DEPTH)
    if WHOLE:
        x = _scores(q, _rows(k_ptr, 0, keys, DEEP, COLUMNS, DEPTH), 0, keys, factor, COLUMNS)
        most = tl.max(x, axis=1)
        logs = most + tl.log2(tl.sum(tl.exp2(x - most[:, None]), axis=1))
        steps = divide(tl.exp2(x - logs[:, None]), scale, reciprocal)
        v = _rows(v_ptr, 0, keys, WIDE, COLUMNS, WIDTH)
        total = tl.dot(on_grid(steps, low, high).to(v.dtype), v, input_precision="ieee")
    else:
        most = tl.full([ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            x = _scores(q, _rows(k_ptr, first, keys, DEEP, COLUMNS, DEPTH), first, keys, factor, COLUMNS)
            higher = tl.maximum(most, tl.max(x, axis=1))
            sums = sums * tl.exp2(most - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
            most = higher
        logs = most + tl.log2(sums)
        total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            x = _scores(q, _rows(k_ptr, first, keys, DEEP, COLUMNS, DEPTH), first, keys, factor, COLUMNS)
            steps = divide(tl.exp2(x - logs[:, None]), scale, reciprocal)
            v = _rows(v_ptr, first, keys, WIDE, COLUMNS, WIDTH)
            total = tl.dot(on_grid(steps, low, high).to(v.dtype), v, total, input_precision="ieee")
    _put(out_ptr + head * tokens * WIDE, total * scale, first_row, tokens, WIDE, ROWS, WIDTH)
    row = first_row + tl.arange(0, ROWS)
    tl.store(sums_ptr + head * tokens + row, logs, mask=row < tokens)


@triton.jit
def _grads(q, grad, k, v, logs, first, keys, factor, scale, reciprocal, high, COLUMNS: tl.constexpr):
    """(the probabilities of a block, their gradients, 0 where the rounding saturated)."""
    p = tl.exp2(_scores(q, k, first, keys, factor, COLUMNS) - logs[:, None])
    passed = tl.dot(grad, tl.trans(v), input_precision="ieee")
    return p, tl.where(divide(p, scale, reciprocal) < high + 0.5, passed, 0.0)  # none is below 0, the least integer


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, amax_ptr, out_ptr, deltas_ptr,
    tokens, keys, blocks, factor, scaling, high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of q, and sum(dP * P) of its rows. WHOLE: as in `forward_kernel`."""
    factor = tl.cast(factor, tl.float32)
    scaling = tl.cast(scaling, tl.float32)
    high = tl.cast(high, tl.float32)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_row = tl.program_id(0) % blocks * ROWS
    k_ptr += head * keys * DEEP
    v_ptr += head * keys * WIDE
    scale = tl.div_rn(tl.load(amax_ptr).to(tl.float32), high)
    reciprocal = tl.div_rn(1.0, scale)
    q = _rows(q_ptr + head * tokens * DEEP, first_row, tokens, DEEP, ROWS, DEPTH)
    grad = _rows(grad_ptr + head * tokens * WIDE, first_row, tokens, WIDE, ROWS, WIDTH)
    row = first_row + tl.arange(0, ROWS)
    logs = tl.load(sums_ptr + head * tokens + row, mask=row < tokens, other=0.0)
    if WHOLE:
        k = _rows(k_ptr, 0, keys, DEEP, COLUMNS, DEPTH)
        v = _rows(v_ptr, 0, keys, WIDE, COLUMNS, WIDTH)
        p, passed = _grads(q, grad, k, v, logs, 0, keys, factor, scale, reciprocal, high, COLUMNS)
        deltas = tl.sum(p * passed, axis=1)
        total = tl.dot((p * (passed - deltas[:, None])).to(k.dtype), k, input_precision="ieee")
    else:
        deltas = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            k = _rows(k_ptr, first, keys, DEEP, COLUMNS, DEPTH)
            v = _rows(v_ptr, first, keys, WIDE, COLUMNS, WIDTH)
            p, passed = _grads(q, grad, k, v, logs, first, keys, factor, scale, reciprocal, high, COLUMNS)
            deltas += tl.sum(p * passed, axis=1)
        total = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        for first in range(0, keys, COLUMNS):
            k = _rows(k_ptr, first, keys, DEEP, COLUMNS, DEPTH)
            v = _rows(v_ptr, first, keys, WIDE, COLUMNS, WIDTH)
            p, passed = _grads(q, grad, k, v, logs, first, keys, factor, scale, reciprocal, high, COLUMNS)
            total = tl.dot((p * (passed - deltas[:, None])).to(k.dtype), k, total, input_precision="ieee")
    _put(out_ptr + head * tokens * DEEP, total * scaling, first_row, tokens, DEEP, ROWS, DEPTH)
    tl.store(deltas_ptr + head * tokens + row, deltas, mask=row < tokens)


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, deltas_ptr, amax_ptr, k_out_ptr, v_out_ptr,
    tokens, keys, blocks, factor, scaling, low, high,
    DEEP: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of the gradients of k and of v. Rows are keys, so that no product needs what was computed, transposed.

    What stands behind the last key or the last query is never stored, or meets a gradient of zero.
    """
    factor = tl.cast(factor, tl.float32)
    scaling = tl.cast(scaling, tl.float32)
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_key = tl.program_id(0) % blocks * ROWS
    q_ptr += head * tokens * DEEP
    grad_ptr += head * tokens * WIDE
    sums_ptr += head * tokens
    deltas_ptr += head * tokens
    scale = tl.div_rn(tl.load(amax_ptr).to(tl.float32), high)
    reciprocal = tl.div_rn(1.0, scale)
    k = _rows(k_ptr + head * keys * DEEP, first_key, keys, DEEP, ROWS, DEPTH)
    v = _rows(v_ptr + head * keys * WIDE, first_key, keys, WIDE, ROWS, WIDTH)
    k_total = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    v_total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for first in range(0, tokens, COLUMNS):
        q = _rows(q_ptr, first, tokens, DEEP, COLUMNS, DEPTH)
        grad = _rows(grad_ptr, first, tokens, WIDE, COLUMNS, WIDTH)
        query = first + tl.arange(0, COLUMNS)
        logs = tl.load(sums_ptr + query, mask=query < tokens, other=0.0)
        deltas = tl.load(deltas_ptr + query, mask=query < tokens, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * factor - logs[None, :])
        steps = divide(p, scale, reciprocal)
        v_total = tl.dot(on_grid(steps, low, high).to(grad.dtype), grad, v_total, input_precision="ieee")
        passed = tl.dot(v, tl.trans(grad), input_precision="ieee")
        passed = tl.where(steps < high + 0.5, passed, 0.0)
        k_total = tl.dot((p * (passed - deltas[None, :])).to(q.dtype), q, k_total, input_precision="ieee")
    _put(k_out_ptr + head * keys * DEEP, k_total * scaling, first_key, keys, DEEP, ROWS, DEPTH)
    _put(v_out_ptr + head * keys * WIDE, v_total * scale, first_key, keys, WIDE, ROWS, WIDTH)


class Tile(NamedTuple):
    """What a program of a kernel holds at a time, and how it runs.

    Attributes:
        rows: of the result: queries, and keys in `keys_kernel`.
        columns: of the scores: keys, and queries in `keys_kernel`.
        whole: one block of columns holds all.
        warps: of a program.
        stages: blocks of columns whose loads are on their way at a time.
    """

    rows: int
    columns: int
    whole: bool
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One for each kernel."""

    forward: Tile
    queries: Tile
    keys: Tile


def default_tiles(tokens: int, keys: int, width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for heads of `tokens` queries and `keys` keys, of at most `width` numbers each; not measured.

    Chosen by what compiled kernels need on an H100's multiprocessor: none of them spills registers in half precision
    at up to 64 numbers. 64 rows are what a warp group multiplies at once; float32 is not multiplied by tensor cores.
    """
    half = dtype.itemsize == 2
    most = 64 if half and width <= 128 else 32 if half or width <= 64 else 16
    rows, columns = (min(most, _padded(count)) for count in (tokens, keys))
    whole = keys <= (256 if half and width <= 64 else columns)
    if whole:
        columns = _padded(keys)
    forward = Tile(rows, columns, whole, 4, 2)
    queries = forward if columns <= 128 else Tile(min(rows, 32), columns, True, 8, 2)
    step = min(most, 32 if half else 16, _padded(tokens))
    return Tiles(forward, queries, Tile(min(most, _padded(keys)), step, False, 4, 2))


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether types and shapes are those of the kernels: (..., T, D), (..., S, D), (..., S, E)."""
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    shaped = q.dim() >= 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not alike or not shaped or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    widest = max(q.shape[-1], v.shape[-1])
    longest = max(q.shape[-2], k.shape[-2])
    return widest <= WIDEST and widest * longest < _LARGEST and min(q.numel(), k.numel(), v.numel()) > 0


def attention(
    q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float, low: int, high: int, tiles: Tiles | None = None
) -> Tensor:
    """fake_quantize(softmax(scaling * q k^T)) v of what `fits`; (..., T, E), contiguous.

    Args:
        q: (..., T, D).
        k: (..., S, D).
        v: (..., S, E).
        amax: (), the range of the probabilities; one step is amax / high.
        scaling: what the scores are multiplied by.
        low: smallest integer, 0 or less.
        high: largest one: odd, at most 255.
        tiles: None = `default_tiles`.
    """
    if tiles is None:
        tiles = default_tiles(q.shape[-2], k.shape[-2], max(q.shape[-1], v.shape[-1]), q.dtype)
    flat = tuple(number for tile in tiles for number in tile)
    return cast(Tensor, _Attention.apply(q, k, v, amax, scaling, low, high, *flat))


class _Attention(torch.autograd.Function):
    """Keeps its inputs and a number a row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float, low: int, high: int, *tiles: Any
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        tile = Tile(*tiles[:5])
        (tokens, keys), sizes = _counts(q, k), _sizes(q, v)
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        blocks = -(-tokens // tile.rows)
        launch(
            forward_kernel,
            (blocks * _heads(q),),
            (q, k, v, amax, out, sums),
            (tokens, keys, blocks, scaling * _LOG2_E, float(low), float(high), *sizes,
             tile.whole, tile.rows, tile.columns),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, sums, amax)
        ctx.numbers = (scaling, low, high)
        ctx.tiles = tiles[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and grad.requires_grad:
            raise QuantizationError(
                "our Triton kernels have no second derivative; for one, fuse with kernels='torch' (fuse_for_training)"
            )
        q, k, v, sums, amax = ctx.saved_tensors
        scaling, low, high = ctx.numbers
        by_queries, by_keys = Tile(*ctx.tiles[:5]), Tile(*ctx.tiles[5:])
        grad = grad.contiguous()
        (tokens, keys), sizes = _counts(q, k), _sizes(q, v)
        q_grad, k_grad, v_grad = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        deltas = torch.empty(sums.shape, dtype=torch.float32, device=q.device)
        blocks = -(-tokens // by_queries.rows)
        launch(
            queries_kernel,
            (blocks * _heads(q),),
            (q, k, v, grad, sums, amax, q_grad, deltas),
            (tokens, keys, blocks, scaling * _LOG2_E, scaling, float(high), *sizes,
             by_queries.whole, by_queries.rows, by_queries.columns),
            num_warps=by_queries.warps, num_stages=by_queries.stages,
        )  # fmt: skip
        blocks = -(-keys // by_keys.rows)
        launch(
            keys_kernel,
            (blocks * _heads(q),),
            (q, k, v, grad, sums, deltas, amax, k_grad, v_grad),
            (tokens, keys, blocks, scaling * _LOG2_E, scaling, float(low), float(high), *sizes,
             by_keys.rows, by_keys.columns),
            num_warps=by_keys.warps, num_stages=by_keys.stages,
        )  # fmt: skip
        return q_grad, k_grad, v_grad, *(None,) * 19


def _heads(q: Tensor) -> int:
    return q.numel() // (q.shape[-2] * q.shape[-1])


def _counts(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many queries and keys a head has."""
    return q.shape[-2], k.shape[-2]


def _sizes(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """DEEP, WIDE, DEPTH and WIDTH of the kernels."""
    deep, wide = q.shape[-1], v.shape[-1]
    return deep, wide, _padded(deep), _padded(wide)


def _padded(count: int) -> int:
    """The next power of two, 16 or more, as tensor cores want it; `count` may be the compiler's symbol of a size."""
    size = 16
    while size < count:
        size *= 2
    return size
