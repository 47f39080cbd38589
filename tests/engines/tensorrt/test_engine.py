# The run path: what it checks on the host, everywhere; and the engine itself, where a GPU and a library are.

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from compress import build_engine, build_tensorrt, engine_availability, export_onnx
from compress.engines.base import GpuTimes, TensorInfo
from compress.engines.tensorrt.engine import TORCH_TYPES, check_tensors, checked_metadata, engine_beside
from compress.engines.tensorrt.library import (
    FLAVOURS,
    driver_problem,
    library_cuda,
    sm_problem,
    tensorrt_availability,
    tensorrt_library,
    two_versions,
)
from compress.engines.tensorrt.metadata import EngineMetadata, check_runnable, metadata_path, sha256
from compress.engines.tensorrt.options import TensorRTOptions, profiles_of
from compress.errors import EngineError, EngineUnavailableError
from tests.engines.tensorrt.files import IMAGE, network, write_all

CPU = torch.device("cpu")
INPUT = TensorInfo(name="input", dtype="float32", shape=(-1, *IMAGE))
METADATA = EngineMetadata(
    engine="tensorrt",
    version="10.14.1",
    parser_version="1",
    gpu="",
    sms=(89,),
    recipe="",
    variant="ptq",
    onnx="ptq.onnx",
    onnx_sha256="",
    engine_bytes=0,
    engine_sha256="",
    options={},
    profiles=profiles_of((INPUT,), TensorRTOptions(batch=(1, 4, 8)), where="ptq.onnx"),
    inputs=(INPUT,),
    outputs=(),
    float_types=("f16", "f32"),
    onnx_metadata={},
    build_seconds=0.0,
)


def test_tensors_that_can_be_read_where_they_lie_are_taken():
    check_tensors({"input": torch.zeros(8, *IMAGE)}, METADATA, CPU, label="e")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "got inputs none; the engine takes input"),
        ({"input": torch.zeros(1, *IMAGE), "more": torch.zeros(1)}, "got inputs input, more"),
        ({"input": torch.zeros(1, *IMAGE, dtype=torch.float16)}, "is float16; the engine takes float32"),
        ({"input": torch.zeros(1, *IMAGE, device="meta")}, "is on meta; the engine runs on cpu"),
        ({"input": torch.zeros(2, *IMAGE).to(memory_format=torch.channels_last)}, "not contiguous"),
        ({"input": torch.zeros(9, *IMAGE)}, "batch=1,9,9"),
    ],
)
def test_tensors_that_cannot_be_read_where_they_lie_are_refused(inputs, message):
    with pytest.raises(EngineError, match=message):
        check_tensors(inputs, METADATA, CPU, label="e")


@pytest.mark.parametrize(
    ("kinds", "options", "sms", "expected"),
    [
        (("f16", "f32"), {}, (89,), "f16"),
        (("bf16", "f16"), {}, (89,), "unknown"),
        (("f32",), {"tf32": True}, (89,), "tf32"),
        (("f32",), {"tf32": False}, (89,), "f32"),
        (("f32",), {"tf32": True}, (75,), "f32"),
    ],
)
def test_the_type_of_the_remainder_is_the_files_and_tf32_is_reported(kinds, options, sms, expected):
    assert dataclasses.replace(METADATA, float_types=kinds, options=options, sms=sms).float_precision == expected


def test_types_of_torch_and_of_the_file_are_of_one_size():
    for name, dtype in TORCH_TYPES.items():
        if name != "bfloat16":
            assert np.dtype(name).itemsize == dtype.itemsize
            assert torch.from_numpy(np.zeros(1, dtype=name)).dtype == dtype


def times(batch, *ms):
    return GpuTimes(batch_size=batch, copy_in_ms=ms, compute_ms=ms, copy_out_ms=ms, total_ms=ms)


def test_throughput_is_of_the_median():
    assert times(8, 1.0, 2.0, 100.0).images_per_s == 4000


