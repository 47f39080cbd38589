"""Launches of the kernels of `fused_attention_triton`: their tiles, how heads lie in memory, and the two operations.

`attention` takes queries, keys and values apart, each head behind the other. `packed_attention` takes them as a linear
layer writes them, side by side in the rows of one matrix, and returns one gradient laid out like it: nothing is copied.
It rounds them too, in one pass over that matrix. The attention's kernels do not: each of their programs reads the keys
and values of a whole head, so they would be rounded once for every block of queries, in more instructions than one
pass over memory takes. The gradients are masked where they are written, by the bits of that pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from compress.quantization.fused_attention import WIDEST
from compress.quantization.fused_attention_triton import forward_kernel, keys_kernel, queries_kernel, round_kernel
from compress.quantization.fused_ops import BITS, least_kept, refuse_second_derivative
from compress.quantization.launch import launch

_LARGEST = 2**31  # numbers of a head, or of a batch's rows, that 32 bits count
_LOG2_E = math.log2(math.e)
_ROUNDED = (16, 16)  # rows, and groups of eight columns, of a tile of `round_kernel`


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


class Layout(NamedTuple):
    """Sizes of heads, and how they lie, in numbers; arguments of the kernels.

    Attributes:
        total: heads, of all batches.
        tokens, keys: of a head.
        heads: side by side in a row.
        row, v_row, out_row: from one row of q and k, of v, of the result to the next.
        k_at, v_at: from q to k and v; 0 where they are tensors of their own.
        k_to, v_to: from the gradient of q to those of k and v.
        deep, wide: numbers of a query and of a value.
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


def packed_fits(qkv: Tensor) -> bool:
    """Whether q, k and v lie as `packed_attention` takes them: (B, T, 3, H, D), D in eights, without gaps."""
    if qkv.dim() != 5 or qkv.shape[2] != 3 or qkv.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    (_, tokens, _, heads, width), count = qkv.shape, qkv.numel()
    small = width <= WIDEST and 3 * heads * width * tokens < _LARGEST
    return small and width % BITS == 0 and count > 0 and qkv.is_contiguous()


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
    return cast(Tensor, _Attention.apply(q, k, v, amax, scaling, low, high, *_flat(tiles)))


def packed_attention(
    qkv: Tensor,
    amax: Tensor,
    scaling: float,
    low: int,
    high: int,
    ranges: tuple[Tensor, Tensor, Tensor] | None = None,
    bounds: tuple[int, int] = (0, 0),
    tiles: Tiles | None = None,
) -> Tensor:
    """`attention` of queries, keys and values that lie side by side, which `packed_fits`; (B, T, H, D), contiguous.

    Args:
        qkv: (B, T, 3, H, D).
        amax: (), the range of the probabilities; one step is amax / high.
        scaling: what the scores are multiplied by.
        low: smallest integer of a probability, 0 or less.
        high: largest one: odd, at most 255.
        ranges: amax of q, of k and of v, each (), by which they are rounded before; None = they are not.
        bounds: smallest and largest integer of that rounding; the largest is odd.
        tiles: None = `default_tiles`.
    """
    if tiles is None:
        tiles = default_tiles(qkv.shape[1], qkv.shape[1], qkv.shape[4], qkv.dtype)
    q_amax, k_amax, v_amax = ranges or (None, None, None)
    numbers = (scaling, low, high, *bounds, *_flat(tiles))
    return cast(Tensor, _PackedAttention.apply(qkv, amax, q_amax, k_amax, v_amax, *numbers))


