"""The public surface: names, version, and that what the README shows runs."""

import re
from pathlib import Path

import compress

ROOT = Path(__file__).parent.parent


def test_all_is_sorted_and_whole():
    names = compress.__all__
    assert names == sorted(names)
    assert all(hasattr(compress, name) for name in names)


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == compress.__version__


def test_every_public_function_and_class_says_what_it_does():
    for name in compress.__all__:
        if not name.startswith("__"):
            assert getattr(compress, name).__doc__, name


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_lines_run(tmp_path, monkeypatch):
    """The library examples, in order, in one namespace and an empty folder, exactly as they stand."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks()
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "model.onnx").stat().st_size > 0
