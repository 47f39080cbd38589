"""The whole command on a user's own task, killed with SIGKILL at random moments and resumed: are the bits the same?

`compress qat` on examples/own_task.yaml (data, network, loss and metric of the user's) runs once undisturbed and once
in sessions that are killed, each after a part of the undisturbed run's time that is drawn evenly. Weights and ONNX
files are compared byte by byte, and every figure of metrics.json but times.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from analysis.common.study import command_line, study_parser
from compress.files import write_text

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TIMES = ("ms", "seconds", "images/s", "s")
"""Units of figures that differ from run to run."""


def begun(out: Path, changes: Sequence[str], *, resume: bool) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own, its output in a log beside the run folder."""
    words = [sys.executable, "-W", "ignore", "-m", "compress", "qat", "--recipe", "own_task.yaml", "--out", str(out)]
    words += [word for change in changes for word in ("--set", change)] + ["--resume"] * resume
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])}
    with out.with_name(f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(words, cwd=EXAMPLES, env=place, start_new_session=True, stdout=log, stderr=log)


def killed(out: Path, changes: Sequence[str], moments: Sequence[float]) -> list[str]:
    """Kill a session after each of so many seconds, let the last one end, and return what each kill found."""
    found = []
    for moment in moments:
        session = begun(out, changes, resume=out.is_dir())
        try:
            session.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
            state = out / "state.json"
            steps = json.loads(state.read_text())["steps"] if state.is_file() else {}
            found.append(", ".join(steps) or ("the folder" if out.is_dir() else "nothing"))
            continue
        break
    ended(begun(out, changes, resume=out.is_dir()), out)
    return found


def ended(session: subprocess.Popen[bytes], out: Path) -> None:
    """Wait for a session, and end with its log if it failed."""
    if session.wait():
        log = out.with_name(f"{out.name}.log").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"a session ended with status {session.returncode}:\n{log[-2000:]}")


def contents(out: Path) -> dict[str, Any]:
    """Return digests of weights and ONNX files, and the figures that are no times."""
    files = [path for pattern in ("*.safetensors", "*.onnx") for path in sorted(out.glob(pattern))]
    found: dict[str, Any] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    rows = json.loads((out / "metrics.json").read_text())
    for row in rows["metrics"] if isinstance(rows, dict) else rows:
        if row["unit"] not in TIMES:
            found[f"{row['variant']} {row['engine']} {row['name']} {row.get('batch_size')}"] = row["value"]
    return found


def main() -> None:
    """Run undisturbed, then disturbed, compare, and write own_task.md."""
    parser = study_parser(__doc__, out="results/reliability")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    parser.add_argument("--set", nargs="*", default=["train.checkpoint_steps=5", "qat.checkpoint_steps=5"])
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with TemporaryDirectory() as scratch:
        whole, disturbed = Path(scratch) / "whole", Path(scratch) / "disturbed"
        began = time.monotonic()
        ended(begun(whole, options.set, resume=False), whole)
        spent = time.monotonic() - began
        moments = [draw.uniform(0.2, 0.7) * spent for _ in range(options.kills)]
        seen = killed(disturbed, options.set, moments)
        one, other = contents(whole), contents(disturbed)
    differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    lines = [
        "# A task of the user's own, killed and resumed",
        "",
        f"`{command_line()}` on a CPU, torch {torch.__version__}: `compress qat --recipe own_task.yaml` takes "
        f"{spent:.0f} s undisturbed. The second run was ended by SIGKILL {len(seen)} times and then ran to its end.",
        "",
        f"{len(one)} weights files, ONNX files and figures that are no times: "
        + (f"{len(differing)} differ: {', '.join(differing)}." if differing else "all have the same bits."),
        "",
        "| kill | steps that had ended |",
        "|---:|---|",
        *(f"| {i} | {steps} |" for i, steps in enumerate(seen, 1)),
        "",
    ]
    write_text(options.out / "own_task.md", "\n".join(lines))
    print("\n".join(lines))
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
