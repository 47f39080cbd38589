"""The engine `tensorrt-lean` takes version-compatible engines of TensorRT, and refuses every other file in words."""

import dataclasses
import json
import shutil

import pytest
import torch

from compress import build_engine, build_tensorrt, engine_availability, export_onnx
from compress.engines.tensorrt.engine import checked_metadata, engine_beside
from compress.engines.tensorrt.library import FLAVOURS
from compress.engines.tensorrt.metadata import check_runnable, metadata_path, sha256
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import EngineError, EngineUnavailableError
from tests.engines.tensorrt.files import IMAGE, network
from tests.engines.tensorrt.test_engine import METADATA

COMPATIBLE = {"version_compatible": True}


def engine_file(path, **changes):
    """An engine file as TensorRT's build leaves it; the content is a stand-in, which no library reads here."""
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
    ],
)
def test_foreign_truncated_and_tampered_engines_are_refused_before_the_library_sees_them(changes, message, tmp_path):
    path = engine_file(tmp_path / "m.tensorrt.sm89.engine", **changes)
    with pytest.raises(EngineError, match=message):
        build_engine(path, "tensorrt-lean")


def test_an_engine_without_its_json_is_refused(tmp_path):
    path = engine_file(tmp_path / "m.tensorrt.sm89.engine")
    metadata_path(path).unlink()
    with pytest.raises(EngineError, match=r"engine\.json is missing"):
        build_engine(path, "tensorrt-lean")


@pytest.mark.parametrize(
    ("built", "here", "runs"),
    [
        ("11.4.0.106", "11.4.0.106", True),
        ("10.13.0.35", "11.4.0.106", True),
        ("11.0.0.1", "11.4.0.106", True),
        ("11.5.0.1", "11.4.0.106", False),  # newer engines do not run in older runtimes, of one major version either
        ("11.10.0.1", "11.4.0.106", False),
        ("12.0.0.1", "11.4.0.106", False),
    ],
)
def test_a_version_compatible_engine_runs_with_its_own_version_and_later_ones(built, here, runs, tmp_path):
    metadata = dataclasses.replace(METADATA, options=COMPATIBLE, version=built, gpu="A")
    if runs:
        check_runnable(tmp_path / "e", metadata, version=here, gpu="A", sm=89)
    else:
        with pytest.raises(EngineError, match=f"built with TensorRT {built} and here is {here}"):
            check_runnable(tmp_path / "e", metadata, version=here, gpu="A", sm=89)


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
