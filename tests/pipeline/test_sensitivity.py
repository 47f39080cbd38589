import csv
import dataclasses
import itertools
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from compress import (
    BenchSpec,
    QuantSpec,
    Rule,
    TorchEngine,
    build_engine,
    export_onnx,
    insert_quantizers,
    load_data,
    load_recipe,
    quantize_targets,
)
from compress.cli.app import app
from compress.data.base import Preprocessing
from compress.errors import QuantizationError, RecipeError, RunError
from compress.measure.latency import CpuTime, Latency, measure_end_to_end
from compress.measure.metric import PAIRED, Metric
from compress.pipeline.run import NetworkFiles, Run, open_run
from compress.pipeline.steps.evaluate import bench, keep_slower, layers_of, paired_speeds, slower
from compress.pipeline.steps.networks import build_float, ptq_step
from compress.pipeline.studies.parity import measure_prices, parity_of_recipe, parity_of_run
from compress.pipeline.studies.sensitivity import (
    MixedPoint,
    mixed_front,
    pick,
    sensitivity_run,
    sheet_costs,
    write_recipe,
)
from compress.quantization.report import placement_of
from compress.quantization.sensitivity import mixed_spec
from compress.recipe.tree import parse_recipe
from compress.records.files import SLOWER
from compress.records.summary import rules_text, slower_sentences, summary_table
from compress.report.document import headline
from compress.support.progress import NoProgress
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
    whole = path.read_text()
    rows = json.loads(whole)["report"]["rows"]
    rows[0]["weight_elements"] = -1  # a sign that this row was not measured again
    path.write_text(json.dumps({"images": 96, "rows": rows[:4]}))
    again = sensitivity_run(RECIPE, folder, images=96, weight_bits=[3], device="cpu", resume=True)
    first, *others = again.reports["w3a8"].rows
    assert first.weight_elements == -1 and tuple(others) == measured.reports["w3a8"].rows[1:]
    path.write_text(whole)


@pytest.mark.parametrize(("costs", "precision"), [("openvino", "f32"), ("onnxruntime", None)])
def test_front_is_measured_and_its_recipe_makes_the_network(measured, tmp_path, costs, precision):
    found = mixed_front(measured, costs=costs, batch_size=2, precision=precision, images=96, points=2, seconds=0.2)
    assert [point.label for point in found[:3]] == ["float", "w8a8", "w3a8"]
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


def printed(words, capsys):
    # The JSON document of a command that succeeds.
    with pytest.raises(SystemExit) as done:
        app(words)
    assert not done.value.code
    return json.loads(capsys.readouterr().out)


def test_command_line(measured, folder, capsys):
    # On the finished run: one JSON document, and nothing is measured again.
    options = ["sensitivity", "--recipe", str(folder / "recipe.yaml"), "--json", "--out", str(folder), "--resume"]
    options += ["--images", "96", "--device", "cpu"]
    formats = printed(options, capsys)["formats"]
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


def begun(recipe, path):
    # A run of `ptq`, and its float network.
    run = Run(recipe=recipe, folder=open_run(path, recipe, "ptq", resume=False), data=load_data(recipe.data))
    return run, build_float(recipe).model.eval()


def test_a_run_keeps_what_it_improved(tmp_path):
    recipe = parse_recipe(BETTER_PTQ_TREE)
    this, model = begun(recipe, tmp_path / "run")
    made = ptq_step(this, model)
    assert [note.split(" ")[1] for note in this.all_notes()] == ["equalized", "AdaRound", "corrected"]
    assert not (tmp_path / "run" / "ptq.adaround").exists()
    again = ptq_step(dataclasses.replace(this, notes=[]), model)  # finished: read from its file
    torch.testing.assert_close(again(this.example), made(this.example), rtol=0, atol=0)
    plain = dataclasses.replace(recipe, quantization=dataclasses.replace(recipe.quantization, equalize=False))
    assert plain.digest() != recipe.digest()


