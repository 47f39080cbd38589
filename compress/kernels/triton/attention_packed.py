"""Attention of queries, keys and values that lie side by side in the rows of one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.epilogue import IntegerGrid, rounding_threshold
from compress.kernels.memory_format import BITS_PER_BYTE
from compress.kernels.triton.attention import round_kernel
from compress.kernels.triton.attention_launch import (
    LARGEST,
    WIDEST,
    AttentionTile,
    AttentionTiles,
    HeadLayout,
    default_tiles,
    flat,
    room_for,
    run_backward,
    run_forward,
)
from compress.kernels.triton.launch import launch, refuse_second_derivative

_TILE = (16, 16)  # rows, and groups of eight columns, of `round_kernel`
_TILES = 8  # of a program of it
_WARPS = 2


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
    """Softmax(scaling * q k^T), quantized, times v, (B, T, H, D), contiguous; `qkv` `packed_fits`.

    - `qkv`: (B, T, 3, H, D).
    - `weights`: of the probabilities; their smallest integer is 0 or less.
    - `parts`: of q, k and v, with the same integers; None = they are not quantized.
    - `result`: None = it is not quantized.
    - `tiles`: None = `default_tiles`.
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
            qkv, part_bits = _rounded(qkv, (q_amax, k_amax, v_amax), part_low, part_high)
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
        run_forward(tensors, _layout(qkv), ctx.numbers, AttentionTile(*tiles[:5]), (out_low, out_high), rounded)
        ctx.save_for_backward(qkv, amax, sums, *bits)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        qkv, amax, sums, *found = ctx.saved_tensors
        bits, out_bits = [found[i] if there else None for i, there in zip((0, -1), ctx.rounded, strict=True)]
        grads = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        tensors = (qkv, qkv, qkv, amax, sums, grad.contiguous())
        run_backward(tensors, grads, _layout(qkv), ctx.numbers, ctx.tiles, bits, out_bits)
        return grads, *(None,) * 26


def _rounded(qkv: Tensor, ranges: tuple[Tensor, Tensor, Tensor], low: int, high: int) -> tuple[Tensor, Tensor]:
    """(q, k and v quantized, a bit for each element: 0 where it saturated)."""
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    bits = torch.empty(qkv.numel() // BITS_PER_BYTE, dtype=torch.uint8, device=qkv.device)
    rows = qkv.shape[0] * qkv.shape[1]
    groups = qkv.shape[3] * qkv.shape[4] // BITS_PER_BYTE
    row_tile, group_tile = _TILE
    strips = -(-groups // group_tile)
    launch(
        round_kernel,
        (-(-rows // (row_tile * _TILES)), 3 * strips),
        (qkv, *ranges, out, bits),
        (rows, groups, strips, _TILES, rounding_threshold(low), float(low), float(high), row_tile, group_tile),
        num_warps=_WARPS,
    )
    return out, bits


def _layout(qkv: Tensor) -> HeadLayout:
    """Memory layout of (B, T, 3, H, D)."""
    batch, tokens, _, heads, width = qkv.shape
    part = heads * width
    starts = (part, 2 * part)
    return HeadLayout(batch * heads, tokens, tokens, heads, 3 * part, 3 * part, part, *starts, *starts, width, width)
