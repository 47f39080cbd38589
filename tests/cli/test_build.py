"""`python -m compress build`, and a run that ends with engines for GPUs that are not here."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compress import load_recipe, run
from compress.cli.app import app
from compress.errors import EngineError, EngineUnavailableError
from compress.pipeline.folder import open_run
from compress.recipe.tree import parse_recipe
from tests.engines.models import classifier

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 100},
    "train": {"epochs": 1, "lr": 0.05},
    "quantization": {"target": "tensorrt", "calibration_images": 64},
    "qat": None,
    "export": {"precision": "fp16"},
    "bench": {"engines": ["tensorrt", "tensorrt-rtx"], "batch_sizes": [2], "runs": 2, "seconds": 0.1, "sm": [89, 120]},
}


def compress(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_onnx_file_becomes_an_engine_and_commands(tmp_path):
    path = classifier(tmp_path / "m.onnx", metadata={"compress.recipe.tree": "0123"})
    done = compress("build", "onnx", path, "--engine", "tensorrt-rtx", "--sm", "89,120", "--json")
    assert done.exit_code == 0, done.exception
    printed = json.loads(done.stdout)
    engine = tmp_path / "m.tensorrt-rtx.sm89-120.engine"
    assert Path(printed["file"]) == engine
    assert engine.stat().st_size == printed["engine_bytes"]
    assert (printed["sms"], printed["recipe"]) == ([89, 120], "0123")
    assert {row["target"] for row in printed["commands"]} == {"TensorRT 10", "TensorRT 11", "TensorRT-RTX"}


def test_sm_90_is_told_to_need_tensorrt_itself(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    done = compress("build", "onnx", path, "--engine", "tensorrt-rtx", "--sm", "90")
    assert isinstance(done.exception, EngineError)
    assert "SM 90 needs TensorRT itself" in str(done.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_commands_are_printed_without_a_build(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    done = compress("build", "onnx", path, "--commands", "--batch", "1,2,4")
    assert done.exit_code == 0
    assert "--maxShapes=input:4x3x8x8" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_a_run_that_was_stopped_is_gone_on_with(tmp_path, monkeypatch):
    """`build recipe` runs the recipe first; of a run that it had begun, it takes the rest."""
    recipe, asked = parse_recipe(TREE), []

    def stopped(recipe, command, folder, *, resume, progress):
        asked.append((str(folder), resume))
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compress.cli.build.run", stopped)
    Path("tiny.yaml").write_text(recipe.to_yaml())
    compress("build", "recipe", "tiny.yaml")
    open_run(Path("runs/tiny-ptq"), recipe, "ptq", resume=False).release()
    compress("build", "recipe", "tiny.yaml")
    compress("build", "recipe", "tiny.yaml", "--set", "train.epochs=2")
    assert asked == [("runs/tiny-ptq", False), ("runs/tiny-ptq", True), ("runs/tiny-ptq-2", False)]


def test_each_recipe_finds_its_own_run_among_those_of_one_name(tmp_path, monkeypatch):
    """`build recipe --set` begins a folder beside the user's run; the user's `--resume` must not end in that one."""
    asked = []
    monkeypatch.chdir(tmp_path)
    for place in ("compress.cli.build.run", "compress.cli.run.run_recipe"):
        monkeypatch.setattr(place, lambda recipe, command, folder, **_: asked.append(folder.name) or sys.exit())
    Path("tiny.yaml").write_text(parse_recipe(TREE).to_yaml())
    other = load_recipe("tiny.yaml", ["train.epochs=2"])
    open_run(Path("runs/tiny-ptq"), load_recipe("tiny.yaml"), "ptq", resume=False).release()
    open_run(Path("runs/tiny-ptq-2"), other, "ptq", resume=False).release()
    for words in (["ptq", "--resume", "--recipe"], ["build", "recipe"]):
        compress(*words, "tiny.yaml")
        compress(*words, "tiny.yaml", "--set", "train.epochs=2")
    assert asked == ["tiny-ptq", "tiny-ptq-2"] * 2
    compress("ptq", "--resume", "--recipe", "tiny.yaml", "--set", "train.epochs=3")
    assert asked[-1] == "tiny-ptq-2"  # which then says what differs


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")
def test_a_run_ends_with_engines_for_gpus_that_are_not_here(tmp_path):
    folder = run(parse_recipe(TREE), "ptq", tmp_path / "run", device="cpu")
    rows = json.loads((folder / "engines.json").read_text())
    assert [(row["variant"], row["engine"], row["status"]) for row in rows] == [
        ("float", "tensorrt", "unavailable"),
        ("ptq", "tensorrt", "unavailable"),
        ("float", "tensorrt-rtx", "built"),
        ("ptq", "tensorrt-rtx", "built"),
    ]
    for row in rows[2:]:
        assert (folder / row["file"]).stat().st_size == row["bytes"]
        assert row["sms"] == [89, 120]
    unavailable = {(m.variant, m.engine, m.name): m.reason for m in folder.metrics() if m.status == "unavailable"}
    reason = unavailable["ptq", "tensorrt-rtx", "p50_ms"]
    assert re.search(r"built ptq\S+ for SM 89, 120, but it cannot be run here", reason)
    assert "ptq.onnx, TensorRT 11" in (folder / "build.md").read_text()
    assert "cannot be run here" in (folder / "report.md").read_text()


def test_a_run_for_a_gpu_that_rtx_lacks_says_so_and_goes_on(tmp_path):
    tree = {**TREE, "train": {"epochs": 0}, "bench": {**TREE["bench"], "engines": ["tensorrt-rtx"], "sm": [90]}}
    folder = run(parse_recipe(tree), "train", tmp_path / "run", device="cpu")
    assert "SM 90 needs TensorRT itself" in (folder / "notes.json").read_text()
    assert "TensorRT 11" in (folder / "build.md").read_text()


@pytest.mark.parametrize("command", ["recipe", "explore"])
def test_a_missing_builder_is_told_before_the_run_that_it_would_build(tmp_path, monkeypatch, command):
    """A library that is not installed is one that Python cannot import."""
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setattr("compress.cli.build.run", lambda *_, **__: ran.append("run") or sys.exit())
    Path("tiny.yaml").write_text(parse_recipe(TREE).to_yaml())
    done = compress("build", command, "tiny.yaml")
    assert isinstance(done.exception, EngineUnavailableError) and "pip install" in str(done.exception)
    assert ran == [] and [file.name for file in tmp_path.iterdir()] == ["tiny.yaml"]
    if command == "recipe":
        compress("build", command, "tiny.yaml", "--commands")  # these need no library
        assert ran == ["run"]
