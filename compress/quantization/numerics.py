"""The arithmetic of quantization, exactly as ONNX defines it.

QuantizeLinear: q = saturate(round_half_to_even(x / scale) + zero_point); DequantizeLinear: x = (q - zero_point) * scale
(opset 19). The scale is divided by: multiplying by 1 / scale moves values that lie on a tie, and then fake quantization
and the engine disagree. Half precision is computed in float32. FP8 E4M3 (Micikevicius et al., arXiv 2209.05433; ONNX
float8e4m3fn) takes the place of the integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import QuantizationError
from compress.kernels.memory_format import along_axis
from compress.quantization import LEAST_BITS, MOST_BITS, WIDEST

E4M3_MAX = 448

NumberKind = Literal["int", "e4m3"]


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """Which integers, or FP8 numbers, a tensor becomes.

    Attributes:
        num_bits: 2 to 16.
        signed: False for values that are never negative: [0, 2^b - 1], twice the resolution.
        axis: channel axis of per-channel scales; None = one scale for the tensor.
        narrow: leave out the lowest integer (weights: [-127, 127]).
        offset: hold signed values as unsigned integers around zero_point 2^(b-1), the form that x86 kernels take.
        lowest: of an offset format, below 0: no value is lower, as of a GELU; the integers end there. 0.0: not known.
        kind: `int`, or `e4m3`, which is signed, symmetric and never offset.
    """

    num_bits: int = 8
    signed: bool = True
    axis: int | None = None
    narrow: bool = False
    offset: bool = False
    lowest: float = 0.0
    kind: NumberKind = "int"

    def __post_init__(self) -> None:
        if not LEAST_BITS <= self.num_bits <= WIDEST:
            raise QuantizationError(f"num_bits is {self.num_bits}: it must be {LEAST_BITS} to {WIDEST}")
        if self.kind == "e4m3" and (self.num_bits != 8 or not self.signed or self.offset):
            raise QuantizationError("E4M3 has 8 bits, a sign and no offset; set num_bits 8, signed True, offset False")
        if self.lowest > 0 or (self.lowest < 0 and not (self.signed and self.offset and self.axis is None)):
            raise QuantizationError(
                f"lowest is {self.lowest}: it must be below 0, of a signed offset format with one scale, or 0 for none"
            )

    @property
    def low(self) -> int:
        """Smallest multiple of the scale."""
        if self.kind == "e4m3":
            return -E4M3_MAX
        return -(2 ** (self.num_bits - 1)) + self.narrow if self.signed else 0

    @property
    def high(self) -> int:
        """Largest multiple of the scale, the integer of amax: 127 for int8, 255 for unsigned 8 bits, 448 for E4M3."""
        if self.kind == "e4m3":
            return E4M3_MAX
        return 2 ** (self.num_bits - 1) - 1 if self.signed else 2**self.num_bits - 1

    @property
    def zero_point(self) -> int:
        """The integer of 0.0; with `lowest` the largest that it can be (`zero_of`)."""
        return 2 ** (self.num_bits - 1) if self.signed and self.offset else 0

    @property
    def dtype(self) -> torch.dtype:
        if self.kind == "e4m3":
            return torch.float8_e4m3fn
        if self.wide:
            return torch.int16 if self.signed and not self.offset else torch.uint16
        return torch.int8 if self.signed and not self.offset else torch.uint8

    @property
    def wide(self) -> bool:
        """True for integers that a byte does not hold."""
        return self.num_bits > MOST_BITS

    @property
    def fills_type(self) -> bool:
        """True if the type of the integers saturates where the format does, so that no Clip is needed."""
        return self.num_bits in (MOST_BITS, WIDEST) and not self.narrow


def scale_from_amax(amax: Tensor, quant_format: QuantFormat) -> Tensor:
    """Scale of one integer step, shape as amax: amax / 127 for int8, amax / 255 for unsigned 8 bits.

    With a lowest value it is (amax - lowest) / 255, or 2 amax / 255 if that is above -amax.
    """
    if quant_format.lowest:
        return (amax + amax.clamp(max=-quant_format.lowest)) / (2**quant_format.num_bits - 1)
    return amax / quant_format.high


def amax_from_scale(scale: Tensor, quant_format: QuantFormat) -> Tensor:
    if quant_format.lowest:
        width = scale * (2**quant_format.num_bits - 1)
        return torch.maximum(width + quant_format.lowest, width / 2)
    return scale * quant_format.high


def zero_of(scale: Tensor, quant_format: QuantFormat) -> Tensor | int:
    """The integer of 0.0: the format's, or with a lowest value the one of this scale, ()."""
    if quant_format.lowest:
        return (-quant_format.lowest / scale).round().clamp(max=quant_format.zero_point)
    return quant_format.zero_point


def bounds_of(scale: Tensor, quant_format: QuantFormat) -> tuple[Any, Any]:
    moved = zero_of(scale, quant_format) - quant_format.zero_point
    return quant_format.low - moved, quant_format.high - moved


def quantize_tensor(x: Tensor, scale: Tensor, quant_format: QuantFormat) -> Tensor:
    """ONNX QuantizeLinear: `quant_format.dtype`, shape of `x`; `scale` is () or (C,) along the format's axis."""
    steps, scale = _steps(x, scale, quant_format)
    return (steps.clamp(*bounds_of(scale, quant_format)) + zero_of(scale, quant_format)).to(quant_format.dtype)


def _steps(x: Tensor, scale: Tensor, quant_format: QuantFormat) -> tuple[Tensor, Tensor]:
    """`x` over the scale, rounded if it becomes integers, and the scale along the axis, in the type computed with."""
    work = x if x.dtype in {torch.float32, torch.float64} else x.float()
    scale = along_axis(scale.to(work.dtype), x, quant_format.axis)
    return (torch.round(work / scale) if quant_format.kind == "int" else work / scale), scale


def fake_quantize(x: Tensor, scale: Tensor, quant_format: QuantFormat) -> Tensor:
    """Quantize and dequantize, with straight-through gradients; shape and type of `x`, scale () or (C,) along the axis.

    The gradient passes where the integer did not saturate, else it is 0 (Jacob et al., arXiv 1712.05877, section 3);
    `scale` has none.
    """
    scripted = torch.jit.is_tracing()  # type: ignore[attr-defined]  # a script holds operators alone
    if scripted or not torch.is_grad_enabled() or not x.requires_grad:
        return _rounded(x, scale, quant_format)[0]
    return _StraightThrough.apply(x, scale, quant_format)


class _StraightThrough(torch.autograd.Function):
    """Fake quantization that keeps one byte an element (the mask) for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, quant_format: QuantFormat) -> Tensor:
        result, mask = _rounded(x, scale, quant_format, mask=True)
        ctx.save_for_backward(mask)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask, None, None


def _rounded(x: Tensor, scale: Tensor, quant_format: QuantFormat, mask: bool = False) -> tuple[Tensor, Tensor | None]:
    """(fake-quantized x, mask of what did not saturate); the zero point would cancel and is left out."""
    rounded, scale = _steps(x, scale, quant_format)
    clamped = rounded.clamp(*bounds_of(scale, quant_format))
    inside = (rounded == clamped) if mask else None
    if quant_format.kind == "e4m3":
        clamped = clamped.to(torch.float8_e4m3fn).to(scale.dtype)
    result = clamped * scale
    # a `.to` that changes nothing, as an autograd.Function's result, has a gradient of zero in torch 2.11's compiler
    return (result if result.dtype == x.dtype else result.to(x.dtype)), inside
