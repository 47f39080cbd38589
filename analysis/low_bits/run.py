"""Trains networks on CIFAR-10 in float and at few bits, all jobs in one budget of seconds on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from analysis.common.study import command_line, gpu_software, study_parser
from analysis.low_bits.jobs import JOBS
from analysis.low_bits.report import write

MODES = ("compiled", "graph", "eager")
"""Ways to run a step; a job that fails in one is started again in the next."""
START_S = 60
"""Seconds until the first job is compiled."""


class Process:
    """A job's process, which is started again in a simpler mode if it fails."""

    def __init__(self, name: str, arguments: list[str], out: Path, modes: list[str]) -> None:
        self.name, self.arguments, self.out, self.modes = name, arguments, out, modes
        self.start()

    def start(self) -> None:
        """Start it in the first mode that is left."""
        log = (self.out / f"{self.name}.log").open("a")
        command = [sys.executable, "-m", "analysis.low_bits.train", self.name, "--mode", self.modes.pop(0)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        self.process = subprocess.Popen([*command, *self.arguments], stdout=log, stderr=log, env=environment)

    def ended(self) -> bool:
        """Return True if it has ended for good."""
        if self.process.poll() is None:
            return False
        if self.process.returncode and self.modes:
            self.start()
            return False
        return True


def main() -> None:
    """Run all jobs in turn, each compiled beforehand, and write the page."""
    parser = study_parser(__doc__, out="results/low_bits")
    parser.add_argument("--data", required=True, help="folder of cifar-10-batches-py")
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--floats", type=Path, help="folder of trained float networks; default: OUT")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    end = begin + o.budget_s
    unit = (o.budget_s - START_S) / sum(JOBS[name].weight * JOBS[name].seeds for name in o.jobs)
    (o.out / "about.json").write_text(json.dumps({"command": command_line(), "software": gpu_software()}))
    started = {}
    for name in o.jobs:
        values = {"out": o.out, "floats": o.floats or o.out, "data": o.data, "seconds": unit * JOBS[name].weight}
        values |= {"batch": o.batch, "end": end - 5}
        arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        started[name] = Process(name, arguments, o.out, list(o.modes))
    for name, process in started.items():
        (o.out / f"{name}.turn").touch()
        while not process.ended() and time.time() < end:
            time.sleep(0.2)
    for process in started.values():
        if process.process.poll() is None:
            process.process.kill()
    for left_over in [*o.out.glob("*.turn")]:
        left_over.unlink()
    errors = [f"{log.stem}: {log.read_text()[-600:]}" for log in o.out.glob("*.log") if "Error" in log.read_text()]
    for log in o.out.glob("*.log"):
        log.unlink()
    print(write(o.out))
    print(f"{time.time() - begin:.0f} s", *errors, sep="\n")


if __name__ == "__main__":
    main()
