# Real builds with TensorRT-RTX, on a machine with or without a GPU; and everything that is refused before or after.

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compress
import compress.engines.tensorrt as package
from compress.audit.files import read_engine_layers
from compress.engines.tensorrt.build import UNITS, BuildProgress, PhaseMeter, keep_timing_cache, use_timing_cache
from compress.engines.tensorrt.engine import checked_metadata
from compress.engines.tensorrt.library import Library, tensorrt_library
from compress.engines.tensorrt.metadata import (
    EngineMetadata,
    log_path,
    metadata_path,
    read_metadata,
    sha256,
)
from compress.engines.tensorrt.options import TensorRTOptions, parse_options
from compress.errors import EngineError, EngineUnavailableError
from compress.support.progress import NoProgress
from tests.engines.tensorrt.files import KINDS, network, unsupported, write_all
from tests.further import further

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def built(files):
    return {kind: compress.build_tensorrt(path, options=TensorRTOptions(sms=(89, 120))) for kind, path in files.items()}


def layers(log, kind):
    lines = [line for line in log.splitlines() if f"LayerType: {kind}," in line]
    return [re.findall(r"Datatype: (\w+)", line.split("Constants:")[0]) for line in lines]


@pytest.mark.parametrize("sm", further([80, 86, 89, 120], [120]))
def test_every_kind_builds_for_every_gpu(files, tmp_path, sm):
    for kind in KINDS:
        made = compress.build_tensorrt(files[kind], options=TensorRTOptions(sms=(sm,)), out=tmp_path / f"{kind}.engine")
        assert made.path.stat().st_size == made.metadata.engine_bytes > 10_000
        assert made.metadata.sms == (sm,)
        assert layers(made.log, "correlation")


def test_types_are_those_of_the_file(built):
    expected = {"float": {"Float"}, "fp16": {"Half"}, "int8": {"Int8"}, "sparse-int8": {"Int8"}}
    for kind, types in expected.items():
        convolutions = layers(built[kind].log, "correlation")
        assert len(convolutions) >= 6
        assert {first for first, *_ in convolutions} == types, kind
    assert {kind: made.metadata.float_precision for kind, made in built.items()} == {
        "float": "tf32",
        "fp16": "f16",
        "int8": "f16",
        "sparse-int8": "f16",
    }


def test_what_stands_beside_an_engine(built, files):
    made = built["sparse-int8"]
    assert made.path == files["sparse-int8"].with_name("sparse-int8.tensorrt-rtx.sm89-120.engine")
    assert log_path(made.path).read_text() == made.log
    row = json.loads(metadata_path(made.path).read_text())
    assert row["version"] == tensorrt_library("tensorrt-rtx").version
    assert row["onnx_sha256"] == sha256(files["sparse-int8"])
    assert row["engine_sha256"] == sha256(made.path)
    assert row["profiles"]["input"]["max"] == [32, 3, 16, 16]
    assert row["options"]["sparse"] is True  # the file says that it is
    assert built["int8"].metadata.options["sparse"] is False
    assert read_metadata(made.path) == made.metadata
    assert EngineMetadata.from_dict(made.metadata.to_dict()) == made.metadata


def test_an_engine_is_built_again_only_when_something_differs(files, tmp_path):
    source = tmp_path / "m.onnx"
    source.write_bytes(files["float"].read_bytes())
    options = TensorRTOptions(sms=(89,))
    first, again = (compress.build_tensorrt(source, options=options) for _ in range(2))
    assert (first.reused, again.reused) == (False, True) and again.log == first.log
    assert not compress.build_tensorrt(source, options=options, reuse=False).reused
    level = dataclasses.replace(options, optimization_level=1)
    assert not compress.build_tensorrt(source, options=level, out=first.path).reused
    source.write_bytes(files["fp16"].read_bytes())
    assert not compress.build_tensorrt(source, options=level, out=first.path).reused


def test_weights_in_a_file_apart_are_part_of_the_model(files, tmp_path):
    path = tmp_path / "apart.onnx"
    onnx.save_model(onnx.load(files["float"]), path, save_as_external_data=True, location="apart.bin", size_threshold=0)
    options = TensorRTOptions(sms=(89,), optimization_level=0)
    made = compress.build_tensorrt(path, options=options)
    assert compress.build_tensorrt(path, options=options).reused
    weights = tmp_path / "apart.bin"
    content = weights.read_bytes()
    weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(EngineError, match="stale"):
        checked_metadata(made.path, "tensorrt-rtx")
    assert not compress.build_tensorrt(path, options=options).reused
    weights.unlink()
    with pytest.raises(EngineError, match=r"apart\.bin, which holds its weights, is missing"):
        compress.build_tensorrt(path, options=options)