class _Attention(torch.autograd.Function):
    """Keeps its inputs and a number a row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float, low: int, high: int, *tiles: Any
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        _run_forward((q, k, v, amax, out, sums), _apart(q, k, v), (scaling, low, high), Tile(*tiles[:5]))
        ctx.save_for_backward(q, k, v, sums, amax)
        ctx.numbers, ctx.tiles = (scaling, low, high), tiles[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        q, k, v, sums, amax = ctx.saved_tensors
        layout = _apart(q, k, v)
        grads = torch.empty(q.numel() + k.numel() + v.numel(), dtype=q.dtype, device=q.device)
        _run_backward((q, k, v, grad.contiguous(), sums), amax, None, grads, layout, ctx.numbers, ctx.tiles)
        q_grad, k_grad, v_grad = grads.split([q.numel(), k.numel(), v.numel()])
        return q_grad.view(q.shape), k_grad.view(k.shape), v_grad.view(v.shape), *(None,) * 19


class _PackedAttention(torch.autograd.Function):
    """Keeps its input, or that rounded and a bit for each number; and a number a row."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        amax: Tensor,
        q_amax: Tensor | None,
        k_amax: Tensor | None,
        v_amax: Tensor | None,
        scaling: float,
        low: int,
        high: int,
        least: int,
        most: int,
        *tiles: Any,
    ) -> Tensor:
        batch, tokens, _, heads, width = qkv.shape
        bits: list[Tensor] = []
        if q_amax is not None and k_amax is not None and v_amax is not None:
            qkv, *bits = _rounded(qkv, (q_amax, k_amax, v_amax), least, most)
        out = torch.empty((batch, tokens, heads, width), dtype=qkv.dtype, device=qkv.device)
        sums = torch.empty((batch, heads, tokens), dtype=torch.float32, device=qkv.device)
        _run_forward((qkv, qkv, qkv, amax, out, sums), _packed(qkv), (scaling, low, high), Tile(*tiles[:5]))
        ctx.save_for_backward(qkv, sums, amax, *bits)
        ctx.numbers, ctx.tiles = (scaling, low, high), tiles[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        qkv, sums, amax, *bits = ctx.saved_tensors
        grads = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        tensors = (qkv, qkv, qkv, grad.contiguous(), sums)
        _run_backward(tensors, amax, bits[0] if bits else None, grads, _packed(qkv), ctx.numbers, ctx.tiles)
        return grads, *(None,) * 24


def _run_forward(tensors: tuple[Tensor, ...], layout: Layout, numbers: tuple[float, int, int], tile: Tile) -> None:
    """Write the result and the logarithms of the sums, the last two of `tensors`."""
    scaling, low, high = numbers
    blocks = -(-layout.tokens // tile.rows)
    launch(
        forward_kernel,
        (blocks * layout.total,),
        tensors,
        (layout.tokens, layout.keys, blocks, *layout[3:9], scaling * _LOG2_E, float(low), float(high),
         *_sizes(layout), tile.whole, tile.rows, tile.columns),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _run_backward(
    tensors: tuple[Tensor, ...],
    amax: Tensor,
    bits: Tensor | None,
    grads: Tensor,
    layout: Layout,
    numbers: tuple[float, int, int],
    tiles: tuple[Any, ...],
) -> None:
    """Write the gradients of q, k and v, masked by `bits` if there are any; `tensors` are q, k, v, grad and sums."""
    scaling, low, high = numbers
    by_queries, by_keys = Tile(*tiles[:5]), Tile(*tiles[5:])
    sizes = (*_sizes(layout), bits is not None)
    masks = amax if bits is None else bits
    deltas = torch.empty(tensors[4].shape, dtype=torch.float32, device=grads.device)
    blocks = -(-layout.tokens // by_queries.rows)
    launch(
        queries_kernel,
        (blocks * layout.total,),
        (*tensors, amax, masks, grads, deltas),
        (layout.tokens, layout.keys, blocks, *layout[3:9], scaling * _LOG2_E, scaling, float(high), *sizes,
         by_queries.whole, by_queries.rows, by_queries.columns),
        num_warps=by_queries.warps, num_stages=by_queries.stages,
    )  # fmt: skip
    blocks = -(-layout.keys // by_keys.rows)
    launch(
        keys_kernel,
        (blocks * layout.total,),
        (*tensors, deltas, amax, masks, grads),
        (layout.tokens, layout.keys, blocks, *layout[3:11], scaling * _LOG2_E, scaling, float(low), float(high), *sizes,
         by_keys.rows, by_keys.columns),
        num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip


def _rounded(qkv: Tensor, ranges: tuple[Tensor, Tensor, Tensor], low: int, high: int) -> tuple[Tensor, Tensor]:
    """(q, k and v rounded, a bit for each number: 0 where it saturated)."""
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    bits = torch.empty(qkv.numel() // BITS, dtype=torch.uint8, device=qkv.device)
    rows = qkv.shape[0] * qkv.shape[1]
    groups = qkv.shape[3] * qkv.shape[4] // BITS
    row_tile, group_tile = _ROUNDED
    strips = -(-groups // group_tile)
    launch(
        round_kernel,
        (-(-rows // row_tile), 3 * strips),
        (qkv, *ranges, out, bits),
        (rows, groups, strips, least_kept(low), float(low), float(high), row_tile, group_tile),
    )
    return out, bits


def _apart(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """Of three contiguous tensors."""
    deep, wide = q.shape[-1], v.shape[-1]
    total = q.numel() // (q.shape[-2] * deep)
    ends = (q.numel(), q.numel() + k.numel())
    return Layout(total, q.shape[-2], k.shape[-2], 1, deep, wide, wide, 0, 0, *ends, deep, wide)


def _packed(qkv: Tensor) -> Layout:
    """Of (B, T, 3, H, D)."""
    batch, tokens, _, heads, width = qkv.shape
    part = heads * width
    starts = (part, 2 * part)
    return Layout(batch * heads, tokens, tokens, heads, 3 * part, 3 * part, part, *starts, *starts, width, width)


def _sizes(layout: Layout) -> tuple[int, int, int, int]:
    """DEEP, WIDE, DEPTH and WIDTH of the kernels."""
    return layout.deep, layout.wide, _padded(layout.deep), _padded(layout.wide)


def _flat(tiles: Tiles) -> tuple[Any, ...]:
    return tuple(number for tile in tiles for number in tile)


def _padded(count: int) -> int:
    """The next power of two, 16 or more, as tensor cores want it; `count` may be the compiler's symbol of a size."""
    size = 16
    while size < count:
        size *= 2
    return size
