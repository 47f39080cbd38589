"""ResNet-50's convolutions: shapes, random codes, the INT8 kernel, and the comparison of its result with float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.bitmask import pack
from compress.kernels.epilogue import Epilogue
from compress.kernels.stem import stem_filter, stem_image
from compress.kernels.triton.conv_int8 import Codes, ConvResult, ConvTile, Geometry, conv_codes, output_size

LAST = torch.channels_last


@dataclass(frozen=True)
class Shape:
    """A convolution: input height and width, channels, filter, epilogue, and how often the network has it."""

    name: str
    size: int
    inputs: int
    outputs: int
    taps: int = 1
    stride: int = 1
    residual: bool = False
    relu: bool = True
    count: int = 1

    @property
    def geometry(self) -> Geometry:
        """Stride, and padding that preserves the size as in ResNet."""
        return Geometry((self.stride,) * 2, (self.taps // 2,) * 2)

    @property
    def out_size(self) -> int:
        """Height and width of the output."""
        return output_size((self.size,) * 2, (self.taps,) * 2, self.geometry)[0]


def stage(name: str, size: int, inputs: int, width: int, blocks: int, stride: int) -> list[Shape]:
    """Return the convolutions of a stage of bottleneck blocks."""
    out, wide = size // stride, 4 * width
    return [
        Shape(f"{name} first 1x1", size, inputs, width),
        Shape(f"{name} 1x1 shortcut", size, inputs, wide, stride=stride, relu=False),
        *([Shape(f"{name} first 3x3", size, width, width, 3, stride)] if stride > 1 else []),
        Shape(f"{name} 3x3", out, width, width, 3, count=blocks - (stride > 1)),
        Shape(f"{name} 1x1 up", out, width, wide, residual=True, count=blocks),
        Shape(f"{name} 1x1 down", out, wide, width, count=blocks - 1),
    ]


LAYERS = [
    *stage("1", 56, 64, 64, 3, 1),
    *stage("2", 56, 256, 128, 4, 2),
    *stage("3", 28, 512, 256, 6, 2),
    *stage("4", 14, 1024, 512, 3, 2),
    Shape("stem", 224, 3, 64, 7, 2),
]
TINY = [
    Shape("tiny 1x1", 4, 32, 48, residual=True, count=2),
    Shape("tiny 3x3", 5, 32, 16, 3, 2, relu=False),
    Shape("tiny stem", 9, 3, 16, 7, 2),
]


def candidates(shape: Shape) -> list[ConvTile]:
    """Return the tiles that are tried."""
    channels = 64 if shape.inputs < 32 else shape.inputs
    if channels < 64:
        return [ConvTile(32, 16, 32, 2, 4), ConvTile(16, 32, 32, 2, 4, 16)]
    deep = min(128, channels)
    tiles = [
        ConvTile(128, 64, deep, 3, 8),
        ConvTile(64, 64, deep, 4, 4),
        ConvTile(128, 64, 64, 4, 4, 32, 168),
    ]
    if shape.outputs >= 128:
        tiles += [
            ConvTile(128, 128, deep, 3, 8, 64, 128),
            ConvTile(64, 128, deep, 3, 4, 32, 168),
            ConvTile(128, 128, 64, 4, 8),
        ]
    if shape.outputs >= 256:
        tiles.append(ConvTile(128, 256, deep, 3, 8))
    return tiles


class Operands(NamedTuple):
    """The operands of a shape's variants."""

    x: Codes
    weight: Codes
    bias: Tensor
    residual: Codes | None
    amax: Tensor
    epilogue: Epilogue


def operands(shape: Shape, batch: int, device: str) -> Operands:
    """Return random codes; the range of the output clips a few results."""
    torch.manual_seed(0)

    def integers(*sizes: int) -> Tensor:
        values = 32 * torch.randn(sizes, device=device)
        return values.round().clamp(-127, 127).to(torch.int8).contiguous(memory_format=LAST)

    out = shape.out_size
    x = Codes(integers(batch, shape.inputs, shape.size, shape.size), torch.tensor(127 / 32.0, device=device))
    ranges = 2 + torch.rand(shape.outputs, device=device)
    weight = Codes(integers(shape.outputs, shape.inputs, shape.taps, shape.taps), ranges)
    spread = math.sqrt(shape.inputs * shape.taps**2) * 2.5 * 32 / 127  # about the standard deviation of the sums
    residual = None
    if shape.residual:
        residual = Codes(integers(batch, shape.outputs, out, out), torch.tensor(4 * spread, device=device))
    bias = spread / 4 * torch.randn(shape.outputs, device=device)
    epilogue = Epilogue(-128, 127, 0.0 if shape.relu else -math.inf)
    return Operands(x, weight, bias, residual, torch.tensor(3 * spread, device=device), epilogue)


def int8_call(shape: Shape, o: Operands, tile: ConvTile, dtype: torch.dtype | None) -> Callable[[], ConvResult]:
    """Return a call of the Triton kernel on a shape."""
    if shape.inputs >= 16:
        return lambda: conv_codes(
            o.x, o.weight, o.amax, o.epilogue, shape.geometry,
            bias=o.bias, residual=o.residual, dtype=dtype, tile=tile,
        )  # fmt: skip
    padding = shape.taps // 2
    weight = Codes(stem_filter(o.weight.integers, padding), o.weight.amax)

    def stem() -> ConvResult:
        x = Codes(stem_image(o.x.integers, shape.taps, padding), o.x.amax)
        return conv_codes(x, weight, o.amax, o.epilogue, Geometry(), bias=o.bias, dtype=dtype, tile=tile)

    return stem


def check(shape: Shape, o: Operands, result: ConvResult) -> None:
    """Compare the first and the last image with a float64 convolution.

    Raises:
        ValueError: codes, values or bits differ by more than float32's rounding.
    """
    ends = [0, -1]
    x = values(o.x._replace(integers=o.x.integers[ends]), torch.float64)
    with torch.backends.cudnn.flags(benchmark=False):  # a search is not worth one call
        y = F.conv2d(x, values(o.weight, torch.float64), o.bias.double(), *shape.geometry)
    if o.residual is not None:
        y += values(o.residual._replace(integers=o.residual.integers[ends]), torch.float64)
    steps = y.clamp(min=o.epilogue.lower) / (o.amax.double() / 127)
    rounded = steps.round()
    clamped = rounded.clamp(-128, 127)
    if result.codes is None:
        raise ValueError("the kernel returned no codes")
    codes = result.codes[ends]
    near_tie = (steps % 1 - 0.5).abs() < 1e-3
    wrong = int(((codes - clamped).abs() > near_tie).sum())
    bits = pack(((y > o.epilogue.lower) & (rounded == clamped)).contiguous(memory_format=LAST))
    images = result.codes.shape[0]
    differing = 0.0
    if result.bits is not None:
        differing = (bits != result.bits.reshape(images, -1)[ends].reshape(-1)).double().mean().item()
    off = 0
    if result.value is not None:
        exact = (codes * (o.amax.double() / 127).float()).to(result.value.dtype)
        off = int((result.value[ends] != exact).sum())
    if wrong or off or differing > 1e-3:
        raise ValueError(f"{wrong} codes and {off} values are wrong, {differing:.1e} of the bytes of bits differ")


def values(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the real values of codes."""
    amax = codes.amax.to(dtype)
    return codes.integers.to(dtype) * (amax if amax.dim() == 0 else amax[:, None, None, None]) / codes.high
