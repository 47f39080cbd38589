"""A convolution on codes with the gradient of the float one, and codes of values: what `fused_codes` runs on a GPU.

Eager, the kernels are launched directly (`launch`). Under torch.compile the forward pass is the operation
`compress::conv_codes`, which the compiler calls as it is, and the backward pass is torch's operations.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.errors import QuantizationError
from compress.quantization.fused_conv import Codes, Geometry, conv_codes, output_size
from compress.quantization.fused_ops import Epilogue, backward_torch
from compress.quantization.fused_triton import plan_of
from compress.quantization.launch import Kept, Launch
from compress.quantization.stem_codes import stem_filter, stem_image

_TILE = 4096  # elements of a program that reads codes off values
_LAST = torch.channels_last


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
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    stem: bool,
    highs: Sequence[int],
    epilogue: Epilogue,
    emits: bool,
) -> tuple[Tensor, Tensor]:
    """quantize(activation(conv(x, weight) + bias + residual)), computed from codes; its gradient is that of floats.

    Args:
        x: (N, C, H, W) channels_last, quantized values.
        weight: (O, C, R, S), quantized values in the type of `x`.
        bias: (O,).
        residual: (N, O, OH, OW).
        codes: int8, of `x`.
        weight_codes: int8, of `weight`.
        residual_codes: int8, of `residual`; None = it is read as it is.
        x_amax: (), range of `x`.
        weight_amax: (O,).
        residual_amax: ().
        amax: (), range of the result.
        stride: as in `torch.nn.Conv2d`.
        padding: likewise.
        dilation: likewise.
        stem: the convolution is to be rearranged (`stem_codes`).
        highs: the integers that stand for amax, of input, weight and residual.
        epilogue: what follows the convolution.
        emits: codes are wanted.

    Returns:
        Quantized values in the type of `x`, and their codes, empty unless wanted; (N, O, OH, OW), channels_last.
    """
    added = residual_codes if residual_codes is not None else residual
    # The compiler takes no tensor twice: a residual may be the input too, and both its ranges one
    if torch.compiler.is_compiling():
        added = None if added is None else added.detach()
        residual = None if residual is None else residual.view_as(residual)
        residual_amax = residual_amax.detach()
    ranges = (x_amax, weight_amax, residual_amax, amax)
    e = epilogue
    numbers = (stride, padding, dilation, stem, highs, e.low, e.high, e.lower, e.upper, emits)
    return cast(
        "tuple[Tensor, Tensor]",
        _Convolve.apply(x, weight, bias, residual, codes, weight_codes, added, *ranges, *numbers),
    )


class _Convolve(torch.autograd.Function):
    """Keeps the quantized input and weight, which others keep too, and the packed bits."""

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
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        stem: bool,
        highs: Sequence[int],
        low: int,
        high: int,
        lower: float,
        upper: float,
        emits: bool,
    ) -> tuple[Tensor, Tensor]:
        read = (codes, weight_codes, bias, added, x_amax, weight_amax, residual_amax, amax, x.dtype)
        numbers: Any = (stride, padding, dilation, stem, highs, low, high, lower, upper, emits)
        if torch.compiler.is_compiling():
            value, written, bits = torch.ops.compress.conv_codes(*read, *numbers)
        else:
            value, written, bits = _conv_codes(*read, *numbers)
            ctx.set_materialize_grads(False)
            ctx.plan = plan_of(value, bias, None, amax, Epilogue(low, high, lower, upper), x.dtype)
        ctx.save_for_backward(x, weight, bits)
        ctx.mark_non_differentiable(written)
        ctx.geometry = (stride, padding, dilation)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return value, written

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bits = ctx.saved_tensors
        grad = grad.contiguous(memory_format=_LAST)
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        if torch.compiler.is_compiling():
            passed, bias_grad = backward_torch(grad, bits, x.dtype, 1, wants_bias)
        else:
            if grad.requires_grad:
                raise QuantizationError(
                    "our Triton kernels have no second derivative; for one, fuse with forward='float', kernels='torch'"
                )
            passed, bias_grad = ctx.plan.backward(grad, bits, wants_bias)
        x_grad, weight_grad, _none = torch.ops.aten.convolution_backward(
            passed, x, weight, None, *ctx.geometry, False, (0, 0), 1, (wants_x, wants_weight, False)
        )
        residual_grad = None
        if ctx.residual_dtype is not None:
            residual_grad = passed if ctx.residual_dtype == passed.dtype else passed.to(ctx.residual_dtype)
        if wants_bias:
            bias_grad = bias_grad if bias_grad.dtype == ctx.bias_dtype else bias_grad.to(ctx.bias_dtype)
        return (
            x_grad if wants_x else None,
            weight_grad if wants_weight else None,
            bias_grad if wants_bias else None,
            residual_grad,
            *(None,) * 17,
        )


def _conv_codes(
    codes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x_amax: Tensor,
    weight_amax: Tensor,
    residual_amax: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    stem: bool,
    highs: Sequence[int],
    low: int,
    high: int,
    lower: float,
    upper: float,
    emits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, codes, bits); an int8 residual is codes."""
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation))  # type: ignore[arg-type]
    if stem:
        codes = stem_image(codes, weight.shape[2], padding[0])
        weight = stem_filter(weight, padding[0])
        geometry = Geometry()
    else:
        codes, weight = codes.contiguous(memory_format=_LAST), weight.contiguous(memory_format=_LAST)
    if residual is not None:
        residual = residual.contiguous(memory_format=_LAST)
    added: Codes | Tensor | None = residual
    if residual is not None and residual.dtype == torch.int8:
        added = Codes(residual, residual_amax, highs[2])
    written, bits, value = conv_codes(
        Codes(codes, x_amax, highs[0]), Codes(weight, weight_amax, highs[1]), amax,
        Epilogue(low, high, lower, upper), geometry, bias=bias, residual=added, codes=emits, dtype=dtype,
    )  # fmt: skip
    value, bits = cast(Tensor, value), cast(Tensor, bits)
    return value, codes.new_empty(0) if written is None else written, bits


