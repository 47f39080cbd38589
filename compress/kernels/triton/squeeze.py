"""Squeeze and excitation, and global response norm, with their neighbours: two passes over an image each way."""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.epilogue import IntegerGrid, rounding_threshold
from compress.kernels.memory_format import BITS_PER_BYTE, empty_as, is_channels_last, like
from compress.kernels.triton.activation import bias_of, smooth_factor, with_bias
from compress.kernels.triton.fake_quantize import on_grid, step_of, steps_of
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

_FORWARD = (1024, 4, 4224)  # elements of a tile, warps of a program, and programs for parts of images, about:
_BACKWARD = (1024, 4, 2112)  # the best of four on an H200
_WIDTHS = (128, 64, 32)  # columns of a tile
_FEWEST = 528  # programs below which tiles become narrower: 4 on each multiprocessor
_ANY = (-127, 127)  # integers of a grid that nothing is rounded to
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    if ACTIVATION == "":
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu6":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, 6.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where((x > 0.0) & (x < 6.0), 1.0, 0.0)
    else:
        s, steep = smooth_factor(x, ACTIVATION, EXACT)
        value = x * s
        slope = s + x * steep
    return value, slope


@triton.jit
def _steps(value, scale, reciprocal, EXACT: tl.constexpr):
    """A value in steps of a grid: by a correct division if EXACT."""
    return steps_of(value, float("-inf"), float("inf"), scale, reciprocal) if EXACT else value * reciprocal


