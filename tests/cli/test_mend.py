"""`inspect parity --mend`: a file whose channels have unequal ranges is mended, and the recipe that is written runs."""

import json

import numpy as np
import onnx
import pytest

from compress import load_recipe, quantize_onnx
from tests.onnx_ptq.files import batches, export, run, sqnr
from tests.onnx_ptq.test_improve import unequal

PER_TENSOR = (
    "quantization: {target: onnxruntime, smooth: null, weights: {axis: null}, activations: {calibrator: max}}\n"
)


@pytest.fixture
def folder(tmp_path):
    export(unequal(), tmp_path / "net.onnx")
    np.savez(tmp_path / "inputs.npz", picture=np.concatenate([x.numpy() for x in batches()]))
    (tmp_path / "per-tensor.yaml").write_text(PER_TENSOR)
    return tmp_path


FILE = ("--onnx", "net.onnx", "--data", "inputs.npz", "--recipe", "per-tensor.yaml")


def test_a_file_is_mended_by_one_command(compress, folder):
    told = compress("inspect", "parity", *FILE, "--mend-sqnr", "30", "--json", cwd=folder)
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["met"] and document["diagnosis"]["quantized"]["sqnr_db"] < 30 <= document["effect"]["sqnr_db"]
    assert [price["label"] for price in document["prices"]][:3] == ["float", "as specified", "mended"]
    names = {row["layer"] for row in document["diagnosis"]["rows"]}
    assert names == {"/0/Conv", "/2/Conv", "/4/Conv"}, "the names of the file's nodes"
    tensors = {name for node in onnx.load(folder / "net.onnx").graph.node for name in node.output}
    assert document["diagnosis"]["first"]["tensor"] in tensors
    assert load_recipe(folder / "mended.yaml").quantization.weights.axis is None
    done = compress("ptq", *FILE[:4], "--recipe", "mended.yaml", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    x = batches(seed=1)[0].numpy()
    assert sqnr(run(folder / "net.onnx", x), run(folder / "run" / "net.int8.onnx", x)) > 28


def test_the_diagnosis_is_of_the_file_that_a_run_writes(compress, folder):
    """`smooth: auto` scales the channels of both, so the file is good and nothing is to be mended."""
    (folder / "default.yaml").write_text(PER_TENSOR.replace("smooth: null, ", ""))
    told = compress(
        "inspect", "parity", *FILE[:4], "--recipe", "default.yaml", "--mend-sqnr", "30", "--json", cwd=folder
    )
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    x = np.concatenate([batch.numpy() for batch in batches()])
    spec = load_recipe(folder / "default.yaml").quantization
    made = quantize_onnx(folder / "net.onnx", [batch.numpy() for batch in batches()], spec=spec, out=folder / "q.onnx")
    whole = sqnr(run(folder / "net.onnx", x), run(made, x))
    assert document["diagnosis"]["quantized"]["sqnr_db"] == pytest.approx(whole, abs=1.5)
    assert document["met"] and not document["changes"]
    assert load_recipe(folder / "mended.yaml").quantization == spec


JUDGED = """
import numpy
import torch


def data():
    with numpy.load("judged.npz") as file:
        return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(file["x"], file["y"])]


def distance(outputs, targets):
    return (outputs - targets).abs().mean()


distance.unit, distance.direction = "mm", "lower"
"""


def test_a_file_is_mended_by_a_metric_of_the_users_own(compress, folder, monkeypatch):
    """The distance to what the float file returns: none of the float network, so the goal is a distance."""
    x = np.stack([batch.numpy() for batch in batches()])
    wanted = np.stack([run(folder / "net.onnx", part) for part in x])
    np.savez(folder / "judged.npz", x=x, y=wanted)
    (folder / "judged.py").write_text(JUDGED)
    monkeypatch.syspath_prepend(str(folder))
    file = ("--onnx", "net.onnx", "--data", "judged:data")
    limit = 0.02 * float(np.abs(wanted).mean())
    told = compress(
        "inspect",
        "parity",
        *file,
        "--recipe",
        "per-tensor.yaml",
        "--metric",
        "judged:distance",
        "--mend",
        str(limit),
        "--write",
        "m.yaml",
        cwd=folder,
    )
    assert told.returncode == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert "one scale for channels whose ranges differ" in words
    assert "e-08 mm in float" in words and "mm of float: met" in words
    spoiled, mended = (
        np.mean([np.abs(run(path, part) - y).mean() for part, y in zip(x, wanted, strict=True)])
        for path in (
            quantize_onnx(folder / "net.onnx", list(x), spec=load_recipe(folder / name).quantization, out=folder / out)
            for name, out in (("per-tensor.yaml", "spoiled.onnx"), ("m.yaml", "mended.onnx"))
        )
    )
    assert mended < 1.1 * limit < spoiled


def test_a_recipe_that_is_good_is_kept(compress, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: {name: 'tests.networks:tiny'}\n"
        "data: {image_size: 16, batch_size: 32, train_images: 64, val_images: 64}\n"
        "quantization: {target: openvino, calibration_images: 32}\n"
    )
    told = compress("inspect", "parity", "--recipe", "r.yaml", "--mend", "100", cwd=tmp_path)
    assert told.returncode == 2 and "names no weights and trains its network" in " ".join(told.stderr.split())
    with (tmp_path / "r.yaml").open("a") as file:
        file.write("train: {epochs: 0}\n")
    told = compress("inspect", "parity", "--recipe", "r.yaml", "--mend", "100", "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["met"] and not document["changes"] and document["diagnosis"]["metric"] == "top1"
    assert load_recipe(tmp_path / "mended.yaml").quantization == load_recipe(tmp_path / "r.yaml").quantization


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*FILE, "--run", "x", "--mend", "1"), "no --run"),
        (FILE, "add --mend"),
        (("--recipe", "per-tensor.yaml", "--mend", "1", "--mend-sqnr", "30"), "one of the two"),
        (("--recipe", "per-tensor.yaml", "--mend", "-1"), "0 or more"),
        (("--recipe", "per-tensor.yaml", "--write", "m.yaml"), "--write names"),
    ],
)
def test_refusals(compress, folder, options, words):
    told = compress("inspect", "parity", *options, cwd=folder)
    assert told.returncode == 2 and words in " ".join(told.stderr.split())
