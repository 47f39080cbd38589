"""Random networks through quantize, export and ONNX Runtime for every target; failures are shrunk and listed."""

import multiprocessing
import platform
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from analysis.common.study import append_row, option, read_rows, study_options
from analysis.random_networks import check
from analysis.random_networks.check import TARGETS, failure_of, shrunk
from analysis.random_networks.network import OPERATIONS, steps_of

WAIT_S = 0.2


def row_of(seed: int, export_every: int) -> dict[str, Any]:
    began, target = time.process_time(), TARGETS[seed % len(TARGETS)]
    export, steps = (seed // len(TARGETS)) % export_every == 0, steps_of(seed)
    row: dict[str, Any] = {"seed": seed, "target": target, "exported": export}
    if failure_of(steps, target, export=export):
        least = shrunk(steps, target, export=export)
        row["reason"] = failure_of(least, target, export=export)[:300]
        row["steps"] = [[step.name, step.seed] for step in least]
    return row | {"cpu_s": round(time.process_time() - began, 2)}


def left(path: Path, seeds: range) -> list[int]:
    done = {row.get("seed") for row in read_rows(path)}
    return [seed for seed in seeds if seed not in done]


def try_all(path: Path, seeds: range, export_every: int, end: float) -> None:
    torch.set_num_threads(1)
    for seed in left(path, seeds):
        if time.time() > end:
            return
        append_row(path, row_of(seed, export_every))


def supervise(path: Path, seeds: range, export_every: int, end: float, jobs: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([check.__name__])

    def started(share: range) -> ForkServerProcess:
        process = context.Process(target=try_all, args=(path, share, export_every, end))
        process.start()
        return process

    running = {share: started(share) for share in (seeds[i::jobs] for i in range(jobs)) if share}
    while running:
        time.sleep(WAIT_S)
        for share, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[share]
            if process.exitcode:
                seed = left(path, share)[0]
                target = TARGETS[seed % len(TARGETS)]
                reason = f"the process ended with status {process.exitcode}"
                steps = [[step.name, step.seed] for step in steps_of(seed)]
                append_row(path, {"seed": seed, "target": target, "exported": True, "reason": reason, "steps": steps})
                running[share] = started(share)


def main() -> None:
    options = study_options(
        __doc__,
        option("--count", type=int, default=300, help="number of networks (default 300)"),
        option("--seed", type=int, default=0, help="seed of the first network; the others follow"),
        option("--export-every", type=int, default=1, help="export each n-th network (default: all)"),
        option("--seconds", type=float, default=float("inf"), help="begin no network after so many seconds"),
        option("--jobs", type=int, default=1, help="number of processes (default 1)"),
        option("--rows", type=Path, default=Path("runs/random_networks.jsonl"), help="file of the rows"),
    )
    about = {
        "first_seed": options.seed,
        "operations": len(OPERATIONS),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }
    append_row(options.rows, about)
    seeds, end = range(options.seed, options.seed + options.count), time.time() + options.seconds
    supervise(options.rows, seeds, options.export_every, end, options.jobs)
    rows = [row for row in read_rows(options.rows) if row.get("seed") in seeds]
    failures = [row for row in rows if "reason" in row]
    for row in failures:
        print(row["seed"], row["target"], [name for name, _ in row["steps"]], row["reason"][:160], flush=True)
    print(
        f"{len(rows)} networks, {sum(row['exported'] for row in rows)} exported, {len(failures)} failures", flush=True
    )


if __name__ == "__main__":
    main()
