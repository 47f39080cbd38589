"""Quantize all classifiers and segmentation networks of torchvision, and networks of all families of timm."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from analysis.common.study import Row, append_row, newest_rows, option, software, study_options
from analysis.sweep import report
from compress.measure.machine import describe_machine

ROOT = Path(__file__).parents[2]
_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that came to an end.

    Attributes:
        name: name of the part.
        returncode: exit status of the process; None if it ran past the limit.
        output: text that it printed on standard output.
        errors: text that it printed on standard error.
        seconds: duration by the clock.
    """

    name: str
    returncode: int | None
    output: str
    errors: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.output.strip().rpartition("\n")[2]

    @property
    def why(self) -> str:
        if self.returncode is None:
            return f"not done after {self.seconds:.0f} s"
        return f"process ended with {self.returncode}: {(self.errors.strip().splitlines() or [''])[-1][:300]}"


def side_by_side(
    commands: Iterable[tuple[str, Sequence[str]]], *, processes: int, timeout: float, budget_s: float | None = None
) -> Iterator[Ended]:
    """Run modules `processes` at a time, in order, and yield each as it ends.

    Args:
        commands: name of a part, and the arguments that follow `python -m`.
        processes: number of processes at a time, each with one thread (OMP_NUM_THREADS=1).
        timeout: seconds for each; a process that takes longer is killed and yielded without a return code.
        budget_s: seconds for all; later no process starts, and those that still run are killed and not yielded.
    """
    end = math.inf if budget_s is None else time.monotonic() + budget_s
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_run, name, arguments, timeout, end) for name, arguments in commands]
        for future in as_completed(futures):
            if (ended := future.result()) is not None:
                yield ended


def _run(name: str, arguments: Sequence[str], timeout: float, end: float) -> Ended | None:
    start = time.monotonic()
    limit = min(timeout, end - start)
    if limit <= 0:
        return None
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=_ENVIRONMENT, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - start
        return None if limit < timeout else Ended(name=name, returncode=None, output="", errors="", seconds=seconds)
    seconds = time.monotonic() - start
    return Ended(name=name, returncode=done.returncode, output=done.stdout, errors=done.stderr, seconds=seconds)


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--models", nargs="+", help="these, with or without a row; default: all without one"),
        option("--retry", action="store_true", help="also the models whose row is a failure"),
        option("--limit", type=int, help="largest number of models"),
        option("--timeout", type=int, default=900, help="seconds for a model"),
        option("--processes", type=int, default=1, help="models side by side, one thread each"),
        option("--budget-s", type=float, help="seconds for all; unfinished models get no row"),
        out="results",
    )
    log = arguments.out / "sweep.jsonl"
    todo = queue(arguments.models, newest_rows(log, "model"), retry=arguments.retry)[: arguments.limit]
    run(todo, log, arguments)
    report.write(log)


def run(models: list[str], log: Path, arguments: argparse.Namespace) -> None:
    measured = machine() | {"side_by_side": arguments.processes}
    commands = [(name, ["analysis.sweep.unit", name]) for name in models]
    options = {"processes": arguments.processes, "timeout": arguments.timeout, "budget_s": arguments.budget_s}
    done = 0
    for one in side_by_side(commands, **options):
        done += 1
        row = {"model": one.name, **row_of(one), "seconds": round(one.seconds, 1), "machine": measured}
        append_row(log, row)
        print(f"{one.name}: {row['status']} {row.get('error', '')} ({row['seconds']:.0f} s)", flush=True)
    if done < len(models):
        print(
            f"{len(models) - done} of {len(models)} not done in {arguments.budget_s:.0f} s; the same command continues"
        )


def row_of(ended: Ended) -> Row:
    found: Row = json.loads(ended.last_line) if ended.last_line.startswith("{") else {}
    return found or {"status": "failed", "stage": "?", "error": ended.why}


def queue(models: list[str] | None, rows: dict[str, Row], *, retry: bool) -> list[str]:
    if models:
        return models
    done = {name for name, row in rows.items() if row["status"] == "ok" or not retry}
    return [name for name in report.names() if name not in done]


def machine() -> Row:
    found = describe_machine()
    versions = software("torch", "onnxruntime", "openvino", "timm")
    return {"cpu": found.cpu, "cores": found.usable_cores, "versions": versions}


if __name__ == "__main__":
    main()