def clipped(num_classes=10):
    # Most activations before its ReLU6 exceed 6, so that ReLU in its place is another network.
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )
    model[0].weight.data.mul_(50)
    return model


def test_a_finished_step_is_read_without_what_was_taken_back(tmp_path):
    tree = {
        "model": {"name": "tests.pipeline.test_sensitivity:clipped"},
        "data": {"image_size": 16, "batch_size": 32, "val_images": 32},
        "quantization": {"calibration_images": 32, "relu6": "relu"},
        "qat": None,
    }
    this, model = begun(parse_recipe(tree), tmp_path / "r")
    made = ptq_step(this, model)
    assert made.report.comparison.taken_back == ("relu6",)
    assert any("taken back" in note for note in this.all_notes())
    again = ptq_step(this, model)
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
    document = printed(["inspect", "parity", "--recipe", str(path), "--json"], capsys)
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


# Layers of a network that `bench` has found slower than float: a real engine times them, and times decide no test.


SPEC = BenchSpec(engines=("onnxruntime", "openvino"), batch_sizes=(1,), runs=2, threads=1)


def block(channels):
    depthwise = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)
    return nn.Sequential(depthwise, nn.Hardswish(), nn.Conv2d(channels, channels, 1), nn.ReLU())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slower")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), block(8), block(8)).eval(), torch.randn(2, 3, 16, 16)
    rules = (Rule(match="1.0", enable=False, target="onnxruntime"),)
    made = quantize_targets(model, x, [x], spec=QuantSpec(target=("openvino", "onnxruntime"), rules=rules))
    paths = {name: export_onnx(net, x, folder / f"{name}.onnx") for name, net in {"float": model, **made}.items()}
    ptq = NetworkFiles(file=paths["openvino"], further={"onnxruntime": paths["onnxruntime"]})
    return {"float": NetworkFiles(file=paths["float"]), "ptq": ptq}


def recorded(engine, **times):
    return [
        Metric(name="p50_ms", variant=variant, engine=engine, batch_size=1, value=value, unit="ms")
        for variant, value in times.items()
    ]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino (f32)"])
def test_the_layers_of_a_network_that_is_not_faster_are_timed(files, engine):
    (row,) = slower(files, recorded(engine, float=1.0, ptq=2.0), SPEC, ("openvino", "onnxruntime"))
    assert (row.variant, row.engine, row.target) == ("ptq", engine, engine.partition(" ")[0])
    named = [cost.layer for cost in row.layers]
    assert set(named) <= set(layers_of(files["float"].file)) == {"0", "1.0", "1.2", "2.0", "2.2"}
    assert all(cost.quantized_ms > cost.float_ms for cost in row.layers)
    assert [cost.lost_ms for cost in row.layers] == sorted((cost.lost_ms for cost in row.layers), reverse=True)


def test_nothing_is_timed_where_int8_is_faster_or_the_file_is_anothers(files):
    assert slower(files, recorded("onnxruntime", float=2.0, ptq=1.0), SPEC, ("onnxruntime",)) == ()
    assert slower(files, recorded("onnxruntime", float=1.0, ptq=2.0), SPEC, ("openvino",)) == ()


def test_a_later_measurement_takes_the_place_of_an_earlier_one(files, tmp_path):
    targets = ("openvino", "onnxruntime")
    for engine in ("onnxruntime", "openvino (f32)"):
        keep_slower(tmp_path, slower(files, recorded(engine, float=1.0, ptq=2.0), SPEC, targets), files, SPEC)
    assert [row.engine for row in SLOWER.read(tmp_path)] == ["openvino (f32)"]
    keep_slower(tmp_path, [], files, BenchSpec(engines=("onnxruntime",), batch_sizes=(1,)))
    assert [row.engine for row in SLOWER.read(tmp_path)] == ["openvino (f32)"]
    keep_slower(tmp_path, [], files, SPEC)
    assert SLOWER.read(tmp_path) == ()


