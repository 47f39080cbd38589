"""The steps of a plan, as data: each one launch or a few, over named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from compress.engines.cuda.plan.activation import NONE, Activation
from compress.engines.cuda.plan.quantizers import Grid

Pair = tuple[int, int]
# ((above, below), (left, right)).
Padding = tuple[Pair, Pair]
NO_PADDING: Padding = ((0, 0), (0, 0))


@dataclass(frozen=True)
class Output:
    """The outputs of a step: tensor of codes on `grid`, of floating-point values, or both; "" = none."""

    codes: str = ""
    grid: Grid | None = None
    value: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.codes, self.value) if name)


@dataclass(frozen=True)
class Source:
    """An input of a step: codes on a grid, or floating-point values (None); "" = nothing."""

    name: str = ""
    grid: Grid | None = None


NOTHING = Source()


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One operation of a plan, with the names of the ONNX nodes that it computes."""

    name: str
    origins: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def writes(self) -> tuple[str, ...]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Epilogue:
    """The operations on the exact sums of a product before they are written.

        y = first(sum * factor + bias)
        y = y rounded to the grid `middle`
        y = second(y + residual)

    Attributes:
        factor, bias: for each output channel; float64.
        middle: None = the branch is not rounded.
        residual: of the shape of the result.
    """

    factor: Tensor
    bias: Tensor
    first: Activation = NONE
    middle: Grid | None = None
    residual: Source = NOTHING
    second: Activation = NONE
    out: Output = Output()


@dataclass(frozen=True, kw_only=True, eq=False)
class Product(Step):
    """A convolution, or a matrix product, of codes with a constant int8 weight; the zero of `x` also pads."""

    x: Source
    weight: Tensor
    epilogue: Epilogue

    @property
    def reads(self) -> tuple[str, ...]:
        residual = self.epilogue.residual.name
        return (self.x.name, residual) if residual else (self.x.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        return self.epilogue.out.names


@dataclass(frozen=True, kw_only=True, eq=False)
class Convolution(Product):
    """A convolution of codes (N, C, H, W) with (O, C / groups, R, S); strides are (vertical, horizontal)."""

    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: Padding = NO_PADDING
    groups: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(Product):
    """A matrix product of codes (..., K) with a weight (O, K); channels are the last axis, or 1 of (N, O, H, W)."""

    axis: int = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed(Step):
    """A step of one or two operands that writes codes, values or both."""

    x: Source
    out: Output

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        return self.out.names


@dataclass(frozen=True, kw_only=True, eq=False)
class MaxPool(Computed):
    """Maxima of windows of codes (N, C, H, W), on the same grid."""

    kernel: Pair
    stride: Pair
    dilation: Pair = (1, 1)
    padding: Padding = NO_PADDING


@dataclass(frozen=True, kw_only=True, eq=False)
class AveragePool(Computed):
    """Averages of windows of codes (N, C, H, W); `counts_padding` as zeros, else over what lies in the image."""

    kernel: Pair
    stride: Pair
    padding: Padding = NO_PADDING
    counts_padding: bool = False


Combination = Literal["none", "add", "sub", "mul"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Elementwise(Computed):
    """activation(x combined with y), element by element; also what quantizes, dequantizes and requantizes."""

    y: Source = NOTHING
    combination: Combination = "none"
    activation: Activation = NONE

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x.name, self.y.name) if self.y.name else (self.x.name,)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerNorm(Computed):
    """Normalization over the last axis; weight and bias are float32, None for ones and zeros."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention(Computed):
    """softmax(scale q k' + mask) v of codes, whose zeros are 0; the probabilities are rounded to a grid.

    Attributes:
        x: queries (..., L, D).
        k, v: keys (..., D, S) and values (..., S, E); queries and keys may both be without codes.
        mask: float32, broadcasts; its first axis may be a divisor of that of the scores: then it repeats. None = none.
        probabilities: grid of the softmax's result.
    """

    k: Source
    v: Source
    scale: float
    mask: Tensor | None
    probabilities: Grid

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x.name, self.k.name, self.v.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledSum(Computed):
    """The sum over points of what grids sample between pixels, times a weight (deformable attention): (N, C, L).

    Attributes:
        x: weights (N, 1, L, points of all images).
        images: values (N, C, H, W), of several sizes; beyond them are zeros.
        grids: places (N, L, points, 2) in each image, in -1 to 1 (ONNX's GridSample).
        aligned: -1 and 1 are the middles of the outermost pixels, not their edges.
    """

    images: tuple[str, ...]
    grids: tuple[str, ...]
    aligned: bool

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x.name, *self.images, *self.grids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation(Step):
    """An ONNX operator on tensors; a `Tensor` in the place of a constant, None for an input that is left out."""

    op: str
    inputs: tuple[str | Tensor | None, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if isinstance(name, str))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(name for name in self.outputs if name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Move(Operation):
    """An operation that only moves values; nothing is launched for a view. `fill` is what a Pad of codes pads with."""

    fill: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class FloatOperation(Operation):
    """An operation in floating point, by torch; `op` may be `Activation`."""


@dataclass(frozen=True, kw_only=True)
class PlanTensor:
    """A tensor of a plan: int8 for codes; values have the plan's type; indices and booleans keep theirs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A network as steps.

    Attributes:
        outputs: the tensor that holds each of the network's outputs, by the file's name.
        dtype: floating-point type of what is not quantized.
        constants: tensors known beforehand that a step reads as an operand.
    """

    steps: tuple[Step, ...]
    tensors: Mapping[str, PlanTensor]
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]
    dtype: torch.dtype = torch.float16
    constants: Mapping[str, Tensor] = field(default_factory=dict)
