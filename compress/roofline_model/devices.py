"""Devices and precisions: peak rates and memory bandwidth (Williams, Waterman and Patterson, CACM 52(4), 2009).

Dense and 2:4 peaks are separate; attributes say flops for integers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.errors import RooflineError, near_misses

PRECISIONS: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
"""Bytes of one element in memory. TF32 is a way to multiply; its tensors are stored as float32."""

SPARSE = "-2:4"
"""Suffix of a precision with 2:4 weights."""

_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of products; `base` is a key of `PRECISIONS`."""

    base: str
    sparse: bool = False

    @property
    def name(self) -> str:
        """Name such as `int8` or `int8-2:4`."""
        return self.base + SPARSE * self.sparse

    @property
    def operation(self) -> str:
        """`op` for integers, `flop` for floating point; a multiply-accumulate is two."""
        return "op" if self.base.startswith("int") else "flop"

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an activation or dense weight in memory."""
        return PRECISIONS[self.base]

    @property
    def float_bytes(self) -> int:
        """Bytes of elements that stay floating point, at least fp16's."""
        return max(self.bytes_per_element, 2)

    @property
    def sparse_weight_bytes(self) -> float:
        """Mean bytes of a 2:4 weight: half of the values, each with a 2-bit index."""
        return (self.bytes_per_element + 2 / 8) / 2


def parse_precision(name: str) -> Precision:
    """Parse `fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `int8`, or one of them followed by `-2:4`.

    >>> parse_precision("int8-2:4")
    Precision(base='int8', sparse=True)

    Raises:
        RooflineError: the name is unknown.
    """
    base = name.strip().lower().removesuffix(SPARSE)
    base = _ALIASES.get(base, base)
    if base not in PRECISIONS:
        raise RooflineError(
            f"unknown precision {name!r}{near_misses(base, PRECISIONS) or '.'} Allowed: {', '.join(PRECISIONS)}, each "
            f"also with the suffix {SPARSE}"
        )
    return Precision(base=base, sparse=name.strip().lower().endswith(SPARSE))


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peaks and bandwidth of one device, at its highest specified clock.

    Attributes:
        name: short name, the argument of `roofline`.
        title: name as its maker writes it.
        sparse_flops_per_s: peaks with 2:4 weights, skipped products included.
        source: data sheet, or how it was measured.
        note: conditions and exceptions.
    """

    name: str
    title: str
    bandwidth_bytes_per_s: float
    dense_flops_per_s: Mapping[str, float]
    sparse_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str
    note: str = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Names of its precisions, the 2:4 ones last."""
        return (*self.dense_flops_per_s, *(base + SPARSE for base in self.sparse_flops_per_s))

    def peak_flops_per_s(self, precision: str) -> float:
        """The peak at a precision such as `int8-2:4` (RooflineError: the device lacks it)."""
        wanted = parse_precision(precision)
        peaks = self.sparse_flops_per_s if wanted.sparse else self.dense_flops_per_s
        if wanted.base not in peaks:
            raise RooflineError(f"{self.title} has no peak for {wanted.name}; it has {', '.join(self.precisions)}")
        return peaks[wanted.base]

    def ridge_point(self, precision: str) -> float:
        """The intensity from which on a layer can reach the peak, flops per byte (RooflineError: as the peak)."""
        return self.peak_flops_per_s(precision) / self.bandwidth_bytes_per_s
