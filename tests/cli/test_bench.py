"""`bench` on a run folder and on files, some of which are damaged. No time is judged."""

import json
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests.onnx_ptq.files import model_of, weights

FOLDER = Path(__file__).parents[1] / "pipeline" / "formats" / "run-1"
QUICK = ("--engine", "onnxruntime", "--batch-size", "2", "--seconds", "0.01")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def times(folder):
    rows = json.loads((folder / "metrics.json").read_text())
    timed = [row for row in rows if row["name"] in ("p50_ms", "p99_ms") and row["batch_size"] == 2]
    return {(row["name"], row["variant"]): row["value"] for row in timed if row["engine"].startswith("onnxruntime")}


@pytest.mark.parametrize("content", [b"", b"no graph", "cut"])
def test_a_damaged_file_of_a_run_is_told_and_its_older_times_are_gone(compress, folder, content):
    assert compress("bench", str(folder), *QUICK).returncode == 0
    assert {key for key, value in times(folder).items() if value} >= {("p50_ms", "float"), ("p99_ms", "ptq")}
    file = folder / "ptq.onnx"
    file.write_bytes(file.read_bytes()[:2000] if content == "cut" else content)
    done = compress("bench", str(folder), *QUICK)
    assert done.returncode == 2 and "ptq was not measured" in done.stderr
    assert "ptq.onnx" in done.stdout.replace("\n", "")
    found = times(folder)
    assert found["p50_ms", "float"] > 0 and found["p99_ms", "float"] > 0
    assert not any(value for (_, variant), value in found.items() if variant == "ptq")


def test_an_engine_that_is_not_here_is_no_failure_where_another_measures_the_file(compress, folder):
    done = compress("bench", str(folder / "ptq.onnx"), *QUICK, "--engine", "tensorrt")
    assert done.returncode == 0 and "unavailable" in done.stdout


def test_a_file_with_open_sides_is_timed_at_a_size(compress, tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    onnx.save(model_of([node], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, "h", "w")), tmp_path / "open.onnx")
    file = str(tmp_path / "open.onnx")
    refused = compress("bench", file, *QUICK)
    assert refused.returncode == 2 and "bench --size 320" in " ".join(refused.stderr.split())
    done = compress("bench", file, *QUICK, "--size", "8x12", "--json")
    assert done.returncode == 0 and all(row["value"] > 0 for row in json.loads(done.stdout))


def test_the_engine_torch_times_the_modules_of_a_run(compress, folder):
    done = compress("bench", str(folder), *QUICK[2:], "--engine", "torch")
    assert done.returncode == 0 and "loads no file" not in done.stdout + done.stderr
    rows = [row for row in json.loads((folder / "metrics.json").read_text()) if row["name"] == "p50_ms"]
    assert {row["variant"] for row in rows if row["engine"].startswith("torch") and row["value"] > 0} >= {
        "float",
        "ptq",
    }
