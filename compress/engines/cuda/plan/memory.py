"""Offsets of buffers in one arena, in which buffers that are not needed at the same time share memory.

Largest first, each into the smallest gap between those that are alive with it (greedy by size; Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020, section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes; what CUDA's own allocator gives, and more than any kernel needs."""


@dataclass(frozen=True)
class Lifetime:
    """When a buffer is needed.

    Attributes:
        size: bytes.
        first, last: steps from which and to which it is needed, both included.
    """

    size: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """True if both are needed at some step."""
        return self.first <= other.last and other.first <= self.last


def assign_offsets(lifetimes: Mapping[str, Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets of buffers in an arena, and its size, in bytes.

    Args:
        lifetimes: of the buffers, by name.
    """
    offsets: dict[str, int] = {}
    total = 0
    for name in sorted(lifetimes, key=lambda n: (-lifetimes[n].size, lifetimes[n].first)):
        life = lifetimes[name]
        size = -(-life.size // ALIGNMENT) * ALIGNMENT
        taken = sorted(
            (offsets[other], offsets[other] + -(-lifetimes[other].size // ALIGNMENT) * ALIGNMENT)
            for other in offsets
            if life.overlaps(lifetimes[other])
        )
        best, best_gap, end = None, None, 0
        for start, stop in taken:
            gap = start - end
            if gap >= size and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        offsets[name] = end if best is None else best
        total = max(total, offsets[name] + size)
    return offsets, total
