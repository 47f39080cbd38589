"""Where the time of a training step goes: the kernels of float, folded and quantized training, in groups.

    python analysis/qat_profile.py --out results/h200                     ResNet-50, compiled: about 100 s on a GPU
    python analysis/qat_profile.py --variants fused-int8                   another
    python analysis/qat_profile.py --mode eager --variants float fused    about 20 s
    python analysis/qat_profile.py --read results/h200                    the table again, from the files

Variants are those of `qat_variants.py`. Each is warmed up, timed for 20 steps without the profiler, then profiled for 5
with it; each kernel's time on the GPU is summed by group. `waiting` is the time of a step (without the profiler) in
which no kernel runs. A kernel belongs to a group by the phase in which it was launched (forward, backward,
optimizer), by the torch operation that launched it, and, for kernels that the compiler made, by the shapes of its
arguments: those that read a tensor of a weight's shape quantize weights, or mask their gradients. A variant's full list
of kernels is written to `qat_profile_MODE_VARIANT.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import qat_variants
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from compress.files import write_json, write_text

PHASES = ("forward", "backward", "optimizer")
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
Event = dict[str, Any]


# What is measured ---------------------------------------------------------------------------------------------------


def measure(variant: str, name: str, mode: str, precision: str, steps: int) -> Event:
    """Time and profile one variant."""
    network, device = qat_variants.NETWORKS[name], qat_variants.DEVICE
    start = time.perf_counter()
    call, owner = qat_variants.trained(variant, qat_variants.pretrained(network), network)
    owner.to(device, memory_format=torch.channels_last).train()
    call.train()
    optimizer = torch.optim.SGD(owner.parameters(), lr=1e-5, momentum=0.9)
    run = qat_variants.as_run(call, mode)
    x = qat_variants.images(network, network.batch)
    y = torch.randint(0, 10, (network.batch,), device=device)

    def step() -> None:
        with record_function("phase forward"), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(run(x).float(), y)
        with record_function("phase backward"):
            loss.backward()
        with record_function("phase optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    qat_variants.finish()
    built_s = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(20):
        step()
    qat_variants.finish()
    step_ms = (time.perf_counter() - start) / 20 * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded:
        for _ in range(steps):
            step()
        qat_variants.finish()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    shapes = {tuple(p.shape) for p in owner.parameters() if p.dim() > 1}
    kernels = kernels_of(events, shapes, steps)
    return {
        "variant": variant,
        "network": name,
        "mode": mode,
        "precision": precision,
        "batch": network.batch,
        "step_ms": step_ms,
        "built_s": built_s,
        "groups_ms": {group: sum(k["ms"] for k in kernels if k["group"] == group) for group in GROUPS},
        "kernels": kernels,
        "command": " ".join(["python", *sys.argv]),
        "machine": qat_variants.machine(),
    }


# What kernels do ----------------------------------------------------------------------------------------------------


class Timeline:
    """Nested events of one thread, or of all: which of them run at a time."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda e: e["ts"])
        self.starts = [e["ts"] for e in self.events]

    def around(self, ts: float) -> list[Event]:
        """Those that run at `ts`, the innermost first, looking back at the last hundred."""
        last = bisect_right(self.starts, ts)
        return [e for e in self.events[max(0, last - 100) : last][::-1] if e["ts"] + e["dur"] >= ts]


def kernels_of(events: list[Event], weights: set[tuple[int, ...]], steps: int) -> list[Event]:
    """The GPU's kernels, those of one name and group together, longest first; ms and count are of one step.

    Args:
        events: of a Chrome trace that torch's profiler wrote.
        weights: shapes of the weights.
        steps: how many were recorded.
    """
    phases = Timeline([e for e in events if str(e.get("name", "")).startswith("phase ") and "cpu" in marks(e)])
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
        dims = shown_shapes(around)
        row = sums.setdefault(
            (event["name"], group, dims),
            {"kernel": event["name"], "group": group, "phase": phase, "shapes": dims, "ms": 0.0, "count": 0.0},
        )
        row["ms"] += event["dur"] / 1e3 / steps
        row["count"] += 1 / steps
    return sorted(sums.values(), key=lambda row: -row["ms"])


