"""Devices and precisions: the roofs under which a network must run.

A roofline (Williams, Waterman and Patterson, CACM 52(4), 2009) needs two numbers of a device: how many operations it
can do in a second at a precision, and how many bytes its memory can bring. Vendors print the first of them with 2:4
sparsity wherever they can, which is twice what a dense network gets; here dense and 2:4 peaks stand apart, and a
precision that a device lacks is an error, never a guess. An INT8 operation is counted as a flop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.errors import RooflineError, near_misses

PRECISIONS: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
"""Bytes of one element in memory. TF32 is a way to multiply, its tensors are stored as float32."""

SPARSE = "-2:4"
"""Suffix of a precision whose weights hold two values of every four."""

_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What the products are computed in.

    Attributes:
        base: key of `PRECISIONS`.
        sparse: weights are 2:4.
    """

    base: str
    sparse: bool = False

    @property
    def name(self) -> str:
        """Such as `int8` or `int8-2:4`."""
        return self.base + SPARSE * self.sparse

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an activation or dense weight in memory."""
        return PRECISIONS[self.base]

    @property
    def float_bytes(self) -> int:
        """Bytes of an element that stays in floating point: fp16 beside 8-bit products, else the same."""
        return max(self.bytes_per_element, 2)

    @property
    def sparse_weight_bytes(self) -> float:
        """Bytes that one weight costs under 2:4, counted over all weights: half the values, 2 index bits each kept."""
        return (self.bytes_per_element + 2 / 8) / 2


def parse_precision(name: str) -> Precision:
    """Read `fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `int8`, or one of them followed by `-2:4`.

    >>> parse_precision("int8-2:4")
    Precision(base='int8', sparse=True)

    Raises:
        RooflineError: another name.
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
    """What one device can do, at its highest specified clock.

    Attributes:
        name: short name, as given to `roofline`.
        title: as its maker writes it.
        bandwidth_bytes_per_s: of its main memory.
        dense_flops_per_s: peak by precision, without sparsity.
        sparse_flops_per_s: peak by precision with 2:4 weights, counting the products that are skipped.
        source: where the figures stand, or how they were measured.
        note: what to know of them.
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
        """Names of the precisions that it has, the 2:4 ones last."""
        return (*self.dense_flops_per_s, *(base + SPARSE for base in self.sparse_flops_per_s))

    def peak_flops_per_s(self, precision: str) -> float:
        """Peak at a precision such as `int8` or `int8-2:4`.

        Raises:
            RooflineError: the device lacks it; the message says which it has.
        """
        wanted = parse_precision(precision)
        peaks = self.sparse_flops_per_s if wanted.sparse else self.dense_flops_per_s
        if wanted.base not in peaks:
            raise RooflineError(f"{self.title} has no peak for {wanted.name}; it has {', '.join(self.precisions)}")
        return peaks[wanted.base]

    def ridge_point(self, precision: str) -> float:
        """Arithmetic intensity, in flops per byte, from which on the device computes as fast as it can.

        Raises:
            RooflineError: the device lacks the precision.
        """
        return self.peak_flops_per_s(precision) / self.bandwidth_bytes_per_s
