"""Runs tests on a mutant in a forked process that has not imported compress yet."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from analysis.reliability_mutants.mutants import Mutant, Place, mutant

SECONDS = 90
"""Processor time after which a mutant counts as killed: it does not end."""

EQUIVALENT = 77
"""Exit status where the changed text means the same to Python."""

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")


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


class _Failures:
    """A plugin of pytest that writes the names of tests, and of files that cannot be imported, as they fail."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that fails."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(report.nodeid + "\n")


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)


def forked(place: Place, tests: Sequence[str]) -> int:
    """Fork, change the place, run the tests, and return the child's process id; its status is 0 if all pass."""
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
            sys.meta_path.insert(0, _Changed(changed))
            status = int(pytest.main([*tests, "-x", *OPTIONS]))
    finally:
        os._exit(status)


def failing_tests(tests: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Run the tests of all parts at the same time on the unchanged code, and return the names of those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for part, chosen in tests.items():
            child = os.fork()
            if not child:
                try:
                    _quiet()
                    arguments = [*chosen, "--continue-on-collection-errors", *OPTIONS]
                    pytest.main(arguments, plugins=[_Failures(Path(folder) / part)])
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        paths = {part: Path(folder) / part for part in tests}
        return {part: path.read_text().splitlines() if path.exists() else [] for part, path in paths.items()}
