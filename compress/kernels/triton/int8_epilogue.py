"""Operations of inference kernels on an exact sum: scale, bias, activations, residual, requantization."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Activations by the number that kernels know them by.
ACTIVATIONS = (
    "none",
    "clip",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
    "gelu_tanh",
    "hard_sigmoid",
    "hard_swish",
    "mish",
    "elu",
    "softplus",
)

_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction bits, so it rounds half to even
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FAR = 1e9  # steps: beyond every grid; infinities are no good as arguments of products


class Residual(NamedTuple):
    """The residual that is added to a product's result: codes with a scale and a zero, or values (1 and 0)."""

    scale: float
    zero: int
    codes: bool


class OutputGrid(NamedTuple):
    """The grid that a result is put on; `scale` is float64, one number or one for each column."""

    scale: Tensor
    zero: int = 0
    low: int = -128
    high: int = 127


class Function(NamedTuple):
    """An activation of `ACTIVATIONS`; bounds of `clip`, `lower` is the slope of `leaky_relu`."""

    kind: str = "none"
    lower: float = -math.inf
    upper: float = math.inf


IDENTITY = Function()


class Vectors(NamedTuple):
    """Tensors of an epilogue, float32.

    Attributes:
        factor, bias: for each column, or single numbers where a kernel says so.
        inverse: reciprocal of the output's scale for each column; None for one number.
    """

    factor: Tensor
    bias: Tensor
    inverse: Tensor | None


class Numbers(NamedTuple):
    """Numbers of an epilogue, of which a kernel is compiled only once.

    Attributes:
        middle_inverse, middle_scale, middle_low, middle_high: of the grid between branch and residual, without zero.
        low, high: limits of the output's grid, without its zero.
    """

    first_lower: float
    first_upper: float
    second_lower: float
    second_upper: float
    middle_inverse: float
    middle_scale: float
    middle_low: float
    middle_high: float
    residual_scale: float
    residual_zero: float
    to_steps: float
    low: float
    high: float
    zero: float


class Kind(NamedTuple):
    """The operations of an epilogue, as constants of a kernel.

    Attributes:
        first, second: activations, by number.
        middle: the branch is rounded before the residual is added.
        residual: 0 none, 1 codes with the zero 0, 2 values, 3 codes with another zero.
        scaled: `y` is real and must be divided by the output's scale.
        has_zero: the output's zero is not 0.
    """

    first: int
    second: int
    middle: bool
    residual: int
    scaled: bool
    has_zero: bool
    writes_codes: bool
    writes_value: bool


class Finish(NamedTuple):
    """An epilogue as the kernels take it."""

    vectors: Vectors
    numbers: Numbers
    kind: Kind

    def to(self, device: torch.device) -> Finish:
        return self._replace(vectors=Vectors(*(None if t is None else t.to(device) for t in self.vectors)))  # type: ignore[arg-type]


class Outputs(NamedTuple):
    """The tensors that a kernel adds and writes, rows of pixels, channels last; pitches are elements between pixels."""

    residual: Any
    codes: Any
    value: Any
    residual_pitch: int = 0
    codes_pitch: int = 0
    value_pitch: int = 0


