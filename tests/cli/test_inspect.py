import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torchvision

from compress import load_recipe, quantize_onnx
from tests.engines.cuda.qdq import Builder
from tests.onnx_ptq.files import batches, export, run, sqnr
from tests.onnx_ptq.test_improve import unequal

RECORDED = Path(__file__).parent.parent / "audit" / "nvidia"


def test_json(compress):
    document = compress("inspect", "engine", RECORDED / "rtx_1_7_int8.log", "--device", "rtx4090", "--json").document
    assert document["totals"]["activation_bytes"] == 16 * 14 * 14 * 29
    assert {finding["kind"] for finding in document["findings"]} == {"float output", "requantize", "add", "fp32"}
    assert len(document["int8_choices"]) == 2 and len(document["roofline"]["rows"]) == document["totals"]["kernels"]


@pytest.mark.parametrize("name", ["rtx_1_7_int8.log", "inspector_10.json", "inspector_11.json"])
def test_table(name, compress):
    assert compress("inspect", "engine", RECORDED / name).shown


def test_a_file_with_open_sides_is_audited_at_a_size(compress, tmp_path):
    b = Builder((1, 16, 8, 8))
    path = b.save(tmp_path / "m.onnx", b.conv(b.quantize("input"), 32))
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for i, name in ((0, "batch"), (2, "height"), (3, "width")):
            value.type.tensor_type.shape.dim[i].dim_param = name
    onnx.save(model, path)
    assert "--size" in compress("inspect", "engine", path).refused
    document = compress("inspect", "engine", path, "--size", "10x12", "--json").document
    (conv,) = [layer for layer in document["layers"] if layer["operation"] == "conv"]
    assert conv["macs"] == 32 * 16 * 9 * 10 * 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((RECORDED / "inspector_10.json", "--size", "320"), "a built engine has its own"),
        ((RECORDED / "inspector_10.json", "--device", "rtx4091"), "rtx4090"),
        ((RECORDED / "inspector_10.json", "--recipe", "resnet18"), "No such option"),
        (("m.onnx",), "not an ONNX model, or a truncated one"),
        (("no.engine",), "no.engine"),
    ],
)
def test_refusals(compress, tmp_path, words, message):
    (tmp_path / "m.onnx").write_bytes(b"")
    done = compress("inspect", "engine", *words, cwd=tmp_path)
    assert message in done.refused and done.stdout == ""


# `inspect parity --mend`: a file whose channels have unequal ranges is mended, and the recipe that is written runs.

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
    document = compress("inspect", "parity", *FILE, "--mend-sqnr", "30", "--json", cwd=folder).document
    assert document["met"] and document["diagnosis"]["quantized"]["sqnr_db"] < 30 <= document["effect"]["sqnr_db"]
    assert [price["label"] for price in document["prices"]][:3] == ["float", "as specified", "mended"]
    names = {row["layer"] for row in document["diagnosis"]["rows"]}
    assert names == {"/0/Conv", "/2/Conv", "/4/Conv"}, "the names of the file's nodes"
    tensors = {name for node in onnx.load(folder / "net.onnx").graph.node for name in node.output}
    assert document["diagnosis"]["first"]["tensor"] in tensors
    assert load_recipe(folder / "mended.yaml").quantization.weights.axis is None
    assert compress("ptq", *FILE[:4], "--recipe", "mended.yaml", "--out", "run", cwd=folder).shown
    x = batches(seed=1)[0].numpy()
    assert sqnr(run(folder / "net.onnx", x), run(folder / "run" / "net.int8.onnx", x)) > 28


def test_the_diagnosis_is_of_the_file_that_a_run_writes(compress, folder):
    # `smooth: auto` scales the channels of both, so the file is good and nothing is to be mended.
    (folder / "default.yaml").write_text(PER_TENSOR.replace("smooth: null, ", ""))
    words = ("--recipe", "default.yaml", "--mend-sqnr", "30", "--json")
    document = compress("inspect", "parity", *FILE[:4], *words, cwd=folder).document
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
    # The distance to what the float file returns: none of the float network, so the goal is a distance.
    x = np.stack([batch.numpy() for batch in batches()])
    wanted = np.stack([run(folder / "net.onnx", part) for part in x])
    np.savez(folder / "judged.npz", x=x, y=wanted)
    (folder / "judged.py").write_text(JUDGED)
    monkeypatch.syspath_prepend(str(folder))
    file = ("--onnx", "net.onnx", "--data", "judged:data")
    limit = 0.02 * float(np.abs(wanted).mean())
    options = ("--recipe", "per-tensor.yaml", "--metric", "judged:distance", "--mend", limit, "--write", "m.yaml")
    words = " ".join(compress("inspect", "parity", *file, *options, cwd=folder).shown.split())
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
    words = ("inspect", "parity", "--recipe", "r.yaml", "--mend", "100", "--json")
    assert "names no weights and trains its network" in compress(*words, cwd=tmp_path).refused
    with (tmp_path / "r.yaml").open("a") as file:
        file.write("train: {epochs: 0}\n")
    document = compress(*words, cwd=tmp_path).document
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
def test_refusals_of_mend(compress, folder, options, words):
    assert words in compress("inspect", "parity", *options, cwd=folder).refused


