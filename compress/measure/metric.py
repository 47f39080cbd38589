"""One measured number with all that makes it mean something: what, of which variant, on which engine, how.

`metrics.json` of a run folder is a list of these. A number that could not be measured is kept as `unavailable`
with its reason, so that a report never shows a blank or a zero in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from compress.errors import RunError, near_misses

Status = Literal["complete", "partial", "unavailable"]

METRIC_NAMES = (
    "top1",
    "top5",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "images_per_s",
    "file_bytes",
    "weight_bytes",
    "agreement",
    "sqnr_db",
)
"""The names that the tables of a report know; other names are listed as they are."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a run.

    Attributes:
        name: what was measured, such as `top1` or `p50_ms` (`METRIC_NAMES`).
        variant: of the model: `float`, `ptq`, `qat`, ...
        engine: label of what ran it, such as `openvino (f32)`; "" for what belongs to a file and to no engine.
        batch_size: images of one run; None where it does not matter.
        value: the number, in `unit`; infinite only where that is its meaning (the SQNR of equal signals).
        unit: `%`, `ms`, `images/s`, `bytes`, `dB`, ...
        method: how it was measured, in words.
        status: `complete`; `partial`, with a reason; `unavailable`, with a reason and no value.
        reason: why it is not complete; "" when it is.

    Raises:
        RunError: a value and a status that contradict each other, a missing reason, or NaN.
    """

    name: str
    variant: str
    engine: str
    value: float | None
    unit: str
    batch_size: int | None = None
    method: str = ""
    status: Status = "complete"
    reason: str = ""

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
        """Plain JSON values in the order in which a reader wants them; an infinite value becomes "inf" or "-inf"."""
        row = asdict(self)
        if self.value is not None:
            row["value"] = float(self.value) if math.isfinite(self.value) else str(float(self.value))
        order = ("name", "variant", "engine", "batch_size", "value", "unit", "method", "status", "reason")
        return {key: row[key] for key in order}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Metric:
        """The inverse of `to_dict`.

        Raises:
            RunError: an unknown or missing key, a wrong type, or a contradiction.
        """
        known = [field.name for field in fields(cls)]
        for key in row:
            if key not in known:
                raise RunError(f"metric {dict(row)}: unknown key {key!r}{near_misses(key, known)}")
        missing = [key for key in ("name", "variant", "engine", "value", "unit") if key not in row]
        if missing:
            raise RunError(f"metric {dict(row)}: missing {', '.join(missing)}")
        values = {**row, "value": _number(row["value"], row)}
        for key in ("name", "variant", "engine", "unit", "method", "status", "reason"):
            if not isinstance(values.get(key, ""), str):
                raise RunError(f"metric {dict(row)}: {key} is {values[key]!r}: it must be text")
        batch_size = values.get("batch_size")
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise RunError(f"metric {dict(row)}: batch_size is {batch_size!r}: it must be an integer or null")
        return cls(**values)


def _number(value: Any, row: Mapping[str, Any]) -> float | None:
    if value in ("inf", "-inf"):
        return float(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise RunError(f"metric {dict(row)}: value is {value!r}: it must be a number, 'inf', '-inf' or null")
    return None if value is None else float(value)
