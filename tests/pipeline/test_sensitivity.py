import csv
import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from compress import insert_quantizers, load_data, load_recipe
from compress.cli.app import app
from compress.errors import QuantizationError, RecipeError, RunError
from compress.pipeline.folder import open_run
from compress.pipeline.run import Run
from compress.pipeline.steps.quantize import ptq_step
from compress.pipeline.steps.training import build_float
from compress.pipeline.studies.parity import parity_of_recipe, parity_of_run
from compress.pipeline.studies.sensitivity import (
    MixedPoint,
    mixed_front,
    pick,
    sensitivity_run,
    sheet_costs,
    write_recipe,
)
from compress.quantization.report import placement_of
from compress.quantization.sensitivity.sensitivity import mixed_spec
from compress.recipe.tree import parse_recipe
from tests.exact import WEIGHTS
from tests.networks import tiny

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 128},
    "train": {"epochs": 2, "lr": 0.05},
    "quantization": {
        "target": "openvino",
        "calibration_images": 64,
        "weights": {"num_bits": 8, "axis": None},
        "activations": {"calibrator": "max"},
    },
}
RECIPE = parse_recipe(TREE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sensitivity") / "run"


@pytest.fixture(scope="module")
def measured(folder):
    return sensitivity_run(RECIPE, folder, images=96, weight_bits=[3], device="cpu")


def test_files_tell_the_same(measured, folder):
    document = json.loads((folder / "sensitivity.json").read_text())
    assert list(document) == ["w8a8", "w3a8"]
    rows = list(csv.DictReader((folder / "sensitivity.csv").open()))
    for name, report in measured.reports.items():
        assert len(report.rows) == 8
        for row, stored in zip(report.rows, document[name]["rows"], strict=True):
            assert stored["alone"]["sqnr_db"] == row.alone.sqnr_db
        mine = [r for r in rows if r["format"] == name]
        assert [float(r["left_out_sqnr_db"]) for r in mine] == [r.left_out.sqnr_db for r in report.rows]
    assert "block1.conv1" in (folder / "sensitivity.md").read_text()
    assert (folder / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert measured.reports["w3a8"].quantized.sqnr_db < measured.reports["w8a8"].quantized.sqnr_db - 10


def test_it_goes_on_where_it_stopped(measured, folder):
    path = folder / "sensitivity-w3a8.json"
    whole = json.loads(path.read_text())
    rows = whole["report"]["rows"]
    rows[0]["weight_elements"] = -1  # a sign that this row was not measured again
    path.write_text(json.dumps({"images": 96, "rows": rows[:4]}))
    again = sensitivity_run(RECIPE, folder, images=96, weight_bits=[3], device="cpu", resume=True)
    found = again.reports["w3a8"].rows
    assert found[0].weight_elements == -1
    assert found[1:] == measured.reports["w3a8"].rows[1:]
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize(("costs", "precision"), [("openvino", "f32"), ("onnxruntime", None)])
def test_front_is_measured_and_its_recipe_makes_the_network(measured, tmp_path, costs, precision):
    found = mixed_front(measured, costs=costs, batch_size=2, precision=precision, images=96, points=2, seconds=0.2)
    labels = [point.label for point in found]
    assert labels[:3] == ["float", "w8a8", "w3a8"]
    assert found[0].agreement == 1 and found[0].spec is None and found[0].sqnr_db == float("inf")
    assert all(point.latency_ms > 0 and point.predicted_ms > 0 for point in found)
    formats = {**found[1].formats, "conv1": "float", "block1.conv2": "w3a8"}
    spec = mixed_spec(measured.specs["w8a8"], formats, measured.settings, base="w8a8")
    point = replace(found[1], formats=formats, spec=spec)
    recipe = load_recipe(write_recipe(measured, point, tmp_path / "mixed.yaml"))
    assert recipe.model == RECIPE.model and recipe.data == RECIPE.data
    sites = placement_of(insert_quantizers(measured.model, measured.run.example, recipe.quantization)).weights
    bits = {site.path: site.format.num_bits for site in sites}
    assert "conv1" not in bits and bits.pop("block1.conv2") == 3 and set(bits.values()) == {8}


def test_costs_from_a_data_sheet(measured):
    layers = [row.layer for row in measured.reports["w8a8"].rows]
    table = sheet_costs(measured, layers, "h200", batch_size=8)
    assert table.rest_ms > 0
    for layer in ("block1.conv1", "fc"):
        assert 0 < table.ms[layer]["w8a8"] < table.ms[layer]["float"]


def test_pick():
    def point(label, ms, top1, sqnr_db):
        return MixedPoint(
            label=label, formats={}, spec=None, predicted_ms=9, latency_ms=ms, score=top1, agreement=1, sqnr_db=sqnr_db
        )

    points = [point("float", 4, 0.9, 99), point("int8", 1, 0.8, 10), point("a", 2, 0.89, 20), point("b", 3, 0.9, 30)]
    assert pick(points, budget_ms=3.5).label == "b"
    assert pick(points, budget_ms=1).label == "int8"
    assert pick(points, max_drop=1.0).label == "a"
    assert pick(points, max_drop=0).label == "b"
    for limits, words in (({"budget_ms": 0.5}, "fastest takes 1"), ({}, "one of"), ({"max_drop": -1}, "least is")):
        with pytest.raises(QuantizationError, match=words):
            pick(points, **limits)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (replace(RECIPE, quantization=None), {}, "quantization"),
        (RECIPE, {"images": 0}, "images"),
        (RECIPE, {"weight_bits": [1]}, "num_bits"),
    ],
)
def test_refusals(recipe, options, message, tmp_path):
    with pytest.raises((RecipeError, QuantizationError), match=message):
        sensitivity_run(recipe, tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_command_line(measured, folder, capsys):
    # On the finished run: one JSON document, and nothing is measured again.
    options = ["sensitivity", "--recipe", str(folder / "recipe.yaml"), "--json", "--out", str(folder), "--resume"]
    options += ["--images", "96", "--device", "cpu"]
    with pytest.raises(SystemExit) as done:
        app(options)
    assert not done.value.code
    formats = json.loads(capsys.readouterr().out)["formats"]
    assert formats["w8a8"]["quantized"]["sqnr_db"] == measured.reports["w8a8"].quantized.sqnr_db
    with pytest.raises(RunError, match="is now `sensitivity --from RUN"):
        app(["bench", str(folder), "--mixed"])
    for extra, words in ((["--write", "x.yaml"], "--budget-ms"), (["--budget-ms", "1", "--max-drop", "1"], "one of")):
        with pytest.raises(RecipeError, match=words):
            app([*options, *extra])


# The `quantization` keys that go beyond rounding to nearest, through the step of a run and back from its files.

BETTER_PTQ_TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 100},
    "quantization": {
        "calibration_images": 64,
        "weights": {"num_bits": 4, "axis": None},
        "equalize": True,
        "bias_correction": "empirical",
        "adaround": {"steps": 10, "images": 64},
    },
    "qat": None,
}


