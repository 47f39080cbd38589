"""Random networks through quantize, export and ONNX Runtime for every target; failures are shrunk and listed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from analysis.random_networks.check import LOWEST_DB, RUNTIME_DB, SAME, TARGETS, failure_of, shrunk
from analysis.random_networks.network import OPERATIONS, steps_of
from compress.files import write_json, write_text


def main() -> None:
    """Measure and write random_networks.json and random_networks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of networks (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network; the others follow")
    parser.add_argument("--export-every", type=int, default=1, help="export each n-th network (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("results/reliability"), help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, tried, exported = time.monotonic(), 0, 0
    failures = []
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() - began > options.seconds:
            break
        export, target = (seed // len(TARGETS)) % options.export_every == 0, TARGETS[seed % len(TARGETS)]
        tried, exported = tried + 1, exported + export
        steps = steps_of(seed)
        if failure_of(steps, target, export=export):
            least = shrunk(steps, target, export=export)
            reason = failure_of(least, target, export=export)
            row = {"seed": seed, "target": target, "reason": reason[:300], "steps": [[s.name, s.seed] for s in least]}
            failures.append(row)
            print(row, flush=True)
    facts = {
        "first_seed": options.seed,
        "networks": tried,
        "exported": exported,
        "operations": len(OPERATIONS),
        "cpu_seconds": round(time.process_time(), 1),
        "failures": failures,
    }
    write_json(options.out / "random_networks.json", facts)
    write_text(options.out / "random_networks.md", _page(facts))


def _page(facts: dict[str, Any]) -> str:
    failures = facts["failures"]
    rows = [
        f"| {f['seed']} | {f['target']} | {', '.join(n for n, _ in f['steps'])} | {f['reason']} |" for f in failures
    ]
    return "\n".join(
        [
            "# Random networks through quantize, export and ONNX Runtime",
            "",
            f"{facts['networks']} networks from seed {facts['first_seed']} on, of 2 to 9 out of {facts['operations']} "
            f"operations, the targets in turn; {facts['exported']} exported and run in ONNX Runtime, with and without "
            f"its optimizations. {facts['cpu_seconds']} s of one core, torch {torch.__version__}.",
            "",
            f"A failure is a traceback, a refusal of a valid network, an error over {SAME} with quantizers off, less "
            f"than {LOWEST_DB} dB from float to fake quantization, or less than {RUNTIME_DB} dB from there to "
            "ONNX Runtime.",
            "",
            f"{len(failures)} failures.",
            *(
                ["", "| seed | target | smallest network | what went wrong |", "|---|---|---|---|", *rows]
                if rows
                else []
            ),
            "",
        ]
    )


if __name__ == "__main__":
    main()