def finish_of(
    factor: Tensor,
    bias: Tensor,
    *,
    first: Function = IDENTITY,
    middle: OutputGrid | None = None,
    residual: Residual | None = None,
    second: Function = IDENTITY,
    grid: OutputGrid | None = None,
    value: bool = False,
) -> Finish:
    """The arguments of an epilogue, on the CPU.

    - `factor`, `bias`: (O,) float64; real value of one unit of the sum, and what is added to it.
    - `middle`: grid with one scale on which the branch is rounded before the residual is added.
    - `grid`: of the codes that are written; None = none are.
    """
    uniform = grid is not None and grid.scale.numel() == 1
    folded = grid is not None and not value and middle is None and _folds(first, second, residual, uniform)
    unit, inverse, one = 1.0, None, OutputGrid(torch.ones(1, dtype=torch.float64))
    g, m, added = grid or one, middle or one, residual or Residual(1.0, 0, False)
    low, high = float(g.low - g.zero), float(g.high - g.zero)
    if grid is not None and folded:
        factor, bias = factor / grid.scale, bias / grid.scale
        unit = 1.0 / float(grid.scale.reshape(-1)[0])
        last = second if residual is not None or second.kind != "none" else first
        if last.kind == "clip":  # limits of the codes that are limited anyway
            lower, upper = _bounds(last, unit)
            low, high = min(max(low, lower), high), max(min(high, upper), low)
            first, second = (first, IDENTITY) if last is second else (IDENTITY, second)
    elif grid is not None and not uniform:
        inverse = (1.0 / grid.scale).float().reshape(-1).contiguous()
    middle_scale = float(m.scale.reshape(-1)[0])
    numbers = Numbers(
        *_bounds(first, unit),
        *_bounds(second, unit),
        1.0 / middle_scale,
        middle_scale,
        *(float(m.low - m.zero), float(m.high - m.zero)),
        *(added.scale * unit, float(added.zero)),
        1.0 if folded or not uniform else 1.0 / float(g.scale.reshape(-1)[0]),
        *(low, high, float(g.zero)),
    )
    adds = 0 if residual is None else 2 if not residual.codes else 3 if residual.zero else 1
    kind = Kind(
        ACTIVATIONS.index(first.kind),
        ACTIVATIONS.index(second.kind),
        middle is not None,
        adds,
        grid is not None and not folded,
        g.zero != 0,
        grid is not None,
        value,
    )
    vectors = Vectors(factor.reshape(-1).float().contiguous(), bias.reshape(-1).float().contiguous(), inverse)
    return Finish(vectors, numbers, kind)


def _folds(first: Function, second: Function, residual: Residual | None, uniform: bool) -> bool:
    """True if the epilogue may be computed in steps of the output."""
    functions = (first, second)
    homogeneous = all(f.kind in {"none", "clip", "leaky_relu"} for f in functions)
    bounded = any(f.kind == "clip" and math.isfinite(b) and b for f in functions for b in (f.lower, f.upper))
    return homogeneous and (uniform or not (bounded or residual is not None))


def _bounds(function: Function, unit: float) -> tuple[float, float]:
    if function.kind == "leaky_relu":
        return function.lower, 0.0
    lower, upper = (max(-_FAR, min(_FAR, bound * unit)) for bound in (function.lower, function.upper))
    return lower, upper