def test_the_model_is_not_written_over(files, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(files["float"].read_bytes())
    (tmp_path / "same.onnx").symlink_to(path)
    for out in (path, tmp_path / "same.onnx"):
        with pytest.raises(EngineError, match="is the model itself"):
            compress.build_tensorrt(path, out=out)
    assert path.read_bytes() == files["float"].read_bytes()


def test_a_batch_that_the_model_does_not_leave_open_is_said(tmp_path):
    path = compress.export_onnx(network(), torch.randn(4, 3, 16, 16), tmp_path / "m.onnx", dynamic_batch=False)
    made = compress.build_tensorrt(path, options=TensorRTOptions(sms=(89,), batch=(1, 2, 8), optimization_level=0))
    (note,) = made.metadata.notes
    assert "fixed at 4: batch 1, 2, 8 was not used" in note
    assert made.metadata.profiles["input"].max == (4, 3, 16, 16)
    assert compress.build_tensorrt(path, options=TensorRTOptions(sms=(89,), optimization_level=0)).metadata.notes == ()


def test_progress_goes_to_the_end(files, tmp_path):
    class Recorder(NoProgress):
        units = 0

        def advance(self, task, amount=1, **fields):
            self.units += amount

    listener = Recorder()
    compress.build_tensorrt(files["float"], out=tmp_path / "m.engine", progress=listener)
    assert listener.units == 100


STOPPED = """
import os, signal, sys, time
from compress.engines.tensorrt.build import build_tensorrt
from compress.support.progress import NoProgress

class Interrupts(NoProgress):
    sent = False

    def advance(self, task, amount=1, **fields):
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # on a busy machine the build would end before the main thread gets it

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background hands down that it is ignored
source, target = sys.argv[1:]
try:
    build_tensorrt(source, out=target, progress=Interrupts())
except KeyboardInterrupt:
    print("stopped", os.listdir(os.path.dirname(target)))
print(build_tensorrt(source, out=target).path.is_file())
"""


def test_ctrl_c_stops_the_build_and_leaves_no_file(files, tmp_path):
    # In a process of its own: a signal may find the main thread of a test worker anywhere
    command = [sys.executable, "-c", STOPPED, str(files["int8"]), str(tmp_path / "m.engine")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["stopped []", "True"], done.stderr[-2000:]


def test_nodes_that_are_not_taken_are_named(tmp_path):
    with pytest.raises(EngineError, match=r"cannot take .*node '/block/Unique' \(Unique\): unsupported node"):
        compress.build_tensorrt(unsupported(tmp_path / "bad.onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sm": "90"}, "SM 90 needs TensorRT itself"),
        ({"timing_cache": "x"}, "does not take timing_cache"),
        ({"hardware": "ampere-plus"}, "does not take hardware"),
        ({"version_compatible": "yes"}, "does not take version_compatible"),
        ({"workspace_mib": "1", "batch": "64,64,64"}, "workspace.*raise workspace_mib"),
    ],
)
def test_what_rtx_does_not_do_is_refused(files, tmp_path, given, message):
    with pytest.raises(EngineError, match=message):
        compress.build_tensorrt(files["int8"], options=parse_options(given), out=tmp_path / "m.engine")
    assert list(tmp_path.iterdir()) == []


@no_gpu
def test_what_needs_a_gpu_is_refused_without_one(files, built, tmp_path):
    with pytest.raises(EngineError, match="refit here: it compiles refittable engines on a GPU"):
        compress.build_tensorrt(files["float"], options=parse_options({"refit": "yes"}), out=tmp_path / "m.engine")
    lone = tmp_path / "lone.onnx"
    lone.write_bytes(files["float"].read_bytes())
    for file, message in (
        (files["float"], r"built float\.\S+ for SM 89, 120, but it cannot be run here"),
        (built["float"].path, "for SM 89, 120, but it cannot be run here"),
        (lone, r"python -m compress build onnx \S+lone.onnx"),
    ):
        with pytest.raises(EngineUnavailableError, match=message):
            compress.build_engine(file, "tensorrt-rtx")


def copied(made, folder):
    target = folder / made.path.name
    target.write_bytes(made.path.read_bytes())
    metadata_path(target).write_bytes(metadata_path(made.path).read_bytes())
    return target


