"""The calls of TensorRT are those of its real API: mypy checks them against the type stubs of TensorRT 10.13."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import compress.engines.tensorrt as package

FILES = ("library", "builder", "engine", "context", "build")
SETTINGS = """[mypy]
ignore_missing_imports = True
disallow_any_unimported = False
check_untyped_defs = True
[mypy-tensorrt.*]
ignore_errors = True
[mypy-tensorrt_bindings.*]
ignore_errors = True
[mypy-compress.*,torch.*,numpy.*,pydantic.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """The published stubs, with what makes five of their signatures no Python put right."""
    try:
        files = importlib.metadata.files("tensorrt-stubs") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tensorrt-stubs is not installed (pip install --no-deps tensorrt-stubs)")
    folder = tmp_path_factory.mktemp("stubs")
    for file in (file for file in files if file.suffix == ".pyi"):
        text = re.sub(r"\bin: list\[", "in_: list[", file.read_text())
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text.replace("channel_axis: int)", "channel_axis: int = 0)"))
    return folder


def errors(stubs, folder, **changed):
    """What mypy says of our files, in which the module `trt`, known at run time alone, is that of the stubs."""
    for name in FILES:
        text = changed.get(name) or (Path(package.__file__).parent / f"{name}.py").read_text()
        text = re.sub(r"^ +trt = .*\.trt$", lambda line: line.group().partition("trt")[0] + "pass", text, flags=re.M)
        text = re.sub(r"[\w.]+\.trt\.", "trt.", text.replace("(trt: Any", "(_trt: Any"))
        head = "from __future__ import annotations\n"
        assert head in text
        (folder / f"{name}.py").write_text(text.replace(head, head + "import tensorrt as trt\n", 1))
    (folder / "mypy.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=mypy.ini", *(f"{name}.py" for name in FILES)],
        cwd=folder,
        env={"MYPYPATH": str(stubs), "PATH": "", "MYPY_CACHE_DIR": str(stubs / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_our_calls_are_those_of_the_real_library(stubs, tmp_path):
    assert not errors(stubs, tmp_path)


def test_a_wrong_call_would_be_seen(stubs, tmp_path):
    text = (Path(package.__file__).parent / "builder.py").read_text()
    assert "config.add_optimization_profile(" in text
    wrong = text.replace("config.add_optimization_profile(", "config.add_profile(").replace(
        "set_memory_pool_limit(trt.", 'set_memory_pool_limit("workspace", trt.'
    )
    found = errors(stubs, tmp_path, builder=wrong)
    assert any("add_profile" in line for line in found)
    assert any("set_memory_pool_limit" in line for line in found)
