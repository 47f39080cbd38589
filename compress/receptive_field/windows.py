"""Windows: which positions along one axis a unit reads, exactly, before any border clips them.

Unit `u` of an operation's output reads positions `first .. last` of its input, in steps. For a convolution both grow
by `stride` from one unit to the next. For a transposed convolution or a resize the pattern repeats only every few
units, while the positions advance by a whole number: a window therefore holds one (first, last) for each *phase* of a
period. Convolutions have a period of 1. Windows compose (`through`), and branches that meet unite (`unite`), so a
network's receptive field is a window too, whose positions are input pixels. All of it is integer arithmetic.

An affine formula (size, stride, padding) cannot say this: it gives a wrong size behind every transposed convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm

LONGEST_PERIOD = 4096
"""A longer pattern, as of a resize between two large sizes without a common divisor, is not kept."""

LONGEST_FIT = 32
"""Periods that `fit` tries: those of shuffles and repeats, whose factors are small."""


@dataclass(frozen=True)
class Window:
    """Unit m * period + r reads positions first[r] + m * advance to last[r] + m * advance, in steps of `step`.

    Attributes:
        first, last: one position for each phase; last < first where a phase reads nothing.
        advance: positions from one period to the next.
        step: distance of neighbouring positions that are read (a dilation).

    >>> conv = sliding(3, stride=2, padding=1)
    >>> conv.at(0), conv.at(5), conv.size, conv.stride, conv.padding
    ((-1, 1), (9, 11), 3, Fraction(2, 1), Fraction(1, 1))
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    advance: int
    step: int = 1

    @property
    def period(self) -> int:
        """Units after which the pattern repeats."""
        return len(self.first)

    @property
    def size(self) -> int:
        """Positions from the first to the last that a unit reads; the largest of all phases."""
        return max(0, *(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def smallest(self) -> int:
        """The least size of all phases; 0 where some units read nothing."""
        return max(0, min(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def stride(self) -> Fraction:
        """Positions from one unit to the next (others say jump); below 1 after upsampling."""
        return Fraction(self.advance, self.period)

    @property
    def padding(self) -> Fraction:
        """Positions before the input at which unit 0's window starts, so that `start(u) = u * stride - padding`.

        Where phases differ, that of the phase that starts earliest.
        """
        return max(r * self.stride - a for r, a in enumerate(self.first))

    def at(self, unit: int) -> tuple[int, int]:
        """(first, last) position that a unit reads, on an axis without borders."""
        m, r = divmod(unit, self.period)
        return self.first[r] + m * self.advance, self.last[r] + m * self.advance

    def centre(self, unit: int) -> Fraction:
        """Middle of a unit's window."""
        return Fraction(sum(self.at(unit)), 2)


IDENTITY = Window((0,), (0,), 1)


def sliding(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """Window of a convolution or a pool; `padding` is that before the first position."""
    return Window((-padding,), (-padding + (kernel - 1) * dilation,), stride, dilation if kernel > 1 else 1)


def transposed(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """Window of a transposed convolution.

    Input i reaches output u where u = i * stride - padding + j * dilation for a tap 0 <= j < kernel. So u reads the
    inputs i = (u + padding - j * dilation) / stride that are whole numbers.
    """
    first, last = [], []
    for u in range(stride):
        reached = [
            (u + padding - j * dilation) // stride for j in range(kernel) if (u + padding - j * dilation) % stride == 0
        ]
        first.append(min(reached, default=0))
        last.append(max(reached, default=-1))
    return Window(tuple(first), tuple(last), 1, dilation // gcd(stride, dilation))


def rational(ratio: Fraction, reads: Callable[[int], tuple[int, int]]) -> Window | None:
    """Window of an operation whose unit u reads `reads(u)`, a pattern that advances by `ratio` positions a unit.

    None when the pattern is longer than `LONGEST_PERIOD`.
    """
    period = ratio.denominator
    if period > LONGEST_PERIOD:
        return None
    pairs = [reads(u) for u in range(period)]
    return reduced(Window(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), ratio.numerator))


def proportional(inputs: int, outputs: int) -> Window | None:
    """Window of adaptive pooling: unit u reads floor(u * in / out) to ceil((u + 1) * in / out) - 1."""
    ratio = Fraction(inputs, outputs)
    return rational(ratio, lambda u: (floor(u * ratio), ceil((u + 1) * ratio) - 1))


def interpolated(ratio: Fraction, *, reach: int, offset: Fraction, antialias: bool = False) -> Window | None:
    """Window of linear (`reach` 1) or cubic (`reach` 2) interpolation at source = u * ratio + offset.

    A source that falls on a position has weight on that position alone. With antialias the kernel widens with the
    ratio, and positions strictly nearer than `reach * max(ratio, 1)` have weight.
    """

    def reads(u: int) -> tuple[int, int]:
        source = u * ratio + offset
        if antialias:
            wide = reach * max(ratio, Fraction(1))
            return floor(source - wide) + 1, ceil(source + wide) - 1
        if source.denominator == 1:
            return int(source), int(source)
        return floor(source) - reach + 1, floor(source) + reach

    return rational(ratio, reads)


def nearest(ratio: Fraction, *, exact: bool = False) -> Window | None:
    """Window of nearest-neighbour resizing: floor(u * ratio), or floor((u + 1/2) * ratio) when `exact`."""

    def reads(u: int) -> tuple[int, int]:
        position = floor((u + Fraction(1, 2)) * ratio) if exact else floor(u * ratio)
        return position, position

    return rational(ratio, reads)


def through(field: Window, reads: Window) -> Window | None:
    """The field of an operation's units, given the field of the units that they read.

    None when the pattern is longer than `LONGEST_PERIOD`.

    >>> through(sliding(3), sliding(3, stride=2, padding=1)).size
    5
    """
    phases = reads.period * field.period // gcd(field.period, reads.advance)
    if phases > LONGEST_PERIOD:
        return None
    spans = [_span(field, reads, u) for u in range(phases)]
    advance = reads.advance * phases // reads.period * field.advance // field.period
    return reduced(Window(tuple(a for a, _ in spans), tuple(b for _, b in spans), advance))


def _span(field: Window, reads: Window, unit: int) -> tuple[int, int]:
    first, last = reads.at(unit)
    spans = [field.at(v) for v in range(first, last + 1, reads.step)]
    spans = [(a, b) for a, b in spans if a <= b]
    return (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0, -1)


def unite(left: Window, right: Window) -> Window | None:
    """The field of a unit that reads the same unit of two branches; None when their strides differ."""
    if left.stride != right.stride:
        return None
    period = lcm(left.period, right.period)
    if period > LONGEST_PERIOD:
        return None
    spans = [_hull(left.at(u), right.at(u)) for u in range(period)]
    advance = left.advance * period // left.period
    return reduced(Window(tuple(a for a, _ in spans), tuple(b for _, b in spans), advance))


def _hull(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    if left[0] > left[1] or right[0] > right[1]:
        return right if left[0] > left[1] else left
    return min(left[0], right[0]), max(left[1], right[1])


def apart(left: Window, right: Window) -> Fraction:
    """How far apart the centres of two windows of one stride are, in positions: the mean over a period.

    The mean, since the units of a windowed attention see one window whose centre is not theirs, and none is displaced.
    """
    period = lcm(left.period, right.period)
    return abs(sum((left.centre(u) - right.centre(u) for u in range(period)), Fraction(0))) / period


def reduced(window: Window) -> Window:
    """The same window with the shortest period that says it."""
    for period in range(1, window.period):
        if window.period % period or window.advance * period % window.period:
            continue
        advance = window.advance * period // window.period
        shifted = [(window.at(r + period), window.at(r)) for r in range(window.period)]
        if all(_same(a, (b[0] + advance, b[1] + advance)) for a, b in shifted):
            return Window(window.first[:period], window.last[:period], advance, window.step)
    return window


def _same(left: tuple[int, int], right: tuple[int, int]) -> bool:
    return left == right or (left[0] > left[1] and right[0] > right[1])


def fit(first: Sequence[int], last: Sequence[int], size: int) -> Window | None:
    """The window with the shortest period that explains what units 0, 1, ... read of `size` positions, or None.

    At the borders, positions that are not there are missing from what is read (last < first: nothing at all is).

    >>> fit([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], 3).stride
    Fraction(1, 2)
    """
    count = len(first)
    for period in range(1, min(count // 2, LONGEST_FIT) + 1):
        middle = (count - period - 1) // 2
        advance = first[middle + period] - first[middle]
        if advance <= 0:
            continue
        spans = {
            u % period: (first[u] - u // period * advance, last[u] - u // period * advance)
            for u in range(middle, middle + period)
        }
        window = Window(tuple(spans[r][0] for r in range(period)), tuple(spans[r][1] for r in range(period)), advance)
        clipped = ((max(a, 0), min(b, size - 1)) for a, b in map(window.at, range(count)))
        if all(_same(got, found) for got, found in zip(clipped, zip(first, last, strict=True), strict=True)):
            return window
    return None
