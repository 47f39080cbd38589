"""Windows: the positions along one axis on which a unit depends, before borders clip them, in integer arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm

LONGEST_PERIOD = 4096
"""Limit of a period; a resize between two large sizes without a common divisor exceeds it and has no window."""

LONGEST_FIT = 32
"""Longest period that `fit` tries: shuffles and repeats have small factors."""


@dataclass(frozen=True)
class Window:
    """Unit m * period + r depends on positions first[r] + m * advance to last[r] + m * advance, in steps of `step`.

    Attributes:
        first, last: one position for each phase; last < first if a phase depends on nothing.
        advance: positions from one period to the next.
        step: distance of neighbouring positions (a dilation).

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
        """Number of units after which the pattern repeats."""
        return len(self.first)

    @property
    def size(self) -> int:
        """Positions from first to last, the most of all phases."""
        return max(0, *(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def smallest(self) -> int:
        """Smallest size of all phases; 0 if some depend on nothing."""
        return max(0, min(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def stride(self) -> Fraction:
        """Positions from one unit to the next; below 1 after upsampling."""
        return Fraction(self.advance, self.period)

    @property
    def padding(self) -> Fraction:
        """The largest padding of all phases: `start(u) = u * stride - padding`."""
        return max(r * self.stride - a for r, a in enumerate(self.first))

    def at(self, unit: int) -> tuple[int, int]:
        """A unit's first and last position, without borders."""
        m, r = divmod(unit, self.period)
        return self.first[r] + m * self.advance, self.last[r] + m * self.advance

    def centre(self, unit: int) -> Fraction:
        """The middle of a unit's window."""
        return Fraction(sum(self.at(unit)), 2)


IDENTITY = Window((0,), (0,), 1)


def sliding(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """The window of a convolution or pool with `padding` in front."""
    return Window((-padding,), (-padding + (kernel - 1) * dilation,), stride, dilation if kernel > 1 else 1)


def transposed(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """The window of a transposed convolution.

    Unit u depends on the whole numbers (u + padding - j * dilation) / stride, 0 <= j < kernel.
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
    """The window of units that depend on `reads(u)` and advance by `ratio`; None beyond `LONGEST_PERIOD`."""
    period = ratio.denominator
    if period > LONGEST_PERIOD:
        return None
    pairs = [reads(u) for u in range(period)]
    return reduced(Window(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), ratio.numerator))


def proportional(inputs: int, outputs: int) -> Window | None:
    """The window of adaptive pooling: unit u depends on floor(u * in / out) to ceil((u + 1) * in / out) - 1."""
    ratio = Fraction(inputs, outputs)
    return rational(ratio, lambda u: (floor(u * ratio), ceil((u + 1) * ratio) - 1))


def interpolated(ratio: Fraction, *, reach: int, offset: Fraction, antialias: bool = False) -> Window | None:
    """The window of linear (`reach` 1) or cubic (`reach` 2) interpolation at source = u * ratio + offset.

    With antialias all positions nearer than `reach * max(ratio, 1)` have weight.
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
    """The window of nearest resizing: floor(u * ratio), or floor((u + 1/2) * ratio) if `exact`."""

    def reads(u: int) -> tuple[int, int]:
        position = floor((u + Fraction(1, 2)) * ratio) if exact else floor(u * ratio)
        return position, position

    return rational(ratio, reads)


def through(field: Window, reads: Window) -> Window | None:
    """The field of an operation's units from that of its inputs and its own window; None beyond `LONGEST_PERIOD`.

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
    """The window of the same unit of two branches; None if their strides differ."""
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


def centre_distance(left: Window, right: Window) -> Fraction:
    """The mean distance of two windows' centres over a period."""
    period = lcm(left.period, right.period)
    return abs(sum((left.centre(u) - right.centre(u) for u in range(period)), Fraction(0))) / period


def reduced(window: Window) -> Window:
    """The same window with the shortest period."""
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
    """The window with the shortest period that gives the spans of units 0, 1, ... in `size` positions, or None.

    At the borders, spans lack the positions outside (last < first: the span is empty).

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
