"""Devices and precisions: peak rates and memory bandwidth.

A roofline (Williams, Waterman and Patterson, CACM 52(4), 2009) needs two numbers of a device: the operations a second
at a precision, and the bytes a second of its memory. Many data sheets give the first with 2:4 sparsity only, which is
twice the rate of a dense network; here dense and 2:4 peaks are separate, and a precision that a device lacks is an
error, never a guess. Names of attributes say flops for operations on integers too; texts and figures say op.
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
    """The precision of the products.

    Attributes:
        base: key of `PRECISIONS`.
        sparse: True if weights are 2:4.
    """

    base: str
    sparse: bool = False

    @property
    def name(self) -> str:
        """Name such as `int8` or `int8-2:4`."""
        return self.base + SPARSE * self.sparse

    @property
    def operation(self) -> str:
        """Unit of work: `op` for integers, `flop` for floating point; either counts a multiply-accumulate as two."""
        return "op" if self.base.startswith("int") else "flop"

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an activation or dense weight in memory."""
        return PRECISIONS[self.base]

    @property
    def float_bytes(self) -> int:
        """Bytes of an element that stays in floating point: at least those of fp16."""
        return max(self.bytes_per_element, 2)

    @property
    def sparse_weight_bytes(self) -> float:
        """Mean bytes of a weight with 2:4: half of the values, each with an index of 2 bits."""
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
        bandwidth_bytes_per_s: bandwidth of its main memory.
        dense_flops_per_s: peak by precision, without sparsity.
        sparse_flops_per_s: peak by precision with 2:4 weights, skipped products included.
        source: data sheet of the figures, or how they were measured.
        note: conditions and exceptions of the figures.
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
        """Return the peak at a precision such as `int8` or `int8-2:4`.

        Raises:
            RooflineError: the device lacks it; the message lists those that it has.
        """
        wanted = parse_precision(precision)
        peaks = self.sparse_flops_per_s if wanted.sparse else self.dense_flops_per_s
        if wanted.base not in peaks:
            raise RooflineError(f"{self.title} has no peak for {wanted.name}; it has {', '.join(self.precisions)}")
        return peaks[wanted.base]

    def ridge_point(self, precision: str) -> float:
        """Return the arithmetic intensity, in flops per byte, from which on a layer can reach the peak.

        Raises:
            RooflineError: the device lacks the precision.
        """
        return self.peak_flops_per_s(precision) / self.bandwidth_bytes_per_s