@triton.jit
def activate(x, lower, upper, KIND: tl.constexpr):
    """An activation, by its number in `ACTIVATIONS`; `lower` is the slope of leaky ReLU."""
    if KIND == 1:
        x = tl.minimum(tl.maximum(x, lower), upper)
    elif KIND == 2:
        x = tl.where(x < 0.0, x * lower, x)
    elif KIND == 3:
        x = _logistic(x)
    elif KIND == 4:
        x = 2.0 * _logistic(2.0 * x) - 1.0
    elif KIND == 5:
        x = x * _logistic(x)
    elif KIND == 6:
        x = _gelu(x)
    elif KIND == 7:  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        x = x * _logistic(x * (1.5957691216057308 + 0.07135481282553487 * x * x))
    elif KIND == 8:
        x = tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
    elif KIND == 9:
        x = x * tl.minimum(tl.maximum(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
    elif KIND == 10:
        x = x * (2.0 * _logistic(2.0 * _softplus(x)) - 1.0)
    elif KIND == 11:
        x = tl.where(x < 0.0, tl.exp2(x * _LOG2_E) - 1.0, x)
    elif KIND == 12:
        x = _softplus(x)
    return x


@triton.jit
def _logistic(x):
    """1 / (1 + exp(-x)); the square of a reciprocal root is two instructions, a division eight."""
    root = tl.rsqrt(1.0 + tl.exp2(x * (0.0 - _LOG2_E)))
    return root * root


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(tl.abs(x) * (0.0 - _LOG2_E))) * _LN_2


@triton.jit
def _gelu(x):
    """The product of x and the normal distribution function, to 3e-7: max(x, 0) less |x| times the tail beyond |x|."""
    far = tl.minimum(tl.abs(x), 5.6)
    power = 3.309275416540913e-05 * far - 0.0007692191284149885
    power = ((power * far + 0.008080714382231236) * far - 0.05341210216283798) * far - 0.4587709903717041
    power = (power * far - 1.1512017250061035) * far - 0.999993085861206
    return tl.maximum(x, 0.0) - far * tl.exp2(power)


@triton.jit
def on_integers(steps, low, high):
    """The nearest integers from `low` to `high`, half to even, as float32."""
    return (tl.minimum(tl.maximum(steps, low), high) + _ROUNDS) - _ROUNDS


@triton.jit
def to_codes(steps, low, high, zero, HAS_ZERO: tl.constexpr):
    """Steps of a grid, float32, rounded half to even, limited without the zero, and moved to the zero; int8."""
    steps = tl.minimum(tl.maximum(steps, low), high)
    codes = (steps + _ROUNDS).to(tl.int32, bitcast=True)  # the integer is in the lowest bits
    if HAS_ZERO:
        codes += tl.cast(zero, tl.int32)
    return codes.to(tl.int8)


@triton.jit
def finished(total, added, factor, bias, vectors, column, inside, numbers, KIND: tl.constexpr):
    """(real values, steps of the output) of a tile of sums; both are steps unless KIND.scaled.

    `total` and `added` (what a residual holds) are (rows, columns), `factor` and `bias` (1, columns) or (rows, 1).
    """
    n = numbers
    y = activate(total.to(tl.float32) * factor + bias, n.first_lower, n.first_upper, KIND.first)
    if KIND.middle:
        y = on_integers(y * n.middle_inverse, n.middle_low, n.middle_high) * n.middle_scale
    if KIND.residual == 3:
        y += (added.to(tl.float32) - n.residual_zero) * n.residual_scale
    elif KIND.residual > 0:
        y += added.to(tl.float32) * n.residual_scale
    y = activate(y, n.second_lower, n.second_upper, KIND.second)
    steps = y
    if KIND.scaled:
        if vectors.inverse is not None:
            steps = y * tl.load(vectors.inverse + column, mask=inside, other=1.0)[None, :]
        else:
            steps = y * n.to_steps
    return y, steps


@triton.jit
def finish_tile(
    total,
    added,
    row,
    row_there,
    first_column,
    columns,
    vectors,
    outputs,
    numbers,
    KIND: tl.constexpr,
    LOADED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """Finish a tile of sums (ROWS, COLUMNS) and write it, PART columns at a time.

    `added` is the residual, if it is LOADED; `row` (ROWS,) int64 are pixels; `columns` is the first column not there.
    """
    if COLUMNS > PART:
        left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
        added_left = added
        added_right = added
        if LOADED:
            added_left, added_right = tl.split(tl.permute(tl.reshape(added, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
        finish_tile(
            left,
            added_left,
            row,
            row_there,
            first_column,
            columns,
            vectors,
            outputs,
            numbers,
            KIND,
            LOADED,
            ROWS,
            COLUMNS // 2,
            PART,
        )
        finish_tile(
            right,
            added_right,
            row,
            row_there,
            first_column + COLUMNS // 2,
            columns,
            vectors,
            outputs,
            numbers,
            KIND,
            LOADED,
            ROWS,
            COLUMNS // 2,
            PART,
        )
    else:
        column = first_column + tl.arange(0, COLUMNS)
        inside = column < columns
        there = row_there[:, None] & inside[None, :]
        factor = tl.load(vectors.factor + column, mask=inside, other=0.0)[None, :]
        bias = tl.load(vectors.bias + column, mask=inside, other=0.0)[None, :]
        if not LOADED:
            added = residual_of(added, row, column[None, :], there, outputs, KIND)
        y, steps = finished(total, added, factor, bias, vectors, column, inside, numbers, KIND)
        write_tile(y, steps, row, column[None, :], there, outputs, numbers, KIND)


@triton.jit
def residual_of(total, row, column, there, outputs, KIND: tl.constexpr):
    """The residual of a tile, see `write_tile`; `total` without one."""
    added = total
    if KIND.residual > 0:
        added = tl.load(outputs.residual + row[:, None] * outputs.residual_pitch + column, mask=there, other=0)
    return added


@triton.jit
def write_tile(y, steps, row, column, there, outputs, numbers, KIND: tl.constexpr):
    """Write a finished tile as codes, as values, or both; `row` (rows,) int64, `column` (1 or rows, columns)."""
    if KIND.writes_codes:
        codes = to_codes(steps, numbers.low, numbers.high, numbers.zero, KIND.has_zero)
        tl.store(outputs.codes + row[:, None] * outputs.codes_pitch + column, codes, mask=there)
    if KIND.writes_value:
        value = y.to(outputs.value.dtype.element_ty)
        tl.store(outputs.value + row[:, None] * outputs.value_pitch + column, value, mask=there)


# The constants of a function count in Triton's key of a kernel that calls it only if its own key was asked for before.
# So it is asked for here, and every process finds the kernels that another one compiled ahead.
_FIRST_KEY = getattr(finish_tile, "cache_key", "")
