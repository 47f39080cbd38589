"""Runs tests on a mutant in a forked process that has not imported compress yet."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch

from analysis.reliability_mutants.mutants import Place, mutant, with_calls

SECONDS = 90
"""Processor time after which a mutant counts as killed: it does not end."""

EQUIVALENT = 77
"""Exit status where the changed text means the same to Python."""

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")

OUTSIDE = ""
"""In the place of a test: functions that run while modules are imported, or tests are collected."""

_OWN = ("compress", "tests", "analysis", "examples", "conftest", "__main__", "torch._inductor")
"""Packages that the process that forks must not have imported: what is changed, and what has threads."""


@dataclass
class Observed:
    """Results of the tests of a part on the unchanged code.

    Attributes:
        failing: tests that fail, and files that cannot be imported.
        seconds: of each test.
        runs: tests that run a function, by `file:line`, `OUTSIDE` among them.
        modules: packages of others that the tests import.
    """

    failing: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    runs: dict[str, list[str]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    def tests_of(self, function: str | None) -> list[str]:
        """Return the tests that run a function (None: what runs at import), the quickest first, failing ones not."""
        chosen = self.seconds.keys() if function is None else self.runs.get(function, [])
        if OUTSIDE in chosen:
            chosen = self.seconds.keys()
        return sorted((name for name in chosen if name not in self.failing), key=self.seconds.__getitem__)


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from texts instead of their files."""

    def __init__(self, texts: Mapping[str, str], ran: Callable[[str], None] | None = None) -> None:
        self._files = {file.removesuffix(".py").replace("/", "."): file for file in texts}
        self._texts, self._ran = texts, ran

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for one of the modules."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._files else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the text as the module."""
        file = self._files[module.__name__]
        module.__file__ = str(Path(file).resolve())
        if self._ran is not None:
            vars(module)["__ran__"] = self._ran
        exec(compile(self._texts[file], module.__file__, "exec"), vars(module))


class _Watch:
    """A plugin of pytest that notes each test's time, failure and the functions that it runs."""

    def __init__(self) -> None:
        self.observed, self._runs, self._now = Observed(), defaultdict[str, set[str]](set), OUTSIDE

    def ran(self, function: str) -> None:
        """Note a function that runs now."""
        self._runs[function].add(self._now)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test."""
        self._now = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the time of a test and that it fails."""
        self.observed.seconds[report.nodeid] = self.observed.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.observed.failing.append(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        """End a test."""
        self._now = OUTSIDE

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.observed.failing.append(report.nodeid)

    def write(self, path: Path) -> None:
        """Write what was observed."""
        self.observed.runs = {function: sorted(tests) for function, tests in self._runs.items()}
        self.observed.modules = [name for name in sys.modules if not name.startswith(_OWN)]
        path.write_text(json.dumps(vars(self.observed)), encoding="utf-8")


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)


def forked(place: Place, observed: Observed) -> int:
    """Fork, change the place, run the tests that run it, and return the child's process id; 0 if all pass."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _quiet()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        changed = mutant(place)
        if changed is None:
            status = EQUIVALENT
        else:
            sys.meta_path.insert(0, _Changed({changed.file: changed.text}))
            tests = observed.tests_of(changed.function)
            status = int(pytest.main([*tests, "-x", *OPTIONS])) if tests else 0
    finally:
        os._exit(status)


def observe(parts: Mapping[str, tuple[Sequence[str], Sequence[str]]], jobs: int) -> dict[str, Observed]:
    """Run the tests of parts (files, tests) on the unchanged code, `jobs` at a time, and return what they do."""
    with tempfile.TemporaryDirectory() as folder:
        running: set[int] = set()
        for part, (files, tests) in parts.items():
            while len(running) >= jobs:
                running.discard(os.wait()[0])
            child = os.fork()
            if not child:
                try:
                    _quiet()
                    watch = _Watch()
                    sys.meta_path.insert(0, _Changed({file: with_calls(file) for file in files}, watch.ran))
                    pytest.main([*tests, "--continue-on-collection-errors", *OPTIONS], plugins=[watch])
                    watch.write(Path(folder) / part)
                finally:
                    os._exit(0)
            running.add(child)
        while running:
            running.discard(os.wait()[0])
        return {part: Observed(**json.loads((Path(folder) / part).read_text())) for part in parts}


def preload(modules: Sequence[str], seconds: float = 60) -> None:
    """Import packages of others, so that a mutant costs the import of compress and its tests alone."""
    end = time.monotonic() + seconds
    for name in modules:
        if name not in sys.modules and time.monotonic() < end:
            try:
                importlib.import_module(name)
            except Exception:  # a name that only another module makes
                continue
