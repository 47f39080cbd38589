"""One measured number with its name, variant, engine, unit and method; `metrics.json` is a list of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from compress.errors import RunError, near_misses
from compress.support.meters import metric_title
from compress.support.text import scored

Status = Literal["complete", "partial", "unavailable"]

# Speed over that of float where the same engine runs it fastest, turn by turn, and the ends of its 95 % interval.
PAIRED = ("speed", "speed_low", "speed_high")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a run.

    Attributes:
        name: quantity, such as `top1` or `p50_ms`.
        variant: of the model: `float`, `ptq`, `qat`, ...
        engine: label of the engine, such as `openvino (f32)`; "" for a number of a file.
        batch_size: images of one run; None if it does not matter.
        value: in `unit`; infinite only if that is its meaning.
        unit: `%`, `ms`, `images/s`, `bytes`, `dB`, ...
        status: `complete`; `partial`, with a reason; `unavailable`, with a reason and no value.
        reason: why it is not complete; "" if it is.
        direction: `higher` or `lower` is better, for the figure that judges the run's networks; "" for others and for
            `top1`, which judges classifiers.

    Raises:
        RunError: value and status contradict each other, a reason is missing, or the value is NaN.
    """

    name: str
    variant: str
    engine: str
    batch_size: int | None = None
    value: float | None
    unit: str
    method: str = ""
    status: Status = "complete"
    reason: str = ""
    direction: str = ""

    def __post_init__(self) -> None:
        where = f"metric {self.name!r} of {self.variant!r} on {self.engine!r}"
        if self.status not in get_args(Status):
            raise RunError(f"{where}: status is {self.status!r} (one of: {', '.join(get_args(Status))})")
        if (self.value is None) != (self.status == "unavailable"):
            raise RunError(f"{where}: value is {self.value} with status {self.status!r}: None goes with 'unavailable'")
        if self.status != "complete" and not self.reason:
            raise RunError(f"{where}: status {self.status!r} needs a reason")
        if self.value is not None and math.isnan(self.value):
            raise RunError(f"{where}: value is NaN: make it 'unavailable' with the reason")
        if self.batch_size is not None and self.batch_size < 1:
            raise RunError(f"{where}: batch_size is {self.batch_size}: it must be 1 or more, or None")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite value becomes "inf" or "-inf"."""
        row = asdict(self)
        if self.value is not None:
            row["value"] = float(self.value) if math.isfinite(self.value) else str(float(self.value))
        if not self.direction:
            del row["direction"]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Metric:
        known = [field.name for field in fields(cls)]
        for key in row:
            if key not in known:
                raise RunError(f"metric {dict(row)!s:.300}: unknown key {key!r}{near_misses(key, known)}")
        missing = [key for key in ("name", "variant", "engine", "value", "unit") if key not in row]
        if missing:
            raise RunError(f"metric {dict(row)!s:.300}: missing {', '.join(missing)}")
        values = {**row, "value": _number(row["value"], row)}
        for key in ("name", "variant", "engine", "unit", "method", "status", "reason", "direction"):
            if not isinstance(values.get(key, ""), str):
                raise RunError(f"metric {dict(row)!s:.300}: {key} is {values[key]!r}: it must be text")
        batch_size = values.get("batch_size")
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise RunError(f"metric {dict(row)!s:.300}: batch_size is {batch_size!r}: it must be an integer or null")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The figure that judges the networks of a run: its name, its unit in reports, and what is better."""

    name: str = "top1"
    unit: str = "%"
    direction: str = "higher"

    @property
    def title(self) -> str:
        return metric_title(self.name)

    def text(self, value: float) -> str:
        return f"{scored(value, self.unit)} {self.unit}".rstrip()

    @property
    def column(self) -> str:
        return f"{self.title} {self.unit}".strip()


def judged_by(metrics: Iterable[Metric]) -> Judged:
    """The figure that judges a run: the first with a direction, else top-1; without both, one with no name."""
    metrics = tuple(metrics)
    found = next((m for m in metrics if m.direction), None)
    if found is not None:
        return Judged(name=found.name, unit=found.unit, direction=found.direction)
    known = not metrics or any(m.name == Judged.name for m in metrics)
    return Judged() if known else Judged(name="metric", unit="")


def _number(value: Any, row: Mapping[str, Any]) -> float | None:
    if value in ("inf", "-inf"):
        return float(value)
    large = isinstance(value, int) and abs(value) >= 2**1024  # no float holds it
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or large):
        raise RunError(f"metric {dict(row)!s:.300}: value is {value!r:.50}: it must be a number, 'inf', '-inf' or null")
    return None if value is None else float(value)
