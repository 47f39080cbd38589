# Layers of a network that `bench` has found slower than float: a real engine times them, and times decide no test.

import itertools
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
    quantize_targets,
)
from compress.data.base import Preprocessing
from compress.measure.end_to_end import measure_end_to_end
from compress.measure.latency import CpuTime, Latency
from compress.measure.metric import PAIRED, Metric
from compress.pipeline.run import NetworkFiles
from compress.pipeline.steps.evaluate import bench, keep_slower, layers_of, paired_speeds, slower
from compress.pipeline.studies.parity import measure_prices
from compress.records.files import SLOWER
from compress.records.summary import rules_text, slower_sentences, summary_table
from compress.report.headline import headline
from compress.support.progress import NoProgress

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
