"""Layers of a network that `bench` has found slower than float: a real engine times them, and times decide no test."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.audit.onnx import audit_onnx
from compress.engines import build_engine
from compress.export.onnx import export_onnx
from compress.measure import BenchSpec
from compress.measure.metric import Metric
from compress.pipeline.network import NetworkFiles
from compress.pipeline.steps.slower import keep_slower, layers_of, slower
from compress.pipeline.studies.faster import faster
from compress.quantization.ptq.quantize import quantize_targets
from compress.quantization.spec import QuantSpec, Rule
from compress.recipe.tree import load_recipe
from compress.records.files import SLOWER
from compress.records.rows import LayerCost, SlowRow
from compress.report import write_report

MIXED = "mixed/openvino-1.onnx"
RUN = Path(__file__).parent / "formats" / "run-1"

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
    one = BenchSpec(engines=("onnxruntime",), batch_sizes=(1,))
    keep_slower(tmp_path, [], files, one)
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


def test_the_mixed_network_leaves_the_costly_layer_float_and_its_recipe_makes_it(tmp_path):
    folder = Path(shutil.copytree(RUN, tmp_path / "run"))
    facts = {"variant": "ptq", "engine": "openvino (f32)", "float_engine": "openvino (f32)", "target": "openvino"}
    costs = (LayerCost(layer="0", float_ms=0.25, quantized_ms=0.5),)
    SLOWER.write(folder, [SlowRow(**facts, batch_size=1, p50_ms=2.0, float_p50_ms=1.0, layers=costs)])
    (row,) = faster(folder, BenchSpec(engines=("openvino",), batch_sizes=(1,), runs=2, warmup=0, seconds=0.01))
    assert row.mixed.layers == ("0",) and row.mixed.p50_ms > 0 and "top-1" in row.mixed.score
    int8 = {name: {one.name: one.int8 for one in audit_onnx(folder / name).rows} for name in ("ptq.onnx", MIXED)}
    assert [*int8["ptq.onnx"].values()] == [True, True] and [*int8[MIXED].values()] == [False, True]
    rule = Rule(match="0", enable=False, target="openvino")
    assert load_recipe(folder / row.mixed.recipe).quantization.rules == (rule,)
    assert SLOWER.read(folder) == (row,)
    write_report(folder)
    page = (folder / "report.md").read_text()
    assert "With 1 layer in float, PTQ takes" in page
    assert "    - {match: '0', enable: false, target: openvino}" in page
