"""Examples in docstrings run in an empty folder, with what the first two blocks of docs/api.md make."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

NETWORK, FILES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent / "docs/api.md").read_text(), re.DOTALL)[:2]


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
