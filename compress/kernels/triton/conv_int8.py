"""Convolution on INT8 tensor cores with its epilogue in the same kernel: codes in, codes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue, rounding_threshold
from compress.kernels.memory_format import empty_channels_last
from compress.kernels.triton.conv_int8_kernel import conv_kernel
from compress.kernels.triton.launch import BoundedCache, Launch

_ALIGNED = 16  # bytes of one memory access; channel counts are its multiples
_LARGEST = 2**31  # elements: indices have 32 bits


class Codes(NamedTuple):
    """A tensor as integers.

    Attributes:
        integers: int8; activations (N, C, H, W) channels_last, weights (O, C, R, S) channels_last.
        amax: () for activations, (O,) for weights; one step is amax / high.
    """

    integers: Tensor
    amax: Tensor
    high: int = 127


class Geometry(NamedTuple):
    """Stride, padding and dilation; each (vertical, horizontal), as in `torch.nn.Conv2d`."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


class ConvTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        rows: output pixels.
        columns: output channels.
        depth: input channels of one step.
        stages: steps whose loads are in flight at a time.
        part: columns that the epilogue holds in registers at a time.
        registers: limit per thread; None = the compiler decides.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 8
    part: int = 64
    registers: int | None = None


class ConvResult(NamedTuple):
    """The results of the kernel; None unless asked for.

    Attributes:
        codes: (N, O, OH, OW) int8, channels_last.
        bits: where the gradient passes, packed (`compress.kernels.memory_format`).
        value: the quantized values, shape and layout of `codes`.
    """

    codes: Tensor | None
    bits: Tensor | None
    value: Tensor | None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel computes the convolution of codes of these shapes: (N, C, H, W) and (O, C, R, S)."""
    channels, outputs = x.shape[1], weight.shape[0]
    whole = channels % _ALIGNED == 0 and outputs % _ALIGNED == 0 and weight.shape[1] == channels
    return whole and x.numel() < _LARGEST and min(x.shape) > 0


def default_tile(pixels: int, channels: int, outputs: int, taps: int = 1, *, limited: bool = True) -> ConvTile:
    """Return a tile for a convolution of `channels` to `outputs` channels at `pixels` output pixels.

    `limited`: a limit of registers can be set.
    """
    # Within 5 % of the best of seven tiles for most of ResNet-50's shapes at batch 128 on an H200, within 13 % for all.
    depth = 64 if channels > 32 else 32
    narrow = ConvTile(128, 64, depth, 4, 4, 32, 168)
    if min(channels, outputs) <= 64 or (not limited and channels * taps < 512):
        return narrow
    depth = 128 if channels % 128 == 0 else depth
    if pixels * outputs < 256 * 128 * 128:  # fewer programs than would fill the multiprocessors twice
        return ConvTile(64, 128, depth, 3, 4, 32, 168)
    return ConvTile(128, 128, depth, 3, 8, 64 if limited else 32, 128)


def conv_codes(
    x: Codes,
    weight: Codes,
    amax: Tensor,
    epilogue: Epilogue,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    residual: Codes | Tensor | None = None,
    codes: bool = True,
    bits: bool = True,
    dtype: torch.dtype | None = None,
    tile: ConvTile | None = None,
) -> ConvResult:
    """Compute quantize(activation(conv(x, weight) + bias + residual)), from codes to codes.

    - `x`: activations for which `fits`.
    - `weight`: one group.
    - `amax`: (), the range of the result.
    - `epilogue`: one range, integers of at most 8 bits and a sign.
    - `geometry`: stride, padding (with zeros), dilation.
    - `bias`: (O,), floating point.
    - `residual`: codes or floating point, (N, O, OH, OW), channels_last.
    - `bits`: write the bits of the backward pass.
    - `dtype`: of the quantized values; None = they are not written.
    - `tile`: None = `default_tile`.
    """
    q, w = x.integers, weight.integers
    added, added_amax, added_high = residual if isinstance(residual, Codes) else (residual, amax, 127)
    types = tuple(t if t is None else t.dtype for t in (bias, added, x.amax, weight.amax, added_amax, amax))
    kind = ((x.high, weight.high, added_high), epilogue, geometry, isinstance(residual, Codes), tile)
    compiling = torch.compiler.is_compiling()
    plan: _Plan | None = None
    if not compiling:
        key = (q.shape, q.stride(), w.shape, q.get_device(), types, kind, codes, bits, dtype)
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _Plan(_call_of(q, w, *kind), q.get_device())
    call = plan.call if plan is not None else _call_of(q, w, *kind)
    packed = torch.empty(call.bytes, dtype=torch.uint8, device=q.device) if bits else None
    to_codes, written = empty_channels_last(call.shape, torch.int8, q.device) if codes else (None, None)
    to_value, value = empty_channels_last(call.shape, dtype, q.device) if dtype else (None, None)
    tensors = (q, w, bias, added, x.amax, weight.amax, added_amax, amax, to_codes, packed, to_value)
    if plan is not None:
        plan.launch(plan.device, *tensors)
    else:  # launched by torch's compiled code, which cannot set a limit of registers
        t = call.tile
        conv_kernel[call.grid](*tensors, *call.constants, num_warps=t.warps, num_stages=t.stages)
    return ConvResult(written, packed, value)


class _Call(NamedTuple):
    shape: tuple[int, int, int, int]
    bytes: int
    grid: tuple[int]
    constants: tuple[Any, ...]
    tile: ConvTile


def _call_of(
    q: Tensor,
    w: Tensor,
    highs: tuple[int, int, int],
    epilogue: Epilogue,
    geometry: Geometry,
    added_codes: bool,
    tile: ConvTile | None,
) -> _Call:
    images, channels, height, width = q.shape
    outputs, _, taps_y, taps_x = w.shape
    out_height, out_width = output_size((height, width), (taps_y, taps_x), geometry)
    rows = images * out_height * out_width
    limited = not torch.compiler.is_compiling()
    t = tile or default_tile(rows, channels, outputs, taps_y * taps_x, limited=limited)
    image_step, _, row_step, pixel_step = q.stride()
    padded = geometry.padding != (0, 0)
    dense = q.is_contiguous(memory_format=torch.channels_last)
    flat = taps_y * taps_x == 1 and geometry.stride == (1, 1) and not padded and dense
    e = epilogue
    constants = (
        rows,
        channels,
        outputs,
        image_step,
        row_step,
        channels if flat else pixel_step,
        height,
        width,
        out_height,
        out_width,
        *geometry.stride,
        *geometry.padding,
        *geometry.dilation,
        *map(float, highs),
        rounding_threshold(e.low),
        float(e.low),
        float(e.high),
        e.lower,
        e.upper,
        taps_y,
        taps_x,
        flat,
        padded,
        channels % t.depth == 0,
        added_codes,
        t.rows,
        t.columns,
        t.depth,
        t.part,
    )
    shape = (images, outputs, out_height, out_width)
    grid = (-(-rows // t.rows) * -(-outputs // t.columns),)
    return _Call(shape, rows * outputs // 8, grid, constants, t)


class _Plan:
    def __init__(self, call: _Call, device: int) -> None:
        t = call.tile
        self.call, self.device = call, device
        self.launch = Launch(
            conv_kernel, call.grid, *call.constants, num_stages=t.stages, num_warps=t.warps, maxnreg=t.registers
        )


_PLANS = BoundedCache()


def output_size(size: tuple[int, int], taps: tuple[int, int], geometry: Geometry) -> tuple[int, int]:
    """(OH, OW) of a convolution of an image of (H, W) with a filter of (R, S)."""
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, taps, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    ]
    return sizes[0], sizes[1]
