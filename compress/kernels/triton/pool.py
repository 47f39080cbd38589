"""Max pooling after a fused chain, in the kernel of the chain: layer -> bias -> activation -> quantizer -> max pool."""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import Epilogue, Window
from compress.kernels.memory_format import empty_channels_last
from compress.kernels.triton.fake_quantize import Strips, bounds_of, decisive, on_grid, step_of, steps_of
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

_LAST = torch.channels_last
_PROGRAMS = 2112  # of the backward kernel: 16 on each of 132 multiprocessors
_LARGEST = 2**31  # elements: indices have 32 bits


@triton.jit
def forward_kernel(
    y_ptr,
    bias_ptr,
    bits_ptr,
    amax_ptr,
    out_ptr,
    places_ptr,
    codes_ptr,
    rows,
    channels,
    height,
    width,
    out_height,
    out_width,
    lower,
    upper,
    least,
    low,
    high,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODED: tl.constexpr,
    EMITS: tl.constexpr,
    FROM: tl.constexpr,
    UP_TO: tl.constexpr,
    DISTINCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of pooled values, and the place of the first of the largest in each window.

    DISTINCT: different integers are different values in the type of the result. CODED: `y` holds codes, with `bits`.
    """
    lower = tl.cast(lower, tl.float32)  # torch.compile passes Python's numbers in float64
    upper = tl.cast(upper, tl.float32)
    least = tl.cast(least, tl.float32)
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    image = row // (out_height * out_width)
    first_y = (row // out_width) % out_height * STRIDE_Y - PAD_Y
    first_x = row % out_width * STRIDE_X - PAD_X
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < channels, other=0.0).to(tl.float32)
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    best_code = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    place = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for tap in tl.static_range(TAPS_Y * TAPS_X):
        y = first_y + tap // TAPS_X
        x = first_x + tap % TAPS_X
        there = inside & ((y >= 0) & (y < height) & (x >= 0) & (x < width))[:, None]
        pixel = ((image * height + y) * width + x)[:, None]
        if CODED:
            code, passes = _read_code(y_ptr, bits_ptr, pixel, column, channels, there)
        else:
            value = tl.load(y_ptr + pixel * channels + column[None, :], mask=there, other=0.0).to(tl.float32)
            if HAS_BIAS:
                value += bias[None, :]
            steps = steps_of(value, lower, upper, scale, reciprocal)
            passes = (value > lower if FROM else steps > least) & (steps < high + 0.5)
            if UP_TO:
                passes = passes & (value < upper)
            code = on_grid(steps, low, high)
        value = code if DISTINCT else (code * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
        better = there & ((value > best) | (value != value))
        best = tl.where(better, value, best)
        if not DISTINCT:
            best_code = tl.where(better, code, best_code)
        place = tl.where(better, tl.where(passes, tap, 255), place)
    if DISTINCT:
        best_code = best
    at = row[:, None] * channels + column[None, :]
    tl.store(out_ptr + at, (best_code * scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(places_ptr + at, place.to(tl.uint8), mask=inside)
    if EMITS:
        tl.store(codes_ptr + at, best_code.to(tl.int8), mask=inside)


@triton.jit
def _read_code(codes_ptr, bits_ptr, pixel, column, channels, there):
    """(codes as float32, where the gradient passes), of a tile of pixels and channels."""
    code = tl.load(codes_ptr + pixel * channels + column[None, :], mask=there, other=0).to(tl.float32)
    bits_at = pixel * (channels // 8) + (column // 8)[None, :]
    bits = tl.load(bits_ptr + bits_at, mask=there, other=0).to(tl.int32)
    return code, (bits & (1 << column % 8)[None, :]) != 0


@triton.jit
def backward_kernel(
    grad_ptr,
    places_ptr,
    out_ptr,
    sums_ptr,
    cells,
    channels,
    height,
    width,
    out_height,
    out_width,
    cells_y,
    cells_x,
    steps,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    WINDOWS_Y: tl.constexpr,
    WINDOWS_X: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Give each pixel of a cell of STRIDE_Y x STRIDE_X pixels the gradients of the windows that chose it."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        cell = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (cell < cells)[:, None] & (column < channels)[None, :]
        image = cell // (cells_y * cells_x)
        cell_y = (cell // cells_x) % cells_y
        cell_x = cell % cells_x
        for pixel in tl.static_range(STRIDE_Y * STRIDE_X):
            passed = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for window in tl.static_range(WINDOWS_Y * WINDOWS_X):
                passed += _taken(
                    grad_ptr,
                    places_ptr,
                    image,
                    cell_y,
                    cell_x,
                    column,
                    inside,
                    channels,
                    out_height,
                    out_width,
                    pixel // STRIDE_X,
                    pixel % STRIDE_X,
                    (STRIDE_Y - 1 + PAD_Y) // STRIDE_Y - window // WINDOWS_X,
                    (STRIDE_X - 1 + PAD_X) // STRIDE_X - window % WINDOWS_X,
                    TAPS_Y,
                    TAPS_X,
                    STRIDE_Y,
                    STRIDE_X,
                    PAD_Y,
                    PAD_X,
                )
            y = cell_y * STRIDE_Y + pixel // STRIDE_X
            x = cell_x * STRIDE_X + pixel % STRIDE_X
            at = ((image * height + y) * width + x)[:, None] * channels + column[None, :]
            there = inside & ((y < height) & (x < width))[:, None]
            tl.store(out_ptr + at, passed.to(out_ptr.dtype.element_ty), mask=there)
            total += passed
    if SUMS:
        at = tl.program_id(0) * channels + column
        tl.store(sums_ptr + at, tl.sum(total, axis=0), mask=column < channels)


@triton.jit
def _taken(
    grad_ptr,
    places_ptr,
    image,
    cell_y,
    cell_x,
    column,
    inside,
    channels,
    out_height,
    out_width,
    PIXEL_Y: tl.constexpr,
    PIXEL_X: tl.constexpr,
    AHEAD_Y: tl.constexpr,
    AHEAD_X: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
):
    """The gradient that a pixel of each cell takes from the window AHEAD of the cell: 0 where it chose another."""
    TAP_Y: tl.constexpr = PIXEL_Y + PAD_Y - AHEAD_Y * STRIDE_Y
    TAP_X: tl.constexpr = PIXEL_X + PAD_X - AHEAD_X * STRIDE_X
    taken = tl.zeros(inside.shape, dtype=tl.float32)
    if TAP_Y >= 0 and TAP_Y < TAPS_Y and TAP_X >= 0 and TAP_X < TAPS_X:
        y = cell_y + AHEAD_Y
        x = cell_x + AHEAD_X
        there = inside & ((y >= 0) & (y < out_height) & (x >= 0) & (x < out_width))[:, None]
        at = ((image * out_height + y) * out_width + x)[:, None] * channels + column[None, :]
        chosen = tl.load(places_ptr + at, mask=there, other=255).to(tl.int32)
        grad = tl.load(grad_ptr + at, mask=there, other=0.0).to(tl.float32)
        taken = tl.where(chosen == TAP_Y * TAPS_X + TAP_X, grad, 0.0)
    return taken


class Pooled(NamedTuple):
    """The results of a chain that ends in a pool, all channels_last; codes are int8, if asked for.

    Attributes:
        places: uint8, the index of each value in its window; 255 where no gradient passes.
    """

    value: Tensor
    places: Tensor
    codes: Tensor | None


def fits(y: Tensor) -> bool:
    laid_out = y.dim() == 4 and y.is_contiguous(memory_format=_LAST)
    return laid_out and y.dtype != torch.float64 and 0 < y.numel() < _LARGEST


def pooled_quantize(
    y: Tensor, amax: Tensor, epilogue: Epilogue, window: Window, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return _Pooled.apply(y, bias, amax, tuple(epilogue), tuple(window), dtype)


class _Pooled(torch.autograd.Function):
    """Keeps the places only."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        amax: Tensor,
        epilogue: tuple[Any, ...],
        window: tuple[Any, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        pooled = pool(y, amax, Epilogue(*epilogue), Window(*window), bias=bias, dtype=dtype)
        ctx.save_for_backward(pooled.places)
        ctx.window, ctx.size, ctx.dtype = window, tuple(y.shape[2:]), y.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return pooled.value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        passed, sums = unpool(grad, places, Window(*ctx.window), ctx.size, ctx.dtype, wants_bias)
        return passed, None if sums is None else sums.to(ctx.bias_dtype), *(None,) * 4


def pool(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    window: Window,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    bits: Tensor | None = None,
    emits: bool = False,
) -> Pooled:
    """Compute bias, activation, fake quantization and max pooling in one kernel; or pooling of codes alone.

    - `y`: (N, C, H, W) for which `fits`; or, with `bits`, codes of a result of the epilogue, C a multiple of 8.
    - `bits`: of the codes, packed (`compress.kernels.memory_format`).
    - `emits`: write codes too, of at most 8 bits and a sign.
    """
    images, channels, height, width = y.shape
    out_height, out_width = window.out_size((height, width))
    shape = (images, channels, out_height, out_width)
    to_out, out = empty_channels_last(shape, dtype, y.device)
    to_places, places = empty_channels_last(shape, torch.uint8, y.device)
    to_codes, codes = empty_channels_last(shape, torch.int8, y.device) if emits else (to_out, None)
    rows, e = images * out_height * out_width, epilogue
    s = Strips.of(rows * channels, channels)
    launch(
        forward_kernel,
        (-(-rows // s.tile), s.strips),
        (y, *(amax if t is None else t for t in (bias, bits)), amax, to_out, to_places, to_codes),
        (
            rows,
            channels,
            height,
            width,
            out_height,
            out_width,
            *bounds_of(e),
            *window.kernel,
            *window.stride,
            *window.padding,
            bias is not None,
            bits is not None,
            emits,
            *decisive(e),
            dtype != torch.bfloat16 or e.high < 128,
            s.tile,
            s.strip,
        ),
    )
    return Pooled(out, places, codes)


def unpool(
    grad: Tensor, places: Tensor, window: Window, size: tuple[int, int], dtype: torch.dtype, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """(the gradient of `y` of (H, W), its float32 sum over all axes but that of the channels, if wanted)."""
    refuse_second_derivative(grad)
    grad = grad.contiguous(memory_format=_LAST)
    images, channels, out_height, out_width = grad.shape
    (height, width), (stride_y, stride_x) = size, window.stride
    to_out, out = empty_channels_last((images, channels, height, width), dtype, grad.device)
    cells_y, cells_x = -(-height // stride_y), -(-width // stride_x)
    cells = images * cells_y * cells_x
    s = Strips.of(cells * channels, channels, programs=_PROGRAMS)
    sums = torch.empty((s.programs, channels), dtype=torch.float32, device=grad.device) if wants_bias else None
    launch(
        backward_kernel,
        (s.programs, s.strips),
        (grad, places, to_out, to_out if sums is None else sums),
        (
            cells,
            channels,
            height,
            width,
            out_height,
            out_width,
            cells_y,
            cells_x,
            s.steps,
            *window.kernel,
            *window.stride,
            *window.padding,
            *window.overlap,
            wants_bias,
            s.tile,
            s.strip,
        ),
    )
    return out, None if sums is None else sums.sum(0)