def _shapes_of_conv_codes(
    codes: Tensor, weight: Tensor, bias: Any, residual: Any, x_amax: Any, weight_amax: Any, residual_amax: Any,
    amax: Any, dtype: torch.dtype, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    stem: bool, highs: Any, low: int, high: int, lower: float, upper: float, emits: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Results of `_conv_codes` without their numbers."""
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation))  # type: ignore[arg-type]
    size = output_size(tuple(codes.shape[2:]), tuple(weight.shape[2:]), geometry)  # type: ignore[arg-type]
    shape = (codes.shape[0], weight.shape[0], *size)
    value = codes.new_empty(shape, dtype=dtype).contiguous(memory_format=_LAST)
    count = shape[0] * shape[1] * size[0] * size[1]
    written = torch.empty_like(value, dtype=torch.int8) if emits else codes.new_empty(0)
    return value, written, codes.new_empty(count // 8, dtype=torch.uint8)


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define(
    "conv_codes(Tensor codes, Tensor weight, Tensor? bias, Tensor? residual, Tensor x_amax, Tensor weight_amax, "
    "Tensor residual_amax, Tensor amax, ScalarType dtype, int[] stride, int[] padding, int[] dilation, bool stem, "
    "int[] highs, int low, int high, float lower, float upper, bool emits) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
for _device in ("CPU", "CUDA"):  # on processors Triton's interpreter
    _LIBRARY.impl("conv_codes", _conv_codes, _device)
torch.library.register_fake("compress::conv_codes", _shapes_of_conv_codes, lib=_LIBRARY)


def codes_of(value: Tensor, amax: Tensor, high: int) -> Tensor:
    """What quantized values are multiples of; int8, laid out as `value`, which is dense.

    Args:
        value: quantized values, of any floating point type.
        amax: (), their range.
        high: the integer that stands for it.
    """
    codes = torch.empty_like(value, dtype=torch.int8)
    n = value.numel()
    key = (n, value.dtype, amax.dtype, value.get_device(), high)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = Launch(_codes_kernel, (triton.cdiv(n, _TILE),), n, float(high), _TILE)
    launch(value.get_device(), value, amax, codes)
    return codes


_LAUNCHES = Kept()


@triton.jit
def _codes_kernel(value_ptr, amax_ptr, codes_ptr, n, high, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(value_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    steps = value * tl.div_rn(high, tl.load(amax_ptr).to(tl.float32))  # within a quarter of an integer
    shifted = steps + 12582912.0  # 1.5 * 2^23: rounds, and the integer stands in the lowest bits
    tl.store(codes_ptr + at, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=at < n)
