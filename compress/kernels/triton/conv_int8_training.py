"""A convolution of codes with the gradient of the float convolution, and codes of values."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.epilogue import Epilogue, Window
from compress.kernels.fake_quantize import in_type, masked_gradients
from compress.kernels.triton.conv_int8 import Codes, ConvResult, Geometry, conv_codes
from compress.kernels.triton.fake_quantize import plan_of
from compress.kernels.triton.language import tl, triton
from compress.kernels.triton.launch import launch
from compress.kernels.triton.pool import pool, unpool

_TILE = 4096  # elements of a program that computes codes of values
_LAST = torch.channels_last


class Layer(NamedTuple):
    """A convolution with its epilogue, besides the tensors.

    Attributes:
        stem: whether it is rearranged first (`compress.kernels.triton.conv_int8_training`).
        highs: the integers of amax, of input, weight and residual.
        window: of the max pool after it; None = there is none.
        emits: whether codes of the result are written.
    """

    geometry: Geometry
    stem: bool
    highs: tuple[int, int, int]
    epilogue: Epilogue
    window: Window | None
    emits: bool


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    codes: Tensor,
    weight_codes: Tensor,
    residual_codes: Tensor | None,
    x_amax: Tensor,
    weight_amax: Tensor,
    residual_amax: Tensor,
    amax: Tensor,
    layer: Layer,
) -> tuple[Tensor, Tensor]:
    """Compute quantize(activation(conv(x, weight) + bias + residual)), pooled, from codes; the gradient is of floats.

    - `x`: (N, C, H, W) channels_last, quantized values.
    - `weight`: (O, C, R, S), quantized values in the type of `x`.
    - `bias`, `weight_amax`: (O,).
    - `residual`: (N, O, OH, OW).
    - `codes`, `weight_codes`: int8, of `x` and `weight`.
    - `residual_codes`: int8; None = the residual itself is read.
    - `x_amax`, `residual_amax`, `amax`: (), range of `x`, of the residual, of the result.

    Returns:
        Quantized values in the type of `x`, and their codes, empty unless wanted; channels_last.
    """
    added = residual_codes if residual_codes is not None else residual
    # Torch's compiler takes no tensor twice: the residual may be the input, and share its range
    if torch.compiler.is_compiling():
        added = None if added is None else added.detach()
        residual = None if residual is None else residual.view_as(residual)
        residual_amax = residual_amax.detach()
    ranges = (x_amax, weight_amax, residual_amax, amax)
    numbers = (
        tuple(layer.geometry),
        *layer[1:3],
        tuple(layer.epilogue),
        layer.window and tuple(layer.window),
        layer.emits,
    )
    return _Convolve.apply(x, weight, bias, residual, codes, weight_codes, added, *ranges, numbers)


class _Convolve(torch.autograd.Function):
    """Keeps the quantized input and weight, and the packed bits or a pool's places."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        codes: Tensor,
        weight_codes: Tensor,
        added: Tensor | None,
        x_amax: Tensor,
        weight_amax: Tensor,
        residual_amax: Tensor,
        amax: Tensor,
        numbers: tuple[Any, ...],
    ) -> tuple[Tensor | None, Tensor]:
        geometry, stem, highs, epilogue, window, emits = numbers
        epilogue, dtype = Epilogue(*epilogue), x.dtype
        read: Codes | Tensor | None = added
        if added is not None and added.dtype == torch.int8:
            read = Codes(added, residual_amax, highs[2])
        pools = window is not None
        written, bits, value = _conv_codes(
            Codes(codes, x_amax, highs[0]),
            Codes(weight_codes, weight_amax, highs[1]),
            read,
            amax,
            epilogue,
            Geometry(*geometry),
            stem,
            bias,
            emits or pools,
            None if pools else dtype,
        )
        ctx.size = ctx.plan = None
        if pools and written is not None:
            ctx.size = tuple(written.shape[2:])
            pooled = pool(written, amax, epilogue, Window(*window), dtype=dtype, bits=bits, emits=emits)
            value, bits, written = pooled
        elif value is not None and not torch.compiler.is_compiling():
            ctx.plan = plan_of(value, bias, None, amax, epilogue, dtype)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        written = codes.new_empty(0) if written is None else written
        ctx.save_for_backward(x, weight, bits)
        ctx.mark_non_differentiable(written)
        ctx.geometry, ctx.window = geometry, window
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return value, written

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        if ctx.window is not None:
            passed, bias_grad = unpool(grad, mask, Window(*ctx.window), ctx.size, x.dtype, wants_bias)
        else:
            grad = grad.contiguous(memory_format=_LAST)
            passed, bias_grad = masked_gradients(grad, mask, ctx.plan, x.dtype, 1, wants_bias)
        x_grad, weight_grad, _none = torch.ops.aten.convolution_backward(
            passed, x, weight, None, *ctx.geometry, False, (0, 0), 1, (wants_x, wants_weight, False)
        )
        return (
            x_grad if wants_x else None,
            weight_grad if wants_weight else None,
            in_type(bias_grad, ctx.bias_dtype),
            in_type(passed, ctx.residual_dtype),
            *(None,) * 8,
        )