def test_a_run_keeps_what_it_improved(tmp_path):
    recipe = parse_recipe(BETTER_PTQ_TREE)
    folder = open_run(tmp_path / "run", recipe, "ptq", resume=False)
    this = Run(recipe=recipe, folder=folder, data=load_data(recipe.data))
    model = build_float(recipe).model.eval()
    made = ptq_step(this, model)
    assert [note.split(" ")[1] for note in this.all_notes()] == ["equalized", "AdaRound", "corrected"]
    assert not (tmp_path / "run" / "ptq.adaround").exists()
    again = ptq_step(dataclasses.replace(this, notes=[]), model)  # finished: read from its file
    x = this.example
    with torch.no_grad():
        torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
    plain = dataclasses.replace(recipe, quantization=dataclasses.replace(recipe.quantization, equalize=False))
    assert plain.digest() != recipe.digest()


def clipped(num_classes=10):
    # Most activations before its ReLU6 exceed 6, so that ReLU in its place is another network.
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )
    with torch.no_grad():
        model[0].weight.mul_(50)
    return model


def test_a_finished_step_is_read_without_what_was_taken_back(tmp_path):
    tree = {
        "model": {"name": "tests.pipeline.test_sensitivity:clipped"},
        "data": {"image_size": 16, "batch_size": 32, "val_images": 32},
        "quantization": {"calibration_images": 32, "relu6": "relu"},
        "qat": None,
    }
    recipe = parse_recipe(tree)
    this = Run(recipe=recipe, folder=open_run(tmp_path / "r", recipe, "ptq", resume=False), data=load_data(recipe.data))
    model = build_float(recipe).model.eval()
    made = ptq_step(this, model)
    assert made.report.comparison.taken_back == ("relu6",)
    assert any("taken back" in note for note in this.all_notes())
    again = ptq_step(this, model)
    with torch.no_grad():
        torch.testing.assert_close(again(this.example), made(this.example), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("quantization.bias_correction=guess", "bias_correction"),
        ("quantization.smooth=2", "smooth is 2: it must be 0 to 1"),
        ("quantization.adaround={steps: 0}", "adaround.steps is 0"),
        ("quantization.adaround={step: 5}", "step"),
        ("quantization.batchnorm=keep", "set batchnorm: fold"),
        ("quantization.weights={kind: e4m3}", "both the same kind"),
    ],
)
def test_bad_keys_are_refused_by_the_recipe(override, words):
    with pytest.raises(RecipeError, match=words):
        parse_recipe(BETTER_PTQ_TREE, [override])


# `inspect parity` on a recipe: one JSON document with every quantizer of the network, on both engines.

PARITY_TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 32, "val_images": 64},
    "quantization": {
        "target": "openvino",
        "calibration_images": 64,
        "activations": {"calibrator": "max"},
        "weights": {"num_bits": WEIGHTS.num_bits},
    },
}
PARITY_RECIPE = parse_recipe(PARITY_TREE)


def test_both_engines_at_every_quantizer(tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(PARITY_RECIPE.to_yaml())
    with pytest.raises(SystemExit) as done:
        app(["inspect", "parity", "--recipe", str(path), "--json"])
    assert not done.value.code
    document = json.loads(capsys.readouterr().out)
    qmodel = insert_quantizers(tiny(), torch.zeros(2, 3, 16, 16), PARITY_RECIPE.quantization)
    expected = {site.name for site in placement_of(qmodel).activations}
    for engine in ("onnxruntime", "openvino"):
        assert {point["quantizer"] for point in document[engine]["points"]} == expected
        assert "rounding" in document[engine]["verdict"]


def test_refusals_of_parity(tmp_path):
    with pytest.raises(RecipeError, match="quantization: null"):
        parity_of_recipe(parse_recipe({**PARITY_TREE, "quantization": None, "qat": None}))
    with pytest.raises(RunError, match="no quantized network"):
        parity_of_run(tmp_path)
    for arguments in ([], ["--run", "x", "--recipe", "resnet50"]):
        with pytest.raises(RecipeError, match="give --recipe, or --run"):
            app(["inspect", "parity", *arguments])
