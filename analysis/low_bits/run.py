"""Trains networks on CIFAR-10 in float and at few bits, all jobs in one budget of seconds on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from analysis.common.study import command_line, gpu_software, study_parser
from analysis.low_bits.beside import BESIDE, Beside
from analysis.low_bits.jobs import JOBS
from analysis.low_bits.report import write
from analysis.low_bits.train import float_file

MODES = ("compiled", "graph", "eager")
"""Ways to run a step; a job that fails in one is started again in the next."""
SPARE_S = 5
"""Seconds between the last step and the end of the budget."""


class Process:
    """A job's process, which is started again in a simpler mode if it fails."""

    def __init__(self, name: str, arguments: list[str], out: Path, modes: list[str]) -> None:
        self.name, self.arguments, self.out, self.modes = name, arguments, out, modes
        first = JOBS[name].recorded
        if first in modes:
            self.modes = modes[modes.index(first) :]
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
            (self.out / f"{self.name}.ready").unlink(missing_ok=True)
            self.start()
            return False
        return True

    def ready(self, floats: Path) -> bool:
        """Return True if its step is recorded and the float network that it begins from is there."""
        job = JOBS[self.name]
        given = job.bits is None or float_file(job.network, self.out, floats).exists()
        return given and (self.out / f"{self.name}.ready").exists()


def main() -> None:
    """Run all jobs in turn, each compiled beforehand, and write the page."""
    parser = study_parser(__doc__, out="results/low_bits")
    parser.add_argument("--data", required=True, help="folder of cifar-10-batches-py")
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=[], help="measurements of float networks")
    parser.add_argument("--steps", type=int, default=300, help="of each block in these measurements")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--floats", type=Path, help="folder of trained float networks; default: OUT")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    end, floats = begin + o.budget_s, o.floats or o.out
    (o.out / "about.json").write_text(json.dumps({"command": command_line(), "software": gpu_software()}))
    values = {"out": o.out, "floats": floats, "data": o.data, "batch": o.batch, "end": end - SPARE_S}
    arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    waiting = {name: Process(name, arguments, o.out, list(o.modes)) for name in o.jobs}
    beside = Beside(list(o.beside), o.out, floats, o.data, o.steps)
    take_turns(waiting, beside, floats, end)
    while not beside.poll() and time.time() < end:
        time.sleep(0.2)
    beside.kill()
    beside.gather()
    for left_over in [*o.out.glob("*.turn"), *o.out.glob("*.ready"), *o.out.glob("*.part")]:
        left_over.unlink()
    logs = {log: log.read_text() for log in o.out.glob("*.log")}
    errors = [f"{log.stem}: {text[-600:]}" for log, text in logs.items() if "Error" in text]
    for log in logs:
        log.unlink()
    print(write(o.out))
    print(f"{time.time() - begin:.0f} s", *errors, sep="\n")


def take_turns(waiting: dict[str, Process], beside: Beside, floats: Path, end: float) -> None:
    """Let the first job that is ready train for its share of the time that is left, again and again."""
    started = dict(waiting)
    while waiting and time.time() < end:
        beside.poll()
        for name in [name for name, process in waiting.items() if process.ended()]:
            del waiting[name]  # it has failed in every mode
        name = next((name for name, process in waiting.items() if process.ready(floats)), "")
        if not name:
            time.sleep(0.1)
            continue
        whole = sum(JOBS[other].weight * JOBS[other].seeds for other in waiting)
        process = waiting.pop(name)
        seconds = (end - SPARE_S - time.time()) * JOBS[name].weight / whole
        turn = process.out / f"{name}.turn"
        turn.with_suffix(".part").write_text(str(seconds))
        turn.with_suffix(".part").rename(turn)
        while not process.ended() and time.time() < end:
            beside.poll()
            time.sleep(0.1)
    for process in started.values():
        if process.process.poll() is None:
            process.process.kill()


if __name__ == "__main__":
    main()