USABLE = [name for name in FLAVOURS if tensorrt_availability(name).available]


@pytest.mark.skipif(not USABLE, reason="needs a GPU with TensorRT or TensorRT-RTX")
@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("graph", ["no", "yes"])
def test_on_a_gpu_all_ways_to_run_agree_with_onnxruntime(tmp_path, name, graph):
    files = write_all(tmp_path)
    batches = [np.random.default_rng(i).standard_normal((4, *IMAGE)).astype(np.float32) for i in range(5)]
    with (
        build_engine(files["float"], "onnxruntime") as reference,
        build_engine(files["float"], name, cuda_graph=graph) as engine,
    ):
        expected = [reference.run({"input": batch})["logits"] for batch in batches]
        one_by_one = [engine.run({"input": batch})["logits"] for batch in batches]
        resident = [engine.run_tensors({"input": torch.from_numpy(batch).cuda()}) for batch in batches]
        torch.cuda.synchronize()
        for got in (one_by_one, [out["logits"].cpu().numpy() for out in resident]):
            np.testing.assert_allclose(np.stack(got), np.stack(expected), rtol=2e-2, atol=2e-2)
        assert min(engine.gpu_times({"input": batches[0]}, runs=5).compute_ms) > 0
        with pytest.raises(EngineError, match="batch=1,33,33"):
            engine.run({"input": np.zeros((33, *IMAGE), np.float32)})


# The engine `tensorrt-lean` takes version-compatible engines of TensorRT, and refuses every other file in words.

COMPATIBLE = {"version_compatible": True}


def engine_file(path, **changes):
    # An engine file as TensorRT's build leaves it; the content is a stand-in, which no library reads here.
    path.write_bytes(b"ftrt" + bytes(1000))
    changes = {"options": COMPATIBLE, "engine_bytes": 1004, "engine_sha256": sha256(path), "onnx": "m.onnx"} | changes
    metadata = dataclasses.replace(METADATA, **changes)
    metadata_path(path).write_text(json.dumps(metadata.to_dict()))
    return path


def test_a_version_compatible_engine_of_tensorrt_is_taken(tmp_path):
    path = engine_file(tmp_path / "m.tensorrt.sm89.engine")
    assert checked_metadata(path, "tensorrt-lean").engine == "tensorrt"
    assert engine_beside(tmp_path / "m.onnx", "tensorrt-lean") == path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {}}, "no version-compatible engine.*version_compatible=yes"),
        ({"engine": "tensorrt-rtx"}, "built with tensorrt-rtx; load it as 'tensorrt-rtx'"),
        ({"engine": "tensorrt-lean"}, "engine is 'tensorrt-lean'; one of: tensorrt, tensorrt-rtx"),
        ({"engine_bytes": 2000}, "truncated: 1,004 bytes of 2,000"),
        ({"engine_sha256": "0"}, "its bytes are not those that were built"),
        (None, r"engine\.json is missing"),
    ],
)
def test_foreign_truncated_and_tampered_engines_are_refused_before_the_library_sees_them(changes, message, tmp_path):
    path = engine_file(tmp_path / "m.tensorrt.sm89.engine", **(changes or {}))
    if changes is None:
        metadata_path(path).unlink()
    with pytest.raises(EngineError, match=message):
        build_engine(path, "tensorrt-lean")


