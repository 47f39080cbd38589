"""Kernels of float, folded and quantized training steps on a GPU, in groups: where the time of a step goes."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from analysis.common.qat_variants import DEVICE, NETWORKS, TrainingStep, fast_arithmetic, finish, machine
from analysis.common.study import Row, command_line, study_parser
from analysis.qat_profile import report
from analysis.qat_profile.kernels import GROUPS, kernels_of
from compress.files import write_json

TIMED = 20  # steps that are timed without the profiler


def measure(variant: str, name: str, mode: str, precision: str, steps: int) -> Row:
    """Time one variant, then profile `steps` steps of it."""
    network = NETWORKS[name]
    start = time.perf_counter()
    step = TrainingStep(variant, network, precision, mode, lambda name: record_function(f"phase {name}"))
    built_s = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(TIMED):
        step()
    finish()
    step_ms = (time.perf_counter() - start) / TIMED * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded:
        for _ in range(steps):
            step()
        finish()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = kernels_of(events, {tuple(p.shape) for p in step.owner.parameters() if p.dim() > 1}, steps)
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
        "command": command_line(),
        "machine": machine(),
    }


def main() -> None:
    """Measure variants until the time has run out; the table comes last."""
    parser = study_parser(__doc__, out="results/h200")
    parser.add_argument("--network", default="resnet50", choices=list(NETWORKS))
    parser.add_argument("--variants", nargs="+", default=["fused", "folded", "float"])
    parser.add_argument("--mode", default="compiled", choices=["compiled", "eager"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=5, help="steps that are profiled")
    parser.add_argument("--budget-s", type=float, default=180.0, help="no variant is begun after this, less 40 s")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    fast_arithmetic()
    ends = time.monotonic() + arguments.budget_s
    for i, variant in enumerate(arguments.variants):
        if i and time.monotonic() > ends - 40:
            print(f"no time for {variant}")
            continue
        row = measure(variant, arguments.network, arguments.mode, arguments.precision, arguments.steps)
        write_json(arguments.out / f"qat_profile_{arguments.mode}_{variant}.json", row)
        print(f"{variant}: {row['step_ms']:.2f} ms, built in {row['built_s']:.0f} s", flush=True)
        torch.compiler.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    print(report.write(arguments.out), flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
