"""Launches of the attention kernels: tiles and memory layouts; attention of separate q, k and v tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import rounding_threshold
from compress.kernels.triton.attention import forward_kernel, keys_kernel, queries_kernel
from compress.kernels.triton.launch import launch, refuse_second_derivative

WIDEST = 256
"""Largest width of a query or of a value."""
LARGEST = 2**31
"""Elements of a head, or of the rows of a batch: indices have 32 bits."""
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
        total: heads, of all batches.
        tokens, keys: of a head.
        heads: side by side in a row.
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
    """Return tiles for heads of `tokens` queries and `keys` keys, at most `width` wide."""
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
    """Return fake_quantize(softmax(scaling * q k^T)) v, (..., T, E), contiguous.

    - `q`, `k`, `v`: (..., T, D), (..., S, D), (..., S, E), for which `fits`.
    - `amax`: (), the range of the probabilities; one step is amax / high.
    - `high`: odd, at most 255.
    - `tiles`: None = `default_tiles`.
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