def test_a_rule_for_a_target_leaves_the_layer_float_in_that_targets_file_alone(files):
    def integer(name):
        with build_engine(files["ptq"].of(name), "onnxruntime", profile="yes") as engine:
            return {row.name.split("/Conv")[0]: row.kind for row in engine.runtime_layers() if "Conv" in row.kind}

    assert integer("onnxruntime")["/1/0"] != "QLinearConv"
    assert integer("onnxruntime")["/2/0"] == "QLinearConv"
    assert {"/1/0", "/2/0"} <= integer("openvino").keys()


def stolen(monkeypatch):
    clock = itertools.count(0.0, 10.0)

    def read():
        now = next(clock)
        return CpuTime(wall=now, busy=0.0, own=0.0, stolen=now * (os.cpu_count() or 1) / 2)

    for place in ("pipeline.steps.evaluate", "measure.latency"):  # end to end is timed by the latter
        monkeypatch.setattr(f"compress.{place}.cpu_time", read)


def test_no_layer_is_blamed_and_no_rule_offered_on_a_busy_machine(files, monkeypatch):
    stolen(monkeypatch)
    (row,) = slower(files, recorded("onnxruntime", float=1.0, ptq=2.0), SPEC, ("onnxruntime",))
    assert row.layers == () and row.unquiet
    (said,) = slower_sentences([row])
    assert said.endswith("what each layer adds was not measured: the machine was busy")
    assert rules_text([row]) == ""


def test_every_factor_between_times_of_a_busy_machine_is_left_out(files, monkeypatch):
    stolen(monkeypatch)
    metrics = bench({name: files[name] for name in files}, SPEC, progress=NoProgress())
    timed = [m for m in metrics if m.name == "p50_ms" and m.value is not None]
    assert len(timed) >= 4 and all(m.status == "partial" for m in timed)
    assert not [m for m in metrics if m.name in PAIRED]
    assert {row.cells()[5] for row in summary_table(metrics)} == {"not measured"}
    said = headline(metrics)
    assert "not measured: the machine was busy" in said.sentence and "as fast" not in said.sentence
    assert not re.search(r"\d×", said.sentence + said.tiles[0].value)
    paths = {"float": files["float"].file, "mended": files["ptq"].file}
    prices = measure_prices(paths, engine="onnxruntime", seconds=0.1)
    assert all("the machine was busy" in price.unquiet for price in prices)


def test_speeds_are_those_of_the_turns_and_only_where_they_can_be_compared(files):
    with TorchEngine(nn.Identity(), (3, 4, 4), label="onnxruntime") as engine:
        common = {"batch_size": 1, "p90_ms": 1, "p99_ms": 1, "mean_ms": 1, "images_per_s": 1, "runs": 35}
        turns = {"a": (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0), "b": (1.0, 2.0, 2.0, 2.0, 5.0, 4.0, 7.0)}
        timed = [
            Latency(label=label, p50_ms=np.median(row), float_precision="f32", turns_ms=row, **common)
            for label, row in turns.items()
        ]
        engines = {"a": ("float", engine), "b": ("ptq", engine)}
        found = {m.name: m.value for m in paired_speeds(engines, timed)}
        ratios = np.sort(np.divide(turns["a"], turns["b"]))
        assert [found[name] for name in PAIRED] == [np.median(ratios), ratios[0], ratios[-1]]
        busy = [timed[0], replace(timed[1], unquiet="the machine was busy")]
        short = [replace(row, turns_ms=row.turns_ms[:5]) for row in timed]
        assert [*paired_speeds(engines, busy), *paired_speeds(engines, short)] == []


def test_times_from_pictures_to_classes_say_so_too(files, monkeypatch):
    pixels = [np.zeros((16, 16, 3), dtype=np.uint8)]
    made = Preprocessing(image_size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    with build_engine(files["float"].file, "onnxruntime") as engine:
        stolen(monkeypatch)
        (row,) = measure_end_to_end({"float": engine}, pixels, preprocessing=made, warmup=0, runs=2)
    why = "the machine was busy (its hypervisor kept 50% of the time)"
    assert row.method.endswith(f"{why}: these times are not to be compared")