def _conv_codes(
    codes: Codes,
    weight: Codes,
    residual: Codes | Tensor | None,
    amax: Tensor,
    epilogue: Epilogue,
    geometry: Geometry,
    stem: bool,
    bias: Tensor | None,
    emits: bool,
    dtype: torch.dtype | None,
) -> ConvResult:
    """As `conv_codes`, for tensors in any layout; a stem is rearranged first."""
    q, w = codes.integers, weight.integers
    if stem:
        q, w = stem_image(q, w.shape[2], geometry.padding[0]), stem_filter(w, geometry.padding[0])
        geometry = Geometry()
    else:
        q, w = q.contiguous(memory_format=_LAST), w.contiguous(memory_format=_LAST)
    if isinstance(residual, Codes):
        residual = Codes(residual.integers.contiguous(memory_format=_LAST), *residual[1:])
    elif residual is not None:
        residual = residual.contiguous(memory_format=_LAST)
    return conv_codes(
        Codes(q, *codes[1:]),
        Codes(w, *weight[1:]),
        amax,
        epilogue,
        geometry,
        bias=bias,
        residual=residual,
        codes=emits,
        dtype=dtype,
    )


def codes_of(value: Tensor, amax: Tensor, high: int) -> Tensor:
    """Return the integers of quantized values, dense and floating point: int8, laid out as `value`.

    `amax` is (), their range.
    """
    codes = torch.empty_like(value, dtype=torch.int8)
    n = value.numel()
    launch(_codes_kernel, (triton.cdiv(n, _TILE),), (value, amax, codes), (n, float(high), _TILE))
    return codes


@triton.jit
def _codes_kernel(value_ptr, amax_ptr, codes_ptr, n, high, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(value_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    steps = value * tl.div_rn(high, tl.load(amax_ptr).to(tl.float32))  # within a quarter of an integer
    shifted = steps + 12582912.0  # 1.5 * 2^23: rounds, and the integer is in the lowest bits
    tl.store(codes_ptr + at, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=at < n)


_BLOCK = 2  # pixels a side
_CHANNELS = 16  # of a block, padded


class StemPlan(NamedTuple):
    """Position of a square filter of stride 2 on blocks.

    Attributes:
        before: zeros above and left of the image; even.
        lead: zeros above and left of the filter; even.
        blocks: height and width of the filter in blocks.
    """

    before: int
    lead: int
    blocks: int


def stem_plan(taps: int, padding: int) -> StemPlan:
    """The plan for a filter of `taps` x `taps`, stride 2, `padding` zeros around the image."""
    lead = padding % _BLOCK
    return StemPlan(padding + lead, lead, -(-(taps + lead) // _BLOCK))


def stem_fits(weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> bool:
    """Whether a convolution can be rearranged: at most 4 channels, a square filter, stride 2."""
    _, channels, taps_y, taps_x = weight.shape
    square = taps_y == taps_x and padding[0] == padding[1]
    blocks = stem_plan(taps_y, padding[0]).blocks
    whole = blocks * _CHANNELS % 32 == 0  # of the tensor cores' step
    return channels <= 4 and square and stride == (2, 2) and dilation == (1, 1) and whole


def stem_image(codes: Tensor, taps: int, padding: int) -> Tensor:
    """Return the image as overlapping rows of blocks.

    - `codes`: (N, C, H, W) int8, C at most 4.

    Returns:
        (N, 16 * blocks, rows of blocks, OW), to be convolved with `stem_filter`, stride 1, no padding.
    """
    plan = stem_plan(taps, padding)
    images, channels, height, width = codes.shape
    out = [(size + 2 * padding - taps) // _BLOCK + 1 for size in (height, width)]
    rows, columns = (size - 1 + plan.blocks for size in out)
    after = [_BLOCK * n - size - plan.before for n, size in ((columns, width), (rows, height))]
    padded = F.pad(codes, (plan.before, after[0], plan.before, after[1]))  # pixels past the last filter are cut off
    blocks = padded.reshape(images, channels, rows, _BLOCK, columns, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(images, rows, columns, 4 * channels), (0, _CHANNELS - 4 * channels)).contiguous()
    row_step = columns * _CHANNELS
    return blocks.as_strided((images, plan.blocks * _CHANNELS, rows, out[1]), (rows * row_step, 1, row_step, _CHANNELS))


def stem_filter(codes: Tensor, padding: int) -> Tensor:
    """The filter of `stem_image`: (O, C, R, R) becomes (O, 16 * blocks, blocks, 1), channels_last."""
    outputs, channels, taps, _ = codes.shape
    plan = stem_plan(taps, padding)
    after = _BLOCK * plan.blocks - taps - plan.lead
    padded = F.pad(codes, (plan.lead, after, plan.lead, after))
    blocks = padded.reshape(outputs, channels, plan.blocks, _BLOCK, plan.blocks, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(outputs, plan.blocks, plan.blocks, 4 * channels), (0, _CHANNELS - 4 * channels))
    rows = blocks.reshape(outputs, plan.blocks, 1, plan.blocks * _CHANNELS)
    return rows.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
