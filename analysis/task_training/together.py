"""Trains networks of the study on one GPU within a time, and packs their run folders.

A process on a GPU that another one uses too waits at each synchronization for the other's share of time, and detectors
synchronize often. So one network at a time has the GPU, from the measurement of its speed to the end of QAT; its files
are written and judged on the CPU while the next one trains. Each has a share of the time that is left; what one does
not need, because it has trained as long as its recipe says, the later ones get. Small networks, whose steps take the
host longer than the GPU, may have it two at a time (`--lanes`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from analysis.task_training.networks import NETWORKS
from analysis.task_training.pack import Packer
from analysis.task_training.turns import grant, handed_on, is_ready

SHOWN = ("miou", "map", "map50", "sqnr_db", "p50_ms")
Running = dict[str, "subprocess.Popen[bytes]"]


def start(name: str, data: str, runs: Path, more: list[str], *, threads: int | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a network, its output in a log; with `--in-turn` it waits for its turn on the GPU."""
    command = [sys.executable, "-m", "analysis.task_training.run", "--network", name, "--data", data, "--resident"]
    command += ["--runs", str(runs), "--engines", "onnxruntime", *more]
    runs.mkdir(parents=True, exist_ok=True)
    cores = threads or max(1, len(os.sched_getaffinity(0)) // 2)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(cores)}
    with (runs / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def lengths(name: str, epochs: int | None, qat_epochs: int) -> list[str]:
    """Return the arguments that say how long a network is trained; without `epochs`, as its turn allows."""
    if epochs is None:
        return ["--in-turn"]
    graphs = NETWORKS[name].base.endswith("camvid")
    fixed = ["--epochs", str(epochs), "--qat-epochs", str(qat_epochs)]
    return [*fixed, "--set", f"train.cuda_graphs={str(graphs).lower()}"]


class Finished:
    """Packs each network as soon as its process has ended, in a thread of its own.

    Args:
        running: the processes.
        packer: of their run folders.
    """

    def __init__(self, running: Running, packer: Packer) -> None:
        self.running, self.packer = running, packer
        self.names: list[str] = []
        self._pool = ThreadPoolExecutor(1)
        self._packed: list[Future[None]] = []

    def look(self) -> None:
        """Begin to pack what has ended since the last call."""
        new = [name for name, one in self.running.items() if one.poll() is not None and name not in self.names]
        if new:
            self.names += new
            print(f"{time.strftime('%H:%M:%S')} ended: {', '.join(new)}", flush=True)
            self._packed.append(self._pool.submit(self._pack, list(self.names)))

    def close(self) -> None:
        """Pack the rest, and wait for it."""
        self.look()
        for one in self._packed:
            one.result()

    def _pack(self, names: list[str]) -> None:
        self.packer.small()
        self.packer.weights(names)


def train(names: list[str], running: Running, runs: Path, *, gpu_until: float, deadline: float) -> None:
    """Give the GPU to one network of a lane after the other."""
    for i, name in enumerate(names):
        while running[name].poll() is None and not is_ready(runs, name) and time.time() < deadline:
            time.sleep(0.1)
        shares = [NETWORKS[one].share for one in names[i:]]
        grant(runs, name, time.time() + max(0.0, gpu_until - time.time()) * shares[0] / sum(shares))
        while running[name].poll() is None and not handed_on(runs, name) and time.time() < deadline:
            time.sleep(0.2)


def wait(running: Running, finished: Finished, deadline: float) -> None:
    """Wait for all processes, and pack what each leaves."""
    while any(process.poll() is None for process in running.values()) and time.time() < deadline:
        finished.look()
        time.sleep(0.2)


def end(running: Running) -> None:
    """End the processes that still run."""
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
        shown = [row for row in rows if row["name"] in SHOWN]
        for row in shown:
            value = "n/a" if row["value"] is None else f"{row['value']:.2f}"
            yield f"{name} {row['variant']} {row['engine']} {row['name']} {value} {row['unit']}"
        log = (runs / f"{name}.log").read_text(errors="replace").splitlines()
        said = [line for line in log if "Speed(" in line or " epoch " in line]
        yield from (f"  {line[:180]}" for line in (said[:1] + said[-2:] if shown else log[-12:]))


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--camvid", required=True)
    parser.add_argument("--bccd", required=True)
    parser.add_argument("--out", type=Path, required=True, help="takes small.tar.gz and the first three pieces")
    parser.add_argument("--rest", type=Path, help="takes up to eight more pieces, for later calls to fetch, four each")
    parser.add_argument("--runs", type=Path, default=Path("runs/task_training"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS)[:6], choices=sorted(NETWORKS))
    parser.add_argument("--epochs", type=int, nargs="+", help="of each network: all train at once, without turns")
    parser.add_argument("--qat-epochs", type=int, default=3, help="of each network, with --epochs")
    parser.add_argument("--lanes", type=int, default=1, help="networks that have the GPU at the same time")
    parser.add_argument("--train-only", action="store_true", help="leave files and engines to a later call of run")
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--last-s", type=float, default=45.0, help="of these for the last network's files and packing")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="arguments of analysis.task_training.run")
    arguments = parser.parse_args()
    began, runs = time.time(), arguments.runs
    running: Running = {}
    epochs = dict(zip(arguments.networks, arguments.epochs or (), strict=bool(arguments.epochs)))
    for name in arguments.networks:
        data = arguments.camvid if NETWORKS[name].base.endswith("camvid") else arguments.bccd
        more = ["--train-only", *arguments.more] if arguments.train_only else list(arguments.more)
        more += lengths(name, epochs.get(name), arguments.qat_epochs)
        running[name] = start(name, data, runs, more)
    finished = Finished(running, Packer(runs, arguments.out, arguments.rest))
    deadline = began + arguments.budget_s - 10
    gpu_until = began + arguments.budget_s - arguments.last_s
    in_turn = [] if epochs else arguments.networks
    lanes = [in_turn[i :: arguments.lanes] for i in range(arguments.lanes)]
    try:
        with ThreadPoolExecutor(arguments.lanes) as pool:
            for lane in lanes:
                pool.submit(train, lane, running, runs, gpu_until=gpu_until, deadline=deadline)
            wait(running, finished, deadline)
    finally:
        end(running)
        finished.close()
        print("\n".join(table(runs, arguments.networks)))


if __name__ == "__main__":
    main()
