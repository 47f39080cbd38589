"""Seconds until a compiled training step has run for the first time: whole or by regions, with a cold and a warm cache.

    python -m analysis.compile_start.run

Each measurement is a process of its own. Writes compile_start.json after every row, and prints the rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from analysis.common.qat_variants import DEVICE, NETWORKS, fast_arithmetic, finish, images, machine, pretrained, trained
from analysis.common.study import Row, command_line, study_parser
from compress.files import write_json
from compress.qat_fusion.regions import Region, compile_regions, few_guards
from compress.training.prepare import keep_compiled

PARTS = ("whole", "regions", "float")


def main() -> None:
    """Measure each network and way in processes of their own; or, as one of them, once."""
    parser = study_parser(__doc__, out="results/h100")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "regnet_y_3_2gf"])
    parser.add_argument("--ways", nargs="+", default=["regions", "whole"], choices=PARTS)
    parser.add_argument("--times", type=int, default=2, help="processes of each: the first has a cold cache")
    parser.add_argument("--budget-s", type=float, default=1e9, help="no process begins after so many seconds")
    parser.add_argument("--cache", type=Path, help="keeps the caches; a temporary folder without it")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "WAY"), help="measure in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        network, way = arguments.one
        print(json.dumps(measured(network, way, arguments.backend)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: Row = {"command": command_line(), "rows": []}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        caches = arguments.cache or Path(folder)
        for network, way, i in product(arguments.networks, arguments.ways, range(arguments.times)):
            if time.monotonic() - begin > arguments.budget_s:
                break
            row = {"network": network, "way": way, "cache": "warm" if i else "cold"}
            row |= in_a_process(network, way, caches / f"{network}-{way}", arguments.backend)
            report["rows"].append(row)
            write_json(arguments.out / "compile_start.json", report)
            print(row, flush=True)


def in_a_process(network: str, way: str, cache: Path, backend: str) -> Row:
    """Measure in a process whose compiler keeps its results in a folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "analysis.compile_start.run", "--one", network, way, "--backend", backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-800:]}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(name: str, way: str, backend: str) -> Row:
    """Time the first step of a network and then ten more; the first is ended by reading its loss."""
    keep_compiled()  # as a training does: fused graphs are kept whole
    fast_arithmetic()
    network = NETWORKS[name]
    call: Any
    call, owner = trained("float" if way == "float" else "fused", pretrained(network), network)
    owner.to(memory_format=torch.channels_last).to(DEVICE).train()
    call.train()
    functions: list[Any] = []
    if way == "regions":

        def compiler(run: Any) -> Any:
            functions.append(run)
            return torch.compile(run, dynamic=False, backend=backend, options={"guard_filter_fn": few_guards})

        call = compile_regions(call, compiler)
    parts = sum(isinstance(module, Region) for module in call.modules())
    run = call if way == "regions" else torch.compile(call, backend=backend)
    x = images(network, network.batch)
    y = torch.randint(0, 10, (network.batch,), device=DEVICE)
    optimizer = torch.optim.SGD(owner.parameters(), lr=1e-5, momentum=0.9)

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(run(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    finish()
    start = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    rounds = []
    for _ in range(5):
        finish()
        start = time.perf_counter()
        for _ in range(10):
            step()
        finish()
        rounds.append((time.perf_counter() - start) / 10 * 1e3)
    counters = torch._dynamo.utils.counters
    cache = {key: value for key, value in counters["aot_autograd"].items() if "cache" in key}
    return {
        "first_step_s": round(first, 2), "step_ms": round(statistics.median(rounds), 2), "loss": loss,
        "regions": parts, "kinds": len(functions), "graphs": counters["stats"]["unique_graphs"], **cache, **machine(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