@pytest.mark.parametrize(
    ("engine", "built", "options", "here", "refused"),
    [
        ("tensorrt-rtx", "1.7", {}, ("1.7", "RTX 4090", 89), ""),
        ("tensorrt-rtx", "1.7", {}, ("1.8", "RTX 4090", 89), "built with TensorRT-RTX 1.7 and here is 1.8"),
        ("tensorrt-rtx", "1.7", {}, ("1.7", "RTX 3090", 86), "built for SM 89, 120; build it again with --sm 86"),
        ("tensorrt", "1.7", {}, ("1.7", "L40S", 89), ""),
        ("tensorrt", "1.7", {}, ("1.7", "L4", 89), "built on L40S, for that GPU alone"),
        ("tensorrt", "1.7", {"hardware": "same-compute-capability"}, ("1.7", "L4", 89), ""),
        ("tensorrt", "1.7", {"hardware": "same-compute-capability"}, ("1.7", "A100", 80), "built for SM 89, 120"),
        ("tensorrt", "1.7", {"hardware": "ampere-plus"}, ("1.7", "H200", 90), ""),
        ("tensorrt", "1.7", {"hardware": "ampere-plus"}, ("1.7", "T4", 75), "Ampere and later"),
        ("tensorrt", "1.7", {}, ("2.0", "L40S", 89), "or build with version_compatible"),
        # Version-compatible engines run with their own version and later ones, and not with older ones ...
        ("tensorrt", "11.4.0.106", COMPATIBLE, ("11.4.0.106", "L40S", 89), ""),
        ("tensorrt", "10.13.0.35", COMPATIBLE, ("11.4.0.106", "L40S", 89), ""),
        ("tensorrt", "11.0.0.1", COMPATIBLE, ("11.4.0.106", "L40S", 89), ""),
        ("tensorrt", "11.5.0.1", COMPATIBLE, ("11.4.0.106", "L40S", 89), "with TensorRT 11.5.0.1 and here is 11.4.0"),
        ("tensorrt", "11.10.0.1", COMPATIBLE, ("11.4.0.106", "L40S", 89), "with TensorRT 11.10.0.1 and here is 11.4"),
        ("tensorrt", "12.0.0.1", COMPATIBLE, ("11.4.0.106", "L40S", 89), "with TensorRT 12.0.0.1 and here is 11.4"),
    ],
)
def test_where_an_engine_may_run(engine, built, options, here, refused, tmp_path):
    row = dataclasses.replace(METADATA, engine=engine, version=built, gpu="L40S", sms=(89, 120), options=options)
    version, gpu, sm = here
    with pytest.raises(EngineError, match=refused) if refused else contextlib.nullcontext():
        check_runnable(tmp_path / "e", row, version=version, gpu=gpu, sm=sm)


def test_a_model_needs_an_engine_beside_it_and_the_builder_is_elsewhere(tmp_path):
    onnx = tmp_path / "m.onnx"
    onnx.write_bytes(b"")
    with pytest.raises(
        EngineUnavailableError, match="has no builder.*--engine tensorrt --option version_compatible=yes"
    ):
        build_engine(onnx, "tensorrt-lean")
    first = engine_file(tmp_path / "m.tensorrt.sm89.engine")
    shutil.copy(first, tmp_path / "m.tensorrt.sm90.engine")
    shutil.copy(metadata_path(first), metadata_path(tmp_path / "m.tensorrt.sm90.engine"))
    with pytest.raises(EngineUnavailableError, match="name one of them"):
        build_engine(onnx, "tensorrt-lean")


def test_it_builds_nothing(tmp_path):
    onnx = export_onnx(network(), torch.randn(1, *IMAGE), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="has no builder: build with --engine tensorrt"):
        build_tensorrt(onnx, "tensorrt-lean", options=TensorRTOptions())


def test_doctor_knows_its_version():
    (row,) = [row for row in engine_availability() if row.name == "tensorrt-lean"]
    assert row.version.startswith("11.")
    assert row.available or "CUDA" in row.reason
    assert "tensorrt-lean" in FLAVOURS


# The library: placeholders, mixtures of versions, drivers that are too old, and its collected messages.


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
    assert two_versions("tensorrt", whole | rtx) == two_versions("tensorrt_rtx", whole | rtx) == ""
    mixed = two_versions("tensorrt", whole | {"tensorrt_cu12_bindings": "10.14.1"})
    assert "tensorrt_cu12_bindings 10.14.1" in mixed and "pip uninstall" in mixed
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
    # The library returns an object all the same, whose use or end is a segmentation fault.
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