def marks(event: Event) -> str:
    """Where an annotation was recorded: on the processor, not its shadow on the GPU."""
    return "gpu" if str(event.get("cat", "")).startswith("gpu") else "cpu"


def shown_shapes(around: list[Event]) -> str:
    """The arguments' shapes of the innermost operation that has any."""
    dims = next((e["args"]["Input Dims"] for e in around if e.get("args", {}).get("Input Dims")), [])
    return " ".join("x".join(map(str, d)) for d in dims if d and not isinstance(d[0], list))


def group_of(event: Event, phase: str, around: list[Event], weights: set[tuple[int, ...]]) -> str:
    """The group of a kernel.

    Args:
        event: of the kernel.
        phase: in which it was launched.
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
    """Whether a kernel works on weights: a convolution's or linear layer's shape is among its arguments'."""
    if not around:
        return False
    dims = around[0].get("args", {}).get("Input Dims") or []
    return any(tuple(d) in weights for d in dims if d and not isinstance(d[0], list)) and "loss" not in name


# What is shown ------------------------------------------------------------------------------------------------------


def table(rows: list[Event]) -> str:
    """Milliseconds of a step by group, a column a variant."""
    lines = [
        _line("ms of a step", [f"{row['variant']}, {row['mode']}" for row in rows]),
        "|" + "---|" * (len(rows) + 1),
    ]
    for group in GROUPS:
        cells = [row["groups_ms"][group] for row in rows]
        if any(cells):
            lines.append(_line(group, [f"{cell:.2f}" for cell in cells]))
    busy = [sum(row["groups_ms"].values()) for row in rows]
    lines.append(_line("waiting", [f"{row['step_ms'] - b:.2f}" for row, b in zip(rows, busy, strict=True)]))
    lines.append(_line("the step", [f"{row['step_ms']:.2f}" for row in rows]))
    return "\n".join(lines)


def _line(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def report(folder: Path) -> str:
    """The table of all files in a folder; also written to qat_profile.md."""
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("qat_profile_*.json"))]
    if not rows:
        return f"there are no files qat_profile_*.json in {folder}"
    about = ", ".join(f"{key} {value}" for key, value in rows[0]["machine"].items())
    first = rows[0]
    head = ["# Where the time of a training step goes", "", f"{first['network']}, batch {first['batch']}; {about}.", ""]
    commands = sorted({f"`{row['command']}`" for row in rows})
    body = [*head, *(__doc__ or "").split("\n\n")[2:], "", table(rows), "", f"Made by {', '.join(commands)}."]
    for row in rows:
        body += ["", f"The longest of {row['variant']}, {row['mode']}:", "", "| ms | count | group | kernel | shapes |"]
        body += ["|---|---|---|---|---|"]
        body += [
            f"| {k['ms']:.3f} | {k['count']:.0f} | {k['group']} | `{k['kernel'][:90]}` | {k['shapes'][:90]} |"
            for k in row["kernels"][:25]
        ]
    write_text(folder / "qat_profile.md", "\n".join(body) + "\n")
    return table(rows)


def main() -> None:
    """Measure variants until the time is spent; or read files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50", choices=list(qat_variants.NETWORKS))
    parser.add_argument("--variants", nargs="+", default=["fused", "folded", "float"])
    parser.add_argument("--mode", default="compiled", choices=["compiled", "eager"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=5, help="that are profiled")
    parser.add_argument("--budget-s", type=float, default=180.0, help="no variant is begun after this, less 40 s")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/h200")))
    parser.add_argument("--read", type=Path, help="measure nothing: the table of the files in this folder")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.read:
        print(report(arguments.read))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    ends = time.monotonic() + arguments.budget_s
    for i, variant in enumerate(arguments.variants):
        if i and time.monotonic() > ends - 40:
            print(f"no time for {variant}")
            continue
        row = measure(variant, arguments.network, arguments.mode, arguments.precision, arguments.steps)
        write_json(arguments.out / f"qat_profile_{arguments.mode}_{variant}.json", row)
        print(f"{variant}: {row['step_ms']:.2f} ms, built in {row['built_s']:.0f} s", flush=True)
        torch.compiler.reset()
        if qat_variants.DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    print(report(arguments.out), flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
