"""The network's input as codes, packed for a first convolution of few channels: space to depth."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import to_codes

_ELEMENTS = 2048  # of a program


def pack_image(
    x: Tensor,
    out: Tensor,
    before: tuple[int, int],
    block: tuple[int, int],
    inverse: float,
    limits: tuple[int, int],
    zero: int,
) -> None:
    """Launch out[n, i, j, (dy, dx, c)] = code of x[n, c, i * move - before + dy, j * move - before + dx].

    - `x`: (N, C, H, W), floating point, any strides.
    - `out`: int8 (N, rows, columns, V), dense, V at least side * side * C, filled up with the code of 0.
    - `before`: pixels of padding.
    - `block`: (side, move).
    - `limits`: lowest and highest integer, without the zero.
    - `zero`: code of 0.
    """
    grid, arguments = pack_launch(x, out, before, block, inverse, limits, zero)
    _pack_kernel[grid](*arguments)


def pack_launch(
    x: Tensor,
    out: Tensor,
    before: tuple[int, int],
    block: tuple[int, int],
    inverse: float,
    limits: tuple[int, int],
    zero: int,
) -> tuple[tuple[int], tuple[Any, ...]]:
    """(grid, arguments) of the kernel: see `pack_image`."""
    _, channels, height, width = x.shape
    images, rows, columns, vector = out.shape
    wide = triton.next_power_of_2(vector)
    tile = max(1, _ELEMENTS // wide)
    count = images * rows * columns
    arguments = (
        x,
        out,
        count,
        (rows, columns, height, width),
        x.stride(),
        before,
        inverse,
        float(limits[0]),
        float(limits[1]),
        zero,
        zero != 0,
        channels,
        *block,
        vector,
        tile,
        wide,
    )
    return (triton.cdiv(count, tile),), arguments


@triton.jit(do_not_specialize=["sizes", "before", "zero"])
def _pack_kernel(
    x_ptr,
    out_ptr,
    count,
    sizes,
    step,
    before,
    inverse,
    low,
    high,
    zero,
    HAS_ZERO: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows, columns, height, width = sizes
    place = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, WIDE)
    across = element // CHANNELS % BLOCK
    down = element // CHANNELS // BLOCK
    first_y = place // columns % rows * MOVE - before[0]
    first_x = place % columns * MOVE - before[1]
    y = first_y[:, None] + down[None, :]
    x = first_x[:, None] + across[None, :]
    there = (place < count)[:, None] & (element < BLOCK * BLOCK * CHANNELS)[None, :]
    there = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    begin = (place // columns // rows).to(tl.int64) * step[0]
    begin += first_y.to(tl.int64) * step[2] + first_x.to(tl.int64) * step[3]
    channel = element % CHANNELS
    within = channel.to(tl.int64) * step[1] + down.to(tl.int64) * step[2] + across.to(tl.int64) * step[3]
    at = begin[:, None] + within[None, :]
    value = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    codes = to_codes(value * inverse, low, high, zero, HAS_ZERO)
    out_at = place.to(tl.int64)[:, None] * VECTOR + element[None, :]
    tl.store(out_ptr + out_at, codes, mask=(place < count)[:, None] & (element < VECTOR)[None, :])
