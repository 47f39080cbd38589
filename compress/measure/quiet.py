"""Judges whether times can be compared."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OTHERS = 0.15
"""Most share of the processors that other processes may take from this one."""
STEAL = 0.05
"""Most share of the time that a hypervisor may keep for other machines."""
SPREAD = 1.5
"""Most ratio of the ends of a paired interval."""
TAIL = 1.5
"""Most ratio of mean and median: above it, single runs were interrupted for long."""

BUSY = "the machine was busy"
NOT_MEASURED = f"not measured: {BUSY}"
"""What stands in the place of a factor between times that are not to be compared."""


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Seconds since some start, summed over processors.

    Attributes:
        own: that this process and its finished children computed.
    """

    wall: float
    busy: float
    own: float
    stolen: float


def cpu_time() -> CpuTime | None:
    """Read the processors' counters; None where the system has no /proc/stat."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields)
    except (OSError, ValueError):
        return None
    busy, own = user + nice + system + irq + softirq, sum(os.times()[:4])
    return CpuTime(wall=time.perf_counter(), busy=busy, own=own, stolen=stolen)


def disturbance(before: CpuTime | None, after: CpuTime | None, *, cores: int, usable: float) -> str:
    """Who else used the processor between two readings; "" = nobody to speak of, or unknown.

    `cores` are the machine's, `usable` those that this process may use.
    """
    if before is None or after is None or after.wall - before.wall < 0.2:  # the counters move in steps of 10 ms
        return ""
    seconds = after.wall - before.wall
    others = ((after.busy - before.busy) - (after.own - before.own)) / seconds
    stolen = (after.stolen - before.stolen) / (seconds * cores)
    if stolen > STEAL:
        return f"{BUSY} (its hypervisor kept {stolen:.0%} of the time)"
    if (others + usable - cores) / usable > OTHERS:
        return f"{BUSY} (other processes used {others:.1f} of {cores} processors)"
    return ""


def paired_interval(turns: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median of `turns` over `reference`, turn by turn.

    Order statistics by the sign test (Conover, Practical Nonparametric Statistics, 1999, section 3.2); with fewer than
    six turns the smallest and the largest ratio.
    """
    ratios = np.sort(np.divide(turns, reference))
    count = len(ratios)
    # Largest k with P(Binomial(n, 1/2) < k) <= 2.5 %.
    tail, term, k = 0.0, 0.5**count, 0
    while tail + term <= 0.025:
        tail, k = tail + term, k + 1
        term *= (count - k + 1) / k
    first = max(k - 1, 0)
    return float(ratios[first]), float(ratios[count - 1 - first])


def judge(turns: Mapping[str, Sequence[float]], means: Mapping[str, float], disturbed: str = "") -> dict[str, str]:
    """Why the times of a label are not to be compared with those of the others; "" = they are.

    `turns` are the medians of each turn, equally many for all labels, `means` those of all runs, ms; `disturbed` is
    what `disturbance` returns.
    """
    if disturbed:
        return dict.fromkeys(turns, disturbed)
    found = dict.fromkeys(turns, "")
    for label, times in turns.items():
        others = [other for name, other in turns.items() if name != label]
        spreads = [high / low for low, high in (paired_interval(times, other) for other in others)]
        tail = means[label] / float(np.median(times))
        if spreads and min(spreads) > SPREAD:
            found[label] = f"{BUSY} (turn by turn, its time beside the others' moved by {min(spreads):.1f}x)"
        elif tail > TAIL:
            found[label] = f"{BUSY} (the mean of the runs is {tail:.1f}x their median)"
    return found
