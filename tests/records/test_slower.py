"""What is said of quantized networks that are not faster than float, from times that were recorded."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from compress import Rule
from compress.measure.metric import Metric
from compress.recipe.tree import parse_recipe
from compress.records.files import SLOWER
from compress.records.rows import LayerCost, MixedRow, SlowRow
from compress.records.slower import costly, not_faster, rules_text, slower_sentences


def p50(variant, engine, value, batch_size=1):
    return Metric(name="p50_ms", variant=variant, engine=engine, batch_size=batch_size, value=value, unit="ms")


def row(**changes):
    layers = (
        LayerCost(layer="features.3.0", float_ms=0.125, quantized_ms=0.375),
        LayerCost(layer="features.0.0", float_ms=0.5, quantized_ms=0.625),
        LayerCost(layer="features.9.0", float_ms=0.05, quantized_ms=0.051),
    )
    facts = {"variant": "ptq", "engine": "onnxruntime", "float_engine": "onnxruntime", "batch_size": 1}
    times = {"p50_ms": 7.28, "float_p50_ms": 7.0, "layers": layers, "target": "onnxruntime"}
    return SlowRow(**{**facts, **times, **changes})


def test_each_engine_at_its_fastest_is_compared_with_float_at_its_fastest():
    metrics = [
        p50("float", "openvino (f32)", 10.0),
        p50("float", "openvino (bf16)", 6.0),
        p50("ptq", "openvino (f32)", 7.0),
        p50("ptq", "openvino (bf16)", 6.5),
        p50("qat", "openvino (f32)", 5.0),
        p50("float", "onnxruntime", 4.0),
        p50("ptq", "onnxruntime", 4.0),
        p50("qat", "onnxruntime", 3.9),
        p50("float", "onnxruntime", 9.0, 8),
        p50("qat", "onnxruntime", 12.0, 8),
        p50("ptq", "torch", 99.0),
    ]
    found = {
        (r.variant, r.engine, r.float_engine, r.batch_size): (r.p50_ms, r.float_p50_ms) for r in not_faster(metrics)
    }
    assert found == {
        ("ptq", "openvino (bf16)", "openvino (bf16)", 1): (6.5, 6.0),
        ("qat", "onnxruntime", "onnxruntime", 8): (12.0, 9.0),
    }


def test_the_sentence_names_the_costliest_layers():
    (said,) = slower_sentences([row()])
    assert said == (
        "PTQ takes 1.04 of float's time on ONNX Runtime at batch 1 (7.28 against 7.00 ms). By the engine's own times 2 "
        "layers are slower there than in float, by 0.375 ms in all: features.3.0 (0.375 against 0.125), features.0.0 "
        "(0.625 against 0.500). `bench RUN --mixed` builds and times the network without them"
    )
    (said,) = slower_sentences([row(layers=(), rest_ms=0.5, float_rest_ms=0.25)])
    assert said.endswith("no single layer is slower, and the operations that belong to no layer take 0.250 ms more")


def test_the_network_that_was_built_is_named_with_its_time():
    mixed = MixedRow(layers=("features.3.0",), p50_ms=6.3, float_p50_ms=7.0, score="49.02 % mAP", recipe="mixed.yaml")
    (said,) = slower_sentences([row(mixed=mixed)])
    assert said.endswith(
        ". With 1 layer in float, PTQ takes 0.90 of float's time (6.30 against 7.00 ms, in turn) and has 49.02 % mAP "
        "(mixed.yaml)"
    )
    (said,) = slower_sentences([row(mixed=replace(mixed, p50_ms=7.5))])
    assert "so that float is the faster one here" in said
    assert [rule["match"] for rule in yaml.safe_load(rules_text([row(mixed=mixed)]))["quantization"]["rules"]] == [
        "features.3.0"
    ]


def test_the_rules_are_lines_of_a_recipe():
    rows = [row(), row(variant="qat", layers=row().layers[:1]), row(target="", layers=row().layers[1:2])]
    tree = yaml.safe_load(rules_text(rows))
    spec = parse_recipe(tree, source="the advice").quantization
    wanted = [("features.3.0", "onnxruntime"), ("features.0.0", "onnxruntime"), ("features.0.0", None)]
    assert spec.rules == tuple(Rule(match=name, enable=False, target=target) for name, target in wanted)
    assert rules_text([row(layers=())]) == ""


def test_a_loss_too_small_to_matter_asks_for_no_rule():
    assert costly(row()) == ("features.3.0", "features.0.0")


def test_rows_are_kept_in_a_run_folder(tmp_path):
    SLOWER.write(tmp_path, [row()])
    assert SLOWER.read(tmp_path) == (row(),)
    assert SLOWER.read(Path(tmp_path) / "elsewhere") is None


@pytest.mark.parametrize("text", ["{}", '[{"variant": "ptq"}]'])
def test_another_content_is_refused(tmp_path, text):
    (tmp_path / SLOWER.name).write_text(text)
    with pytest.raises(Exception, match=SLOWER.name):
        SLOWER.read(tmp_path)
