"""The library: placeholders, mixtures of versions, drivers that are too old, and its collected messages."""

import importlib
import importlib.metadata
import re
import subprocess
import sys

import pytest
import torch

from compress.engines.tensorrt.library import (
    FLAVOURS,
    driver_problem,
    library_cuda,
    sm_problem,
    tensorrt_library,
    two_versions,
)
from compress.errors import EngineError, EngineUnavailableError


def module(tmp_path, monkeypatch, name, source):
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


def test_an_unknown_name_is_refused():
    with pytest.raises(EngineError, match="'tensort' is no TensorRT engine, did you mean"):
        tensorrt_library("tensort")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('get me elsewhere')", "get me elsewhere.*pip install"),
        ("", "placeholder.*pip install"),
        ("import nothing_of_this_name", "cannot be imported.*nothing_of_this_name"),
        ("__version__ = '8.6.1'\nclass Builder: pass", "TensorRT 8.6.1 is installed and compress needs 10"),
    ],
)
def test_what_is_no_tensorrt_is_unavailable(tmp_path, monkeypatch, source, message):
    module(tmp_path, monkeypatch, "tensorrt", source)
    with pytest.raises(EngineUnavailableError, match=message):
        tensorrt_library("tensorrt")


def test_two_versions_over_each_other_are_told_apart_from_one():
    parts = ("", "_cu13", "_cu13_libs", "_cu13_bindings")
    whole = {f"tensorrt{part}": "10.14.1" for part in parts}
    rtx = {f"tensorrt_rtx{part}": "1.7.1" for part in parts}
    assert two_versions("tensorrt", whole | rtx) == ""
    assert two_versions("tensorrt_rtx", whole | rtx) == ""
    mixed = two_versions("tensorrt", whole | {"tensorrt_cu12_bindings": "10.14.1"})
    assert "tensorrt_cu12_bindings 10.14.1" in mixed
    assert "pip uninstall" in mixed
    assert "11.0.0" in two_versions("tensorrt", whole | {"tensorrt_cu13_libs": "11.0.0"})


@pytest.mark.parametrize(
    ("driver", "library", "problem_text"),
    [(13000, 13, ""), (13020, 12, ""), (None, 13, ""), (12080, None, ""), (12080, 13, "supports CUDA 12.8 .* CUDA 13")],
)
def test_a_driver_older_than_the_library(driver, library, problem_text):
    problem = driver_problem(driver, library, title="TensorRT")
    assert bool(problem) == bool(problem_text)
    if problem_text:
        assert re.search(problem_text, problem)


def test_a_gpu_that_rtx_does_not_run_on_needs_tensorrt_itself():
    rtx, trt = FLAVOURS["tensorrt-rtx"], FLAVOURS["tensorrt"]
    assert "needs TensorRT itself" in sm_problem(rtx, (86, 89), ("H200", 90))
    assert sm_problem(rtx, (86, 89), ("RTX 4090", 89)) == ""
    assert sm_problem(rtx, (86, 89), None) == ""
    assert sm_problem(trt, (), ("H200", 90)) == ""


def test_cuda_of_the_packages():
    assert library_cuda("tensorrt", {"tensorrt_rtx_cu13": "1", "tensorrt_cu12_libs": "10"}) == 12
    assert library_cuda("tensorrt", {"tensorrt": "10"}) is None


def test_the_real_library_is_heard():
    library = tensorrt_library("tensorrt-rtx")
    assert tensorrt_library("tensorrt-rtx") is library
    assert library.flavour is FLAVOURS["tensorrt-rtx"]
    assert {80, 86, 89, 120} <= set(library.sms())
    with library.listening() as log:
        library.logger.log(library.trt.ILogger.ERROR, "first\nsecond")
        library.logger.log(library.trt.ILogger.VERBOSE, "a detail")
    library.logger.log(library.trt.ILogger.ERROR, "after")
    assert log.text() == "[E] first\nsecond\n[V] a detail\n"
    assert log.errors() == "first second"


def test_the_lean_runtime_is_tensorrt_itself_without_its_builder():
    lean = tensorrt_library("tensorrt-lean")
    assert lean.version == importlib.metadata.version("tensorrt-lean")
    assert not hasattr(lean.trt, "Builder")
    for kind, names in {
        "BuilderFlag": ("SPARSE_WEIGHTS", "REFIT", "VERSION_COMPATIBLE", "TF32"),
        "HardwareCompatibilityLevel": ("AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"),
        "ProfilingVerbosity": ("DETAILED",),
        "MemoryPoolType": ("WORKSPACE",),
        "LayerInformationFormat": ("JSON",),
    }.items():
        assert set(names) <= set(getattr(lean.trt, kind).__members__)
    assert tuple(lean.trt.Dims((1, 2, 3))) == (1, 2, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_runtime_without_a_driver_is_refused_and_does_not_end_the_process():
    """The library returns an object all the same, whose use or end is a segmentation fault."""
    script = (
        "from compress.engines.tensorrt.library import start_runtime, tensorrt_library\n"
        "from compress.errors import EngineUnavailableError\n"
        "try:\n    start_runtime(tensorrt_library('tensorrt-lean'))\n"
        "except EngineUnavailableError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search("lean runtime 11.* does not start: .*CUDA", done.stdout)


def test_a_folder_of_type_stubs_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.pyi").write_text("class Builder: ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(EngineUnavailableError, match="tensorrt is not installed"):
        tensorrt_library("tensorrt")