@triton.jit
def _tile(rows, eights, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(columns, rows of a tile, this program's columns, which exist, offsets of elements, the first element)."""
    columns = eights * 8
    local = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * rows * columns
    return columns, local, column, column < columns, local[:, None] * columns + column[None, :], first


@triton.jit
def _part():
    """The number of this program's part of an image, over all images."""
    return tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)


@triton.jit
def squeeze_kernel(
    y_ptr,
    bias_ptr,
    amax_ptr,
    out_ptr,
    rows,
    eights,
    steps,
    low,
    high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Average y + bias, activated and quantized if ROUNDS, over an image, for a strip of columns.

    SQUARES: the sum of its squares over a part of an image instead.
    """
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    low = tl.cast(low, tl.float32)  # torch.compile passes Python's numbers in float64
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    columns, local, column, inside, at, first = _tile(rows, eights, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(2) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = with_bias(y_ptr + first + row * columns, at, there, bias, HAS_BIAS)
        value, _ = _activated(x, ACTIVATION, EXACT)
        if ROUNDS:
            value = on_grid(_steps(value, scale, reciprocal, EXACT), low, high)
        if SQUARES:
            value *= value
        total += tl.where(there, value, 0.0)
    found = tl.sum(total, axis=0)
    if not SQUARES:
        found = found / rows
    if ROUNDS:
        found *= scale
    tl.store(out_ptr + _part() * columns + column, found.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def excite_kernel(
    y_ptr,
    bias_ptr,
    gate_ptr,
    shift_ptr,
    amax_ptr,
    out_ptr,
    rows,
    eights,
    steps,
    low,
    high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize gate * activation(y + bias) + shift, for a strip of columns of a part of an image."""
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    columns, local, column, inside, at, first = _tile(rows, eights, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    gate = tl.load(gate_ptr + tl.program_id(1) * columns + column, mask=inside, other=0.0).to(tl.float32)
    shift = bias_of(shift_ptr, column, inside, HAS_SHIFT)
    for step in range(0, steps):
        row = (tl.program_id(2) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        x = with_bias(y_ptr + first + row * columns, at, there, bias, HAS_BIAS)
        value, _ = _activated(x, ACTIVATION, EXACT)
        value *= gate[None, :]
        if HAS_SHIFT:
            value += shift
        found = on_grid(_steps(value, scale, reciprocal, EXACT), low, high) * scale
        tl.store(out_ptr + first + row * columns + at, found.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def gate_gradient_kernel(
    grad_ptr,
    y_ptr,
    bias_ptr,
    gate_ptr,
    shift_ptr,
    amax_ptr,
    out_ptr,
    sums_ptr,
    rows,
    eights,
    steps,
    least,
    high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the gradient, masked by the quantizer, times the activation over a part of an image, for a strip of columns.

    HAS_SHIFT: `sums` gets the sum of the masked gradient itself.
    """
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    least = tl.cast(least, tl.float32)
    high = tl.cast(high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    columns, local, column, inside, at, first = _tile(rows, eights, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    gate = tl.load(gate_ptr + tl.program_id(1) * columns + column, mask=inside, other=0.0).to(tl.float32)
    shift = bias_of(shift_ptr, column, inside, HAS_SHIFT)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    of_shift = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(2) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + first + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = with_bias(y_ptr + first + row * columns, at, there, bias, HAS_BIAS)
        value, _ = _activated(x, ACTIVATION, EXACT)
        found = value * gate[None, :]
        if HAS_SHIFT:
            found += shift
        found = _steps(found, scale, reciprocal, EXACT)
        passed = tl.where((found > least) & (found < high + 0.5), grad, 0.0)  # `grad` is 0 outside
        total += passed * value
        if HAS_SHIFT:
            of_shift += passed
    tl.store(out_ptr + _part() * columns + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_SHIFT:
        tl.store(sums_ptr + _part() * columns + column, tl.sum(of_shift, axis=0), mask=inside)


@triton.jit
def gradient_kernel(
    grad_ptr,
    y_ptr,
    bias_ptr,
    gate_ptr,
    shift_ptr,
    amax_ptr,
    mean_grad_ptr,
    mean_amax_ptr,
    out_ptr,
    sums_ptr,
    rows,
    eights,
    steps,
    least,
    high,
    mean_least,
    mean_high,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROUNDS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of y from those of the product and of the mean, for a strip of columns of part of an image.

    HAS_SHIFT: the mean's is a factor of the activation. ROUNDS: the mean is of quantized values. SUMS: sum it over the
    rows of this part, for the bias.
    """
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    least = tl.cast(least, tl.float32)
    high = tl.cast(high, tl.float32)
    mean_least = tl.cast(mean_least, tl.float32)
    mean_high = tl.cast(mean_high, tl.float32)
    scale, reciprocal = step_of(tl.load(amax_ptr), high)
    columns, local, column, inside, at, first = _tile(rows, eights, ROWS, COLUMNS)
    bias = bias_of(bias_ptr, column, inside, HAS_BIAS)
    gate_at = tl.program_id(1) * columns + column
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    shift = bias_of(shift_ptr, column, inside, HAS_SHIFT)
    mean_grad = tl.load(mean_grad_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    if not HAS_SHIFT:
        mean_grad = mean_grad / rows
    if ROUNDS:
        mean_scale, mean_reciprocal = step_of(tl.load(mean_amax_ptr), mean_high)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(0, steps):
        row = (tl.program_id(2) * steps + step) * ROWS
        there = (local < rows - row)[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + first + row * columns + at, mask=there, other=0.0).to(tl.float32)
        x = with_bias(y_ptr + first + row * columns, at, there, bias, HAS_BIAS)
        value, slope = _activated(x, ACTIVATION, EXACT)
        found = value * gate[None, :]
        if HAS_SHIFT:
            found += shift
        found = _steps(found, scale, reciprocal, EXACT)
        passed = tl.where((found > least) & (found < high + 0.5), grad * gate[None, :], 0.0)
        if HAS_SHIFT:
            passed += mean_grad[None, :] * value
        elif ROUNDS:
            found = _steps(value, mean_scale, mean_reciprocal, EXACT)
            passed += tl.where((found > mean_least) & (found < mean_high + 0.5), mean_grad[None, :], 0.0)
        else:
            passed += mean_grad[None, :]
        passed *= slope
        tl.store(out_ptr + first + row * columns + at, passed.to(out_ptr.dtype.element_ty), mask=there)
        if SUMS:
            total += tl.where(there, passed, 0.0)
    if SUMS:
        tl.store(sums_ptr + _part() * columns + column, tl.sum(total, axis=0), mask=inside)


class Tiles(NamedTuple):
    """Division of images into the programs of a kernel.

    Attributes:
        images, pixels, eights: number of images, rows of each, and its columns in eights.
        steps: tiles that a program goes through, if several share a strip.
    """

    images: int
    pixels: int
    eights: int
    rows: int
    columns: int
    strips: int
    steps: int
    parts: int
    warps: int

    @classmethod
    def of(cls, y: Tensor, elements: int, warps: int, programs: int) -> Tiles:
        """For a `y` of (N, C, H, W), with `elements` in a tile, and about `programs` programs, if they share strips."""
        images, columns, height, width = y.shape
        padded = {w: -(-columns // w) * w for w in _WIDTHS}
        best = [w for w in _WIDTHS if padded[w] == min(padded.values())]
        strip = next((w for w in best if images * padded[w] // w >= _FEWEST), best[-1])
        strips, rows = padded[strip] // strip, elements // strip
        tiles = -(-height * width // rows)
        steps = max(1, min(tiles, tiles * images * strips // programs))
        parts = -(-tiles // steps)
        return cls(images, height * width, columns // BITS_PER_BYTE, rows, strip, strips, steps, parts, warps)

    def run(self, kernel: Any, tensors: tuple[Tensor, ...], constants: tuple[Any, ...], split: bool = False) -> None:
        grid = (self.strips, self.images, *((self.parts,) if split else ()))
        sizes = (self.pixels, self.eights, self.steps if split else -(-self.pixels // self.rows))
        launch(kernel, grid, tensors, (*sizes, *constants, self.rows, self.columns), num_warps=self.warps)


@dataclass(eq=False)
class Link:
    """What `squeeze` and `excite` of one block share: the bias, gate and integers of `excite`'s backward pass."""

    bias: Tensor | None
    activation: str
    found: tuple[Tensor, IntegerGrid] | None = None


def fits(y: Tensor) -> bool:
    return is_channels_last(y) and y.dtype in _FLOATS and y.numel() > 0 and y.shape[1] % BITS_PER_BYTE == 0


def squeeze(y: Tensor, bias: Tensor | None, activation: str, grid: IntegerGrid | None) -> tuple[Tensor, Tensor, Link]:
    """Average activation(y + bias), quantized to `grid` if given, over the pixels of a `y` (N, C, H, W) that `fits`.

    Returns the means (N, C, 1, 1) in the type of `y`, what `excite` takes for `y`, and what it takes besides.
    """
    link = Link(None if bias is None else bias.detach(), activation)
    pooled, kept = _Squeeze.apply(y, bias, grid, link)
    return pooled, kept, link


def excite(kept: Tensor, gate: Tensor, grid: IntegerGrid, link: Link) -> Tensor:
    """Fake quantization of activation(y + bias) * gate: (N, C, H, W), channels_last; `kept` and `link` of `squeeze`."""
    return _Excite.apply(kept, _rows(gate, kept), grid, link)


def excite_again(
    kept: Tensor, gate: Tensor, amax: Tensor, bias: Tensor | None = None, *, low: int, high: int, activation: str
) -> Tensor:
    """The result of `excite`, to the last bit, without gradients; arguments as of `excite` and `squeeze`."""
    out = torch.empty_like(kept, dtype=torch.promote_types(kept.dtype, gate.dtype))
    tensors = (kept, kept if bias is None else bias, _rows(gate, kept), kept, amax, out)
    constants = (float(low), float(high), activation, bias is not None, False)
    Tiles.of(kept, *_FORWARD).run(excite_kernel, tensors, constants, split=True)
    return out


def _rows(gate: Tensor, y: Tensor) -> Tensor:
    return gate.reshape(gate.shape[:2]).expand(y.shape[:2]).contiguous()


class _Squeeze(torch.autograd.Function):
    """Keeps `y`; its backward pass computes that of both operations."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, grid: IntegerGrid | None, link: Link
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty((*y.shape[:2], 1, 1), dtype=y.dtype, device=y.device)
        low, high = _ANY if grid is None else (grid.low, grid.high)
        tensors = (y, y if bias is None else bias, y if grid is None else grid.amax, out)
        constants = (float(low), float(high), link.activation, bias is not None, grid is not None, False)
        Tiles.of(y, *_FORWARD).run(squeeze_kernel, tensors, constants)
        ctx.save_for_backward(y, bias, None if grid is None else grid.amax)
        ctx.grid, ctx.link = None if grid is None else (grid.low, grid.high), link
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of y and bias; `grad` is that of the result of `excite`."""
        refuse_second_derivative(mean_grad, grad)
        y, bias, mean_amax = ctx.saved_tensors
        found, ctx.link.found = ctx.link.found, None
        if mean_grad is None:
            mean_grad = y.new_zeros(y.shape[:2])
        if grad is None or found is None:  # the product is not part of the loss
            found = y.new_zeros(y.shape[:2]), IntegerGrid(y.new_ones((), dtype=torch.float32), *_ANY)
            grad = torch.zeros_like(y)
        (gate, grid), (mean_low, mean_high) = found, ctx.grid or _ANY
        out = torch.empty_like(y)
        t = Tiles.of(y, *_BACKWARD)
        wants = bias is not None and ctx.needs_input_grad[1]
        shape = (t.images * t.parts, y.shape[1]) if wants else (1,)
        sums = torch.empty(shape, dtype=torch.float32, device=y.device)
        tensors = (like(grad, y), y, y if bias is None else bias, gate, gate, grid.amax, mean_grad.contiguous())
        bounds = (rounding_threshold(grid.low), float(grid.high), rounding_threshold(mean_low), float(mean_high))
        constants = (*bounds, ctx.link.activation, bias is not None, False, ctx.grid is not None, wants)
        t.run(
            gradient_kernel, (*tensors, grid.amax if mean_amax is None else mean_amax, out, sums), constants, split=True
        )
        return out, sums.sum(0).to(bias.dtype) if wants else None, None, None


class _Excite(torch.autograd.Function):
    """Keeps `y` and the gate; the gradient that it gives to `kept` is the one that comes in."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor, grid: IntegerGrid, link: Link) -> Tensor:
        ctx.save_for_backward(y, gate, grid.amax)
        ctx.grid, ctx.link = (grid.low, grid.high), link
        low, high = grid.low, grid.high
        return excite_again(y, gate, grid.amax, link.bias, low=low, high=high, activation=link.activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        y, gate, amax = ctx.saved_tensors
        link, (low, high) = ctx.link, ctx.grid
        link.found = gate, IntegerGrid(amax, low, high)
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        out = torch.empty_like(gate)
        tensors = (like(grad, y), y, y if link.bias is None else link.bias, gate, gate, amax, out, out)
        constants = (rounding_threshold(low), float(high), link.activation, link.bias is not None, False)
        Tiles.of(y, *_BACKWARD).run(gate_gradient_kernel, tensors, constants)
        return grad, out, None, None


def response_quantize(
    y: Tensor,
    weight: Tensor,
    shift: Tensor,
    grid: IntegerGrid,
    *,
    bias: Tensor | None,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Fake quantization of a global response norm (arXiv 2301.00808) of a = activation(y + bias).

    It is a + weight * a * n + shift, where n is the norm of a over the pixels of a channel, over the mean of an image's
    norms + eps. Returns it and 1 + weight * n, (N, C), for `response_again`.
    """
    return _Response.apply(y, bias, weight, shift, grid.amax, activation, eps, grid.low, grid.high)


def response_again(
    y: Tensor,
    gain: Tensor,
    shift: Tensor,
    amax: Tensor,
    bias: Tensor | None = None,
    *,
    low: int,
    high: int,
    activation: str,
) -> Tensor:
    """The result of `response_quantize`, to the last bit, without gradients; with its `gain`."""
    to_out, out = empty_as(y, y.dtype)
    tensors = (y, y if bias is None else bias, gain, shift, amax, to_out)
    constants = (float(low), float(high), activation, bias is not None, True)
    Tiles.of(y, *_FORWARD).run(excite_kernel, tensors, constants, split=True)
    return out


class _Response(torch.autograd.Function):
    """Keeps `y` and a few numbers of each image; the result is kept by the layer that consumes it."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        shift: Tensor,
        amax: Tensor,
        activation: str,
        eps: float,
        low: int,
        high: int,
    ) -> tuple[Tensor, Tensor]:
        t = Tiles.of(y, *_FORWARD)
        squares = torch.empty((t.images, t.parts, y.shape[1]), dtype=torch.float32, device=y.device)
        constants = (float(low), float(high), activation, bias is not None, False, True)
        t.run(squeeze_kernel, (y, y if bias is None else bias, amax, squares), constants, split=True)
        norms = squares.sum(1).sqrt()
        means = norms.mean(1, keepdim=True) + eps
        gain = 1 + weight * (norms / means)
        out = response_again(y, gain, shift, amax, bias, low=low, high=high, activation=activation)
        ctx.save_for_backward(y, norms, means, gain, weight, shift, amax, *([] if bias is None else [bias]))
        ctx.numbers = (rounding_threshold(low), float(high)), activation
        ctx.mark_non_differentiable(gain)
        ctx.set_materialize_grads(False)  # nobody reads zeros for the gain
        return out, gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _gain: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        if grad is None:
            return (None,) * 9
        y, norms, means, gain, weight, shift, amax, *rest = ctx.saved_tensors
        bias, grad, (bounds, activation) = rest[0] if len(rest) else None, like(grad, y), ctx.numbers
        t = Tiles.of(y, *_BACKWARD)
        shape = (t.images, t.parts, y.shape[1])
        along, passed, sums = (torch.empty(shape, dtype=torch.float32, device=y.device) for _ in range(3))
        tensors = (grad, y, y if bias is None else bias, gain, shift, amax)
        constants = (*bounds, activation, bias is not None, True)
        t.run(gate_gradient_kernel, (*tensors, along, passed), constants, split=True)
        of_gain, of_shift = along.sum(1), passed.sum((0, 1))
        of_norms = of_gain * weight / means
        of_norms -= (of_norms * norms).sum(1, keepdim=True) / (means * y.shape[1])
        factor = torch.where(norms > 0, of_norms / norms, 0.0)
        (to_out, out), wants = empty_as(y, y.dtype), bias is not None and ctx.needs_input_grad[1]
        constants = (*bounds, *bounds, activation, bias is not None, True, False, wants)
        t.run(gradient_kernel, (*tensors, factor, amax, to_out, sums), constants, split=True)
        of_bias = sums.sum((0, 1)).to(bias.dtype) if bias is not None and wants else None
        of_weight = (of_gain * norms / means).sum(0).to(weight.dtype)
        return out, of_bias, of_weight, of_shift.to(shift.dtype), *(None,) * 5
