"""The command line as a user meets it: exit status, what is on which stream, what is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compress(*arguments, cwd=None):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compress", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)


def test_help_names_the_commands():
    done = compress("--help")
    assert done.returncode == 0
    for command in ("train", "ptq", "qat", "export", "bench", "report", "inspect", "doctor", "recipes"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("qat", "--recipe", "resnet5O.yaml"), "did you mean 'resnet50'"),
        (("qat", "--recipe", "resnet50", "--set", "qat.epoch=1"), "did you mean 'epochs'"),
        (("ptq", "--recipe", "resnet50", "--set", "data.name=folder", "--set", "data.root=/none"), "/none"),
        (("ptq", "--recipe", "resnet50", "--set", "model.weights=/none.pt"), "/none.pt"),
        (("report", "nowhere"), "nowhere"),
        (("inspect", "--onnx", "none.onnx"), "does not exist"),
        (("inspect",), "give --recipe, --model or --onnx"),
    ],
)
def test_refusals_have_a_reason_a_status_and_leave_nothing(arguments, text, tmp_path):
    done = compress(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_inspect_as_json_is_one_document():
    done = compress("inspect", "--model", "resnet18", "--set", "data.image_size=64", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len([row for row in document["placement"] if row["rule"] == "weight"]) == 21
    assert all(row["reason"] for row in document["placement"])


def test_doctor_says_why_not():
    done = compress("doctor", "--json")
    engines = {e["name"]: e for e in json.loads(done.stdout)["engines"]}
    assert engines["openvino"]["available"] and engines["onnxruntime"]["available"]
    for engine in engines.values():
        assert engine["available"] or (engine["reason"] and engine["install"])


def test_recipes_lists_those_that_ship(tmp_path):
    done = compress("recipes", "--json", cwd=tmp_path)
    assert {"resnet50", "resnet50-cpu", "mobilenet_v2"} <= {row["name"] for row in json.loads(done.stdout)}