def test_engine_files_that_are_not_what_they_were_are_refused(built, files, tmp_path):
    whole = copied(built["float"], tmp_path)
    assert checked_metadata(whole, "tensorrt-rtx") == built["float"].metadata
    for engine, message in (("tensorrt", "was built with tensorrt-rtx"), ("openvino", "is a built TensorRT engine")):
        with pytest.raises(EngineError, match=message):
            compress.build_engine(whole, engine)
    content, source, facts = whole.read_bytes(), tmp_path / built["float"].metadata.onnx, metadata_path(whole)
    for file, changed, message in (
        (whole, content[: len(content) // 2], "truncated"),
        (whole, content[:-1] + bytes([content[-1] ^ 1]), "sha256 differs"),
        (source, files["fp16"].read_bytes(), "stale"),
        (source, b"no model", "whether it is stale: .*not an ONNX model"),
        (facts, b"{}", "cannot be read"),
    ):
        whole.write_bytes(content)
        file.write_bytes(changed)
        with pytest.raises(EngineError, match=message):
            compress.build_engine(whole, "tensorrt-rtx")
        if message == "truncated":
            with pytest.raises(EngineError, match=message):
                read_engine_layers(whole)
    metadata_path(whole).unlink()
    with pytest.raises(EngineError, match="is missing beside it"):
        compress.build_engine(whole, "tensorrt-rtx")


class Times:
    # A builder's configuration that keeps times as TensorRT documents it: bytes of another GPU are not taken.
    def __init__(self, own):
        self.own, self.given = own, None

    def create_timing_cache(self, held):
        return held if held in (b"", self.own) else None

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        self.given = cache
        return cache is not None

    def get_timing_cache(self):
        return self

    def serialize(self):
        return self.own


def test_times_of_kernels_are_kept_found_again_and_refused_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rtx = tensorrt_library("tensorrt-rtx")
    assert use_timing_cache(rtx, Times(b"a"), None, gpu="L4") == (None, ())
    library = Library(dataclasses.replace(rtx.flavour, timing_cache=True), rtx.trt)
    config = Times(b"times of an L4")
    cache, notes = use_timing_cache(library, config, None, gpu="NVIDIA L4")
    assert notes == ()
    keep_timing_cache(cache, config)
    (kept,) = (tmp_path / "compress").iterdir()
    assert library.version in kept.name
    assert "NVIDIA-L4" in kept.name
    again = Times(b"times of an L4")
    use_timing_cache(library, again, None, gpu="NVIDIA L4")
    assert again.given == b"times of an L4"
    elsewhere = Times(b"times of an A100")
    cache, (note,) = use_timing_cache(library, elsewhere, kept, gpu="NVIDIA A100")
    assert cache is None
    assert "another version or GPU" in note
    assert elsewhere.given == b""
    assert kept.read_bytes() == b"times of an L4"  # not written over
    with pytest.raises(EngineError, match="is a folder"):
        use_timing_cache(library, config, tmp_path, gpu="NVIDIA L4")


# Nested phases as one share.


def test_a_phase_fills_a_part_of_the_step_that_it_runs_in():
    meter = PhaseMeter()
    meter.start("all", None, 4)
    meter.step("all", 0)
    assert meter.share() == 1 / 4
    meter.start("inner", "all", 2)
    meter.step("inner", 0)
    assert meter.share() == 1 / 4 + 1 / 8
    meter.start("innermost", "inner", 5)
    meter.step("innermost", 1)
    assert abs(meter.share() - (1 / 4 + (1 / 2 + 2 / 5 / 2) / 4)) < 1e-12
    for name in ("innermost", "inner", "all"):
        meter.finish(name)
    assert meter.share() == 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.integers(0, 5)), max_size=30))
def test_the_share_never_falls_nor_passes_one(events):
    meter, before = PhaseMeter(), 0.0
    meter.start("a", None, 3)
    for name, parent, number in events:
        if number == 5:
            meter.finish(name)
        elif number % 2 and name != "a":
            meter.start(name, parent, number)
        else:
            meter.step(name, number)
        assert before <= meter.share() <= 1
        before = meter.share()


def test_the_bar_moves_in_whole_units_and_ends_full_only_where_the_build_succeeds():
    class Recorder:
        def __init__(self):
            self.units, self.ended = 0, False

        def start(self, task, total, *, done=0):
            assert total == UNITS

        def advance(self, task, amount=1, **fields):
            self.units += amount

        def finish(self, task):
            self.ended = True

    for whole, expected in ((True, UNITS), (False, 50)):
        listener = Recorder()
        bar = BuildProgress(listener, "build")
        bar.meter.start("all", None, 2)
        bar.meter.step("all", 0)
        bar.update()
        bar.update()
        bar.finish(whole=whole)
        assert (listener.units, listener.ended) == (expected, True)


# The calls of TensorRT are those of its real API: mypy checks them against the type stubs of TensorRT 10.13.

FILES = ("library", "engine", "build")
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
    # The published stubs, with what makes five of their signatures no Python put right.
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
    # What mypy says of our files, in which the module `trt`, known at run time alone, is that of the stubs.
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
    text = (Path(package.__file__).parent / "build.py").read_text()
    assert "config.add_optimization_profile(" in text
    wrong = text.replace("config.add_optimization_profile(", "config.add_profile(").replace(
        "set_memory_pool_limit(trt.", 'set_memory_pool_limit("workspace", trt.'
    )
    found = errors(stubs, tmp_path, build=wrong)
    assert any("add_profile" in line for line in found)
    assert any("set_memory_pool_limit" in line for line in found)
