"""Trains networks of the study on one GPU, a few at the same time, within a time, and packs what they leave.

Each wave of networks has an equal part of the time. With the run folders of an earlier call in --runs, unfinished
networks go on from their checkpoints.

`small.tar.gz` holds metrics, reports and logs of all; `weights.0`, `weights.1`, ... are the pieces of one tar file of
weights and ONNX files, compressed with xz one by one, as many as fit (`cat weights.* | tar x`).
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from analysis.task_training.networks import NETWORKS

PIECE, PIECES = int(15.5 * 2**20), 4
SMALL = 2 * 2**20  # bytes of a file that goes into small.tar.gz
WEIGHTS = ("float.safetensors", "qat.onnx", "ptq.onnx", "train.checkpoint.safetensors", "qat.checkpoint.safetensors")
"""Files to be packed, of every network in turn; a checkpoint is there only while its training is under way."""


def start(
    name: str, data: str, cores: list[int], runs: Path, deadline: float, more: list[str]
) -> subprocess.Popen[bytes]:
    """Start the process of a network, its output in a log."""
    command = [sys.executable, "-m", "analysis.task_training.run", "--network", name, "--data", data, "--resident"]
    command += ["--runs", str(runs), "--deadline", str(deadline), "--engines", "onnxruntime"]
    command += ["--cores", *map(str, cores), *more]
    runs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(len(cores))}
    with (runs / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def wait(running: dict[str, subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for all processes, and end at the deadline those that are not done."""
    while any(process.poll() is None for process in running.values()) and time.time() < deadline:
        time.sleep(0.5)
    for process in running.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def table(runs: Path, names: list[str]) -> Iterator[str]:
    """Yield a line for each accuracy of each network, or the end of its log if it has none."""
    for name in names:
        file = runs / name / "metrics.json"
        rows = json.loads(file.read_text()) if file.is_file() else []
        rows = rows["metrics"] if isinstance(rows, dict) else rows
        for row in rows:
            if row["name"] in ("miou", "map", "map50", "sqnr_db", "p50_ms"):
                value = "n/a" if row["value"] is None else f"{row['value']:.2f}"
                yield f"{name} {row['variant']} {row['engine']} {row['name']} {value} {row['unit']}"
        log = (runs / f"{name}.log").read_text(errors="replace").splitlines()
        told = [line for line in log if "an epoch" in line or " epoch " in line]
        yield from (f"  {line[:150]}" for line in (told[:1] + told[-2:] if rows else log[-12:]))


def pack(runs: Path, out: Path) -> None:
    """Write small.tar.gz and the pieces of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "small.tar.gz", "w:gz") as tar:
        for path in sorted(runs.rglob("*")):
            if path.is_file() and path.stat().st_size <= SMALL and path.suffix not in (".onnx", ".safetensors"):
                tar.add(path, str(path.relative_to(runs)))
    folders = sorted(path for path in runs.iterdir() if path.is_dir())
    files = [path for file in WEIGHTS for folder in folders if (path := folder / file).is_file()]
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(lambda path: lzma.compress(path.read_bytes(), preset=1), files))
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path, data in zip(files, packed, strict=True):
            if whole.tell() + len(data) + 20480 > PIECE * PIECES:
                print(f"left out: {path.relative_to(runs)}, {len(data):,} bytes")
                continue
            member = tarfile.TarInfo(f"{path.relative_to(runs)}.xz")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    content = whole.getvalue()
    for i in range(0, len(content), PIECE):
        (out / f"weights.{i // PIECE}").write_bytes(content[i : i + PIECE])


def started(names: list[str], arguments: argparse.Namespace, deadline: float) -> dict[str, subprocess.Popen[bytes]]:
    """Start the processes of a wave, each with its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    whole = sum(NETWORKS[name].cores for name in names)
    running, first = {}, 0
    for name in names:
        network = NETWORKS[name]
        data = arguments.camvid if network.base.endswith("camvid") else arguments.bccd
        count = max(1, len(cores) * network.cores // whole)
        own = [cores[i % len(cores)] for i in range(first, first + count)]
        running[name] = start(name, data, own, arguments.runs, deadline, arguments.more)
        first += count
    return running


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--camvid", required=True)
    parser.add_argument("--bccd", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/task_training"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS)[:6], choices=sorted(NETWORKS))
    parser.add_argument("--at-once", type=int, default=2, help="networks that are trained at the same time")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="arguments of analysis.task_training.run")
    arguments = parser.parse_args()
    began, names = time.time(), arguments.networks
    waves = [names[i : i + arguments.at_once] for i in range(0, len(names), arguments.at_once)]
    try:
        for number, wave in enumerate(waves):
            deadline = began + (arguments.budget_s - 15) * (number + 1) / len(waves)
            wait(started(wave, arguments, deadline), deadline)
    finally:
        pack(arguments.runs, arguments.out)
        print("\n".join(table(arguments.runs, arguments.networks)))


if __name__ == "__main__":
    main()
