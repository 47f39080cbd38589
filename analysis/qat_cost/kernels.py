"""GPU kernels of a training step, found in a trace of torch's profiler and sorted into groups.

A kernel belongs to a group by the phase in which it was launched (forward, backward, optimizer), by the torch operation
that launched it, and, for kernels of torch.compile, by the shapes of its arguments: a kernel that reads a tensor of a
weight's shape quantizes weights, or masks their gradients.
"""

from bisect import bisect_right
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
GROUPS = (
    "convolution forward",
    "convolution data gradient",
    "convolution weight gradient",
    "convolution, other kernels",
    "linear layers",
    "weights quantized (forward)",
    "weights' gradients masked",
    "pointwise forward",
    "reductions forward",
    "pointwise backward",
    "reductions backward",
    "optimizer",
    "copies and others",
)


class Timeline:
    """Nested events of one thread, or of all threads."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda e: e["ts"])
        self.starts = [e["ts"] for e in self.events]

    def around(self, ts: float) -> list[Event]:
        """Return the events that run at `ts`, the innermost first, among the last hundred that began."""
        last = bisect_right(self.starts, ts)
        return [e for e in self.events[max(0, last - 100) : last][::-1] if e["ts"] + e["dur"] >= ts]


def kernels_of(events: list[Event], weights: set[tuple[int, ...]], steps: int) -> list[Event]:
    """Return the GPU's kernels, summed by name, group and shapes, longest first; ms and count are of one step.

    Args:
        events: events of a Chrome trace that torch's profiler wrote.
        weights: shapes of the weights.
        steps: number of steps that were recorded.
    """
    # an annotation is recorded on the processor, and once more on the GPU, where it does not enclose launches
    phases = Timeline(
        [e for e in events if str(e.get("name", "")).startswith("phase ") and not str(e.get("cat")).startswith("gpu")]
    )
    operations: dict[Any, list[Event]] = defaultdict(list)
    launches: dict[int, Event] = {}
    for event in events:
        if event.get("cat") in {"cuda_runtime", "cuda_driver"} and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
        elif event.get("cat") == "cpu_op":
            operations[event["tid"]].append(event)
    threads = {tid: Timeline(found) for tid, found in operations.items()}
    sums: dict[tuple[str, str, str], Event] = {}
    for event in events:
        if event.get("cat") not in {"kernel", "gpu_memcpy", "gpu_memset"}:
            continue
        launch = launches.get(event["args"].get("correlation", -1))
        around = threads[launch["tid"]].around(launch["ts"]) if launch and launch["tid"] in threads else []
        phase = next((e["name"].removeprefix("phase ") for e in phases.around(launch["ts"])), "") if launch else ""
        group = group_of(event, phase, around, weights)
        read: list[Any] = next((e["args"]["Input Dims"] for e in around if e.get("args", {}).get("Input Dims")), [])
        dims = " ".join("x".join(map(str, d)) for d in read if d and not isinstance(d[0], list))
        row = sums.setdefault(
            (event["name"], group, dims),
            {"kernel": event["name"], "group": group, "phase": phase, "shapes": dims, "ms": 0.0, "count": 0.0},
        )
        row["ms"] += event["dur"] / 1e3 / steps
        row["count"] += 1 / steps
    return sorted(sums.values(), key=lambda row: -row["ms"])


def group_of(event: Event, phase: str, around: list[Event], weights: set[tuple[int, ...]]) -> str:
    """Return the group of a kernel.

    Args:
        event: event of the kernel.
        phase: phase of the step in which it was launched.
        around: torch operations that were running on the launching thread, the innermost first.
        weights: shapes of the weights.
    """
    name = event["name"].lower()
    if phase == "optimizer":
        return "optimizer"
    if event["cat"] != "kernel":
        return "copies and others"
    operations = " ".join(e["name"] for e in around)
    if "convolution" in operations:
        if "dgrad" in name or "wgrad" in name:
            return "convolution data gradient" if "dgrad" in name else "convolution weight gradient"
        if "backward" not in operations and any(part in name for part in ("fprop", "gemm", "nvjet", "xmma", "conv")):
            return "convolution forward"
        return "convolution, other kernels"
    if any(f"aten::{part}" in operations for part in ("addmm", "mm", "linear", "bmm")):
        return "linear layers"
    if "_weights_kernel" in name or "_weight_gradients_kernel" in name or reads_weight(name, around, weights):
        return "weights' gradients masked" if phase == "backward" else "weights quantized (forward)"
    kind = "reductions" if any(part in name for part in ("triton_red", "triton_per", "reduce", "_bias_kernel")) else ""
    if kind or any(part in name for part in ("triton", "elementwise", "kernel")):
        return f"{kind or 'pointwise'} {phase}" if phase else "copies and others"
    return "copies and others"


def reads_weight(name: str, around: list[Event], weights: set[tuple[int, ...]]) -> bool:
    if not around:
        return False
    dims = around[0].get("args", {}).get("Input Dims") or []
    return any(tuple(d) in weights for d in dims if d and not isinstance(d[0], list)) and "loss" not in name
