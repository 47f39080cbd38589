"""Metrics: name, unit, direction, and a meter as torchmetrics has it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from compress.errors import DataError
from compress.support.text import MISSING, scored

Direction = Literal["higher", "lower"]

Figures = dict[str, float]  # values by name, such as {"miou": 0.61, "iou_road": 0.93}; shares are 0 to 1

_TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "miou": "mIoU",
    "map": "mAP",
    "map50": "mAP50",
    "psnr": "PSNR",
    "psnr_luminance": "PSNR of luminance",
    "ssim": "SSIM",
}

T = TypeVar("T")


class Meter(Protocol):
    """Accumulates over batches; several processes need `merge_state(other)`."""

    def update(self, outputs: Any, targets: Any, /) -> None:
        """Outputs of `TaskMetric.select`, and targets."""

    def compute(self) -> object:
        """A number, or numbers by name."""


def whole(outputs: T) -> T:
    return outputs


@dataclass(frozen=True, kw_only=True)
class TaskMetric:
    """The metric by which a network is judged.

    Attributes:
        name: key among a meter's figures, such as `miou`.
        unit: `%` for shares from 0 to 1.
        units: of further figures by name that have another unit.
        direction: `higher` or `lower` is better.
        classes: decided at each place, by which networks agree; or None.
    """

    name: str
    make: Callable[[], Meter]
    unit: str = "%"
    direction: Direction = "higher"
    select: Callable[[Any], Any] = whole
    classes: Callable[[Any], Any] | None = None
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return metric_title(self.name)

    def shown(self, value: float) -> float:
        return shown(value, self.unit)

    def text(self, value: float) -> str:
        return score_text(value, self.unit)

    def drop(self, reference: float, value: float) -> float:
        return self.shown(reference - value if self.direction == "higher" else value - reference)

    @property
    def amount(self) -> str:
        return amount_of(self.unit)

    def figures(self, meter: Meter) -> Figures:
        values = meter.compute()
        values = dict(values) if isinstance(values, Mapping) else {self.name: values}
        if self.name not in values:
            raise DataError(f"the metric returned {', '.join(map(str, values)) or 'nothing'}; it must hold {self.name}")
        ordered = {self.name: values[self.name], **values}
        return {str(name): _number(str(name), value) for name, value in ordered.items()}


def amount_of(unit: str) -> str:
    return "points" if unit == "%" else unit


def metric_title(name: str) -> str:
    """A figure's name in reports.

    >>> metric_title("miou"), metric_title("pixel_accuracy")
    ('mIoU', 'pixel accuracy')
    """
    return _TITLES.get(name, name.replace("_", " "))


def shown(value: float, unit: str) -> float:
    return 100 * value if unit == "%" else value


def score_text(value: float | None, unit: str) -> str:
    """Return a value in the unit of reports with its unit, or n/a.

    >>> score_text(0.6125, "%"), score_text(12.5, "px"), score_text(None, "%")
    ('61.25 %', '12.50 px', 'n/a')
    """
    return MISSING if value is None else f"{scored(shown(value, unit), unit)} {unit}".strip()


@dataclass
class MeanOf:
    """Weighted by batch sizes."""

    function: Callable[[Any, Any], Any]
    total: float = 0.0
    count: int = field(default=0)

    def update(self, outputs: Any, targets: Any) -> None:
        size = len(targets)
        self.total += _number(getattr(self.function, "__name__", "metric"), self.function(outputs, targets)) * size
        self.count += size

    def compute(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge_state(self, other: MeanOf) -> None:
        self.total, self.count = self.total + other.total, self.count + other.count


def task_metric(given: Any, *, select: Callable[[Any], Any] = whole) -> TaskMetric:
    """The metric of the user.

    Args:
        given: a `TaskMetric`; a meter, copied for each use; a class or function without arguments that makes one; or a
            function of (outputs, targets). Its `name`, `unit` and `direction` count, else its name, `%`, and higher (or
            torchmetrics' `higher_is_better`).
        select: of outputs, for the meter.
    """
    if isinstance(given, TaskMetric):
        return given
    if hasattr(given, "update") and hasattr(given, "compute") and not isinstance(given, type):
        meter = given

        def make() -> Meter:
            fresh = copy.deepcopy(meter)
            if hasattr(fresh, "reset"):
                fresh.reset()
            return fresh

    elif isinstance(given, type) and hasattr(given, "update"):
        make = given
    elif callable(given):
        made = _without_arguments(given)
        if isinstance(made, TaskMetric):
            return made
        if made is not None:
            make, given = given, made
        else:
            function = given

            def make() -> Meter:
                return MeanOf(function)

    else:
        raise DataError(
            f"metric is {given!r}: give a function of (outputs, targets) that returns a number, or an object with "
            "update(outputs, targets) and compute()"
        )
    lower = getattr(given, "higher_is_better", None) is False
    name = getattr(given, "name", None) or getattr(given, "__name__", type(given).__name__).lower()
    return TaskMetric(
        name=str(name),
        make=make,
        unit=str(getattr(given, "unit", "%")),
        direction=getattr(given, "direction", "lower" if lower else "higher"),
        select=select,
    )


def _without_arguments(function: Callable[..., Any]) -> TaskMetric | Meter | None:
    """What a function makes without arguments; None if it needs some."""
    code = getattr(function, "__code__", None)
    needed = 0 if code is None else code.co_argcount - len(getattr(function, "__defaults__", None) or ())
    if needed:
        return None
    made = function()
    if isinstance(made, TaskMetric) or (hasattr(made, "update") and hasattr(made, "compute")):
        return made
    raise DataError(
        f"metric {function!r} returned a {type(made).__name__}: it must return an object with update and "
        "compute, or take (outputs, targets) and return a number"
    )


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the metric {name} is {value!r:.100}: it must be a number") from error
    if math.isnan(number):
        raise DataError(f"the metric {name} is NaN: nothing was measured, or the outputs hold NaN")
    return number


def decibel(signal: float, noise: float) -> float:
    """The ratio of two powers in dB; infinite without noise, -inf without signal."""
    if not noise:
        return math.inf
    # a difference of logarithms: the quotient itself may overflow or vanish
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf
