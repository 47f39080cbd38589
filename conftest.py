"""Examples in docstrings run in an empty folder, with what the first two blocks of docs/api.md make.

What was imported stays to the end, so that Python's garbage collector need not look at it again: on exports that took a
sixth of the time.
"""

import gc
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

NETWORK, FILES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent / "docs/api.md").read_text(), re.DOTALL)[:2]


FIRST = ("tests/pipeline", "tests/engines", "tests/report", "tests/qat_fusion", "tests/cli", "tests/export")
"""Rooms whose files take longest: two processes end together where the last files are short ones."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files run first."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what the modules of all tests hold, and collect the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


def pytest_sessionfinish() -> None:
    """Let everything be freed at the end, as libraries expect that look for leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two files, which are written once."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(NETWORK + FILES, {})
    return folder


@pytest.fixture(autouse=True)
def example(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """The network anew for every example, as some train it."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        shutil.copytree(request.getfixturevalue("files"), folder, dirs_exist_ok=True)
        request.getfixturevalue("monkeypatch").chdir(folder)
        exec(NETWORK, doctest_namespace)
