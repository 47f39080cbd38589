"""Mutants of the modules on which silent errors rest, each against the tests of its part; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy
import onnx
import onnxruntime
import torch

from analysis.reliability_mutants.child import EQUIVALENT, Observed, forked, observe, preload
from analysis.reliability_mutants.mutants import Place, mutant, places
from analysis.reliability_mutants.report import write

PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "signs": (("compress/quantization/placement/signs.py",), ("tests/quantization/placement/test_values.py",)),
    "placement": (
        tuple(
            f"compress/quantization/placement/{name}.py"
            for name in ("dead", "decisions", "insert", "place", "read_fx", "requests", "residual", "rules", "view")
        ),
        ("tests/quantization/placement",),
    ),
    "fold": (("compress/graph/fold.py",), ("tests/graph/test_fold.py",)),
    "numerics": (
        ("compress/quantization/numerics.py",),
        ("tests/quantization/test_numerics.py", "tests/quantization/test_quantizer.py"),
    ),
    "audit": (
        tuple(f"compress/audit/{name}.py" for name in ("onnx", "rows", "requirement")),
        ("tests/audit/test_onnx.py", "tests/audit/test_rows.py", "tests/audit/test_requirement.py"),
    ),
    "checkpoint": (
        ("compress/training/checkpoint.py", "compress/training/tensor_file.py"),
        ("tests/training/test_checkpoint.py", "tests/training/test_formats.py"),
    ),
}
"""Files and tests of each part."""

PRELOADED = (numpy, onnx, onnxruntime, torch)
"""Imported before the first fork; the rest of what tests import is known after the first run."""

GRACE_S = 25
"""Time after which mutants that still run when the time is up are ended, and count as not tried."""

Fate = Literal["killed", "survived", "equivalent"]


@dataclass
class Part:
    """The results of one part.

    Attributes:
        places: of the part that the operators change.
        failing: tests that fail on the unchanged code of this machine, and are left out.
        tried: number of mutants.
        killed: number of those that a test saw.
        survivors: where and what, of those that none saw.
    """

    places: int
    failing: list[str] = field(default_factory=list)
    tried: int = 0
    killed: int = 0
    survivors: list[dict[str, Any]] = field(default_factory=list)


def fates(
    work: Sequence[tuple[str, Place]], observed: Mapping[str, Observed], jobs: int, seconds: float
) -> Iterator[tuple[str, Place, Fate]]:
    """Test mutants, `jobs` at a time, until the time is up; yield each with what became of it."""
    end, waiting, running = time.monotonic() + seconds, iter(work), dict[int, tuple[str, Place]]()
    while True:
        while len(running) < jobs and time.monotonic() < end and (one := next(waiting, None)):
            running[forked(one[1], observed[one[0]])] = one
        if not running:
            return
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            fate: Fate = "survived" if status == 0 else "killed"
            yield *running.pop(child), "equivalent" if os.waitstatus_to_exitcode(status) == EQUIVALENT else fate
        elif time.monotonic() > end + GRACE_S:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        else:
            time.sleep(0.02)


def sample(found: dict[str, list[Place]], count: int, seed: int) -> list[tuple[str, Place]]:
    """Return up to `count` places of each part in random order, the parts in turn."""
    drawn = [[(part, place) for place in random.Random(seed).sample(all_, len(all_))] for part, all_ in found.items()]
    turns = zip_longest(*(one[:count] for one in drawn))
    return [one for one in chain.from_iterable(turns) if one is not None]


def main() -> None:
    """Test a sample of each part, and write mutants.json and mutants.md after each mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="one part (default: all)")
    parser.add_argument("--sample", type=int, default=40, help="places of each part (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("results/reliability"), help="folder of the results")
    options = parser.parse_args()
    if "compress" in sys.modules:
        raise SystemExit("compress is imported already: its modules could not be changed")
    began = time.monotonic()
    names = options.part or list(PARTS)
    found = {name: [place for file in PARTS[name][0] for place in places(file)] for name in names}
    parts = {name: Part(places=len(found[name])) for name in names}
    observed = observe({name: PARTS[name] for name in names}, options.jobs)
    for name, seen in observed.items():
        parts[name].failing = seen.failing
        seconds = sum(seen.seconds.values())
        print(f"{name}: {parts[name].places} places; {seconds:.0f} s of tests; left out: {seen.failing}", flush=True)
    preload([module for seen in observed.values() for module in seen.modules])
    print(f"{time.monotonic() - began:.0f} s until the first mutant", flush=True)
    work = sample(found, options.sample, options.seed)
    for name, place, fate in fates(work, observed, options.jobs, options.seconds - (time.monotonic() - began)):
        row = parts[name]
        if fate != "equivalent":
            row.tried, row.killed = row.tried + 1, row.killed + (fate == "killed")
        if fate == "survived" and (one := mutant(place)):
            row.survivors.append({"file": one.file, "line": one.line, "change": one.change})
            print(f"{one.file}:{one.line} {one.operator}: {one.change}", flush=True)
        write({name: vars(part) for name, part in parts.items()}, options.out)
    print(json.dumps({name: [part.tried, part.killed] for name, part in parts.items()}), flush=True)


if __name__ == "__main__":
    main()
