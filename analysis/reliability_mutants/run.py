"""Mutants of the modules on which silent errors rest, each against the tests of its part; see README.md."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import onnx
import onnxruntime
import pytest
import torch

from analysis.reliability_mutants.mutants import Mutant, mutant, places

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
"""Imported before the first fork, so that a mutant costs the import of compress and its tests alone."""

SECONDS = 120
"""Processor time after which a mutant counts as killed: it does not end."""


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a text instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the one module."""
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed text as the module."""
        module.__file__ = str(Path(self._mutant.file).resolve())
        exec(compile(self._mutant.text, module.__file__, "exec"), vars(module))


def tested(changed: Mutant, tests: Sequence[str]) -> int:
    """Fork, run the tests on the mutant, and return the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        torch.set_num_threads(1)
        sys.meta_path.insert(0, _Changed(changed))
        status = int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]))
    finally:
        os._exit(status)


def results(work: Sequence[tuple[Mutant, Sequence[str]]], jobs: int, seconds: float) -> Iterator[tuple[Mutant, bool]]:
    """Test mutants, `jobs` at a time, until the time is up; yield each with True if its tests failed."""
    end, waiting, running = time.monotonic() + seconds, list(work), dict[int, Mutant]()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < end:
            changed, tests = waiting.pop(0)
            running[tested(changed, tests)] = changed
        if not running:
            return
        child, status = os.wait()
        yield running.pop(child), status != 0


def sample(part: str, count: int, seed: int) -> tuple[int, list[Mutant]]:
    """Return the number of places of a part that the operators change, and `count` mutants in random order."""
    found = [place for file in PARTS[part][0] for place in places(file)]
    random.Random(seed).shuffle(found)
    made = (mutant(*place) for place in found)
    return len(found), list(islice((one for one in made if one is not None), count))


def main() -> None:
    """Test a sample of each part, and write mutants.json and mutants.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="one part (default: all)")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each part (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("results/reliability"), help="folder of the results")
    options = parser.parse_args()
    if "compress" in sys.modules:
        raise SystemExit("compress is imported already: its modules could not be changed")
    rows, work = {}, []
    for part in options.part or PARTS:
        count, chosen = sample(part, options.sample, options.seed)
        rows[part] = {"mutants": count, "tried": 0, "killed": 0, "survivors": []}
        work += [(part, one) for one in chosen]
    random.Random(options.seed).shuffle(work)
    part_of = {id(one): part for part, one in work}
    for one, killed in results([(m, PARTS[p][1]) for p, m in work], options.jobs, options.seconds):
        row: dict[str, Any] = rows[part_of[id(one)]]
        row["tried"] += 1
        row["killed"] += killed
        if not killed:
            row["survivors"].append({"file": one.file, "line": one.line, "change": one.change})
            print(f"{one.file}:{one.line} {one.operator}: {one.change}", flush=True)
    write(rows, options.out)


def write(rows: dict[str, Any], out: Path) -> None:
    """Write the table, without compress: the files of a study are written whole by the caller's file system here."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "mutants.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    lines = ["# Mutants", "", "| part | mutants | tried | killed | killed, % |", "|---|---|---|---|---|"]
    for part, row in rows.items():
        share = 100 * row["killed"] / row["tried"] if row["tried"] else float("nan")
        lines.append(f"| {part} | {row['mutants']} | {row['tried']} | {row['killed']} | {share:.0f} |")
    lines += ["", "Survivors:", "", "| where | change |", "|---|---|"]
    for row in rows.values():
        for found in row["survivors"]:
            lines.append(f"| {found['file']}:{found['line']} | `{found['change'].replace('|', chr(92) + '|')}` |")
    (out / "mutants.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