# receptive-field, erf and roofline as a user meets them.


def test_receptive_field_of_a_name(compress, tmp_path):
    words = ("--model", "resnet50", "--image-size", "64", "--json")
    document = compress("receptive-field", *words, cwd=tmp_path).document
    assert max([row["local_size"] for row in document["rows"] if row["kind"] == "conv"]) == [427, 427]
    assert all((tmp_path / path).stat().st_size > 1000 for path in document["files"])


def test_erf_of_a_recipe_at_two_layers(compress, tmp_path):
    layers = ("--layer", "layer1.0", "--layer", "layer2.0")
    small = ("--set", "data.image_size=32", "--images", "4")
    document = compress("erf", "--recipe", "resnet18", *small, *layers, "--json", cwd=tmp_path).document
    fields = json.loads((tmp_path / document["numbers"]).read_text())["fields"]
    assert [field["layer"] for field in fields] == ["layer1.0", "layer2.0"]
    assert "random weights" in document["weights"]
    assert 0 < fields[0]["radius_50_px"] < fields[1]["radius_50_px"]
    page = (tmp_path / document["page"]).read_text()
    assert "layer1.0" in page and 'src="http' not in page
    assert "random weights (seed 0)" in page


def test_erf_of_a_model_takes_weights_and_says_which_it_has(compress, tmp_path):
    torch.manual_seed(3)
    torch.save(torchvision.models.resnet18(num_classes=1000).state_dict(), tmp_path / "mine.pth")
    small = ("--model", "resnet18", "--image-size", "32", "--images", "2", "--layer", "layer1.0")
    fields = {}
    for weights, words in (((), "random weights (seed 0)"), (("--weights", "mine.pth"), "weights of mine.pth")):
        assert f"network: resnet18, {words}" in compress("erf", *small, *weights, cwd=tmp_path).shown
        assert f"The network has {words}." in (tmp_path / "runs/erf/erf.html").read_text()
        document = json.loads((tmp_path / "runs/erf/erf.json").read_text())
        assert document["weights"] == words
        fields[words] = document["fields"]
    assert len({json.dumps(found) for found in fields.values()}) == 2  # the weights of the file were looked at


def test_roofline_bounds_a_network_of_fused_kernels_unless_asked_otherwise(compress, tmp_path):
    arguments = ("--model", "tests.networks:tiny", "--image-size", "16", "--device", "a100", "--precision", "int8")
    documents = []
    for more in ((), ("--unfused",)):
        documents.append(compress("roofline", *arguments, *more, "--json", cwd=tmp_path).document)
        assert (tmp_path / documents[-1]["figure"]).is_file()
        assert "tests.networks:tiny" in json.dumps(documents[-1]["roofline"])
    fused, alone = ({row["name"] for row in document["roofline"]["rows"]} for document in documents)
    assert fused < alone


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("erf",), "give one of --recipe and --model"),
        (("erf", "--model", "resnet18", "--layer", "layer1.O"), "layer1.0"),
        (("erf", "--run", "nowhere"), "nowhere"),
        (("erf", "--run", "nowhere", "--model", "resnet18"), "leave out --recipe, --model and --weights"),
        (("erf", "--recipe", "resnet18", "--weights", "a.pt"), "--weights goes with --model"),
        (("erf", "--model", "resnet18", "--weights", "nowhere.pt"), "nowhere.pt"),
        (("receptive-field", "--model", "resnet5O"), "did you mean"),
        (("roofline", "--model", "resnet18", "--image-size", "32", "--device", "h20"), "did you mean"),
        (("roofline", "--model", "resnet18", "--image-size", "32", "--device", "t4", "--precision", "fp8"), "fp8"),
    ],
)
def test_refusals_of_fields(compress, arguments, text, tmp_path):
    assert text in compress(*arguments, cwd=tmp_path).refused
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
