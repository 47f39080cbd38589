import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from compress import Rule
from compress.errors import RunError
from compress.measure.metric import Metric
from compress.recipe.tree import parse_recipe
from compress.records.files import (
    SLOWER,
    IntervalRow,
    LayerCost,
    RunData,
    SlowRow,
    is_untrained,
    read_run,
)
from compress.records.summary import (
    best_variant,
    foreign_files,
    not_faster,
    rules_text,
    slower_sentences,
    summary_columns,
    summary_notes,
    summary_table,
    unavailable_engines,
)
from compress.report.document import headline
from compress.support.text import in_bytes, significant
from tests.report.sample import metric, sample_epochs, sample_layers, sample_metrics, sample_placement

SUMMARY_COLUMNS = summary_columns(())


def metrics_of(*rows):
    return tuple(Metric.from_dict(row) for row in rows)


SAMPLE = metrics_of(*sample_metrics())


def test_values_are_those_of_the_metrics():
    truth = {(m.name, m.variant, m.engine, m.batch_size): m.value for m in SAMPLE}
    timed = [row for row in summary_table(SAMPLE) if row.batch_size is not None]
    assert len(timed) == 3 * 3 * 2  # variants x engines x batch sizes
    for row in timed:
        for name in ("p50_ms", "p99_ms", "images_per_s"):
            assert getattr(row, name) == truth[name, row.variant, row.engine, row.batch_size]
        assert row.score == truth["top1", row.variant, row.engine, None]
        assert row.file_bytes == truth["file_bytes", row.variant, "", None]
    speedups = {(row.engine, row.batch_size, row.variant): row.speedup for row in timed}
    assert speedups["openvino (f32)", 1, "qat"] == pytest.approx(11.52 / 3.19)
    assert speedups["onnxruntime", 32, "ptq"] == pytest.approx(502.3 / 233.1)
    assert {(row.speedup, row.size_ratio) for row in timed if row.variant == "float"} == {(1.0, 1.0)}


def test_rows_of_a_group_stand_together_float_first_and_untimed_engines_last():
    rows = summary_table(metrics_of(*sorted(sample_metrics(), key=lambda r: r["variant"], reverse=True)))
    keys = [(row.engine, row.batch_size) for row in rows]
    assert keys == sorted(keys, key=keys.index)
    assert [row.variant for row in rows[::3]] == ["float"] * (len(rows) // 3)
    assert {row.engine for row in rows[-3:]} == {"torch (fake quantization)"}
    assert all(row.file_bytes is None for row in rows[-3:])  # torch runs no file


def test_a_speed_up_never_crosses_engines_or_batch_sizes():
    rows = summary_table(
        metrics_of(
            metric("p50_ms", "float", "openvino (f32)", 10.0, "ms", batch_size=1),
            metric("p50_ms", "qat", "openvino (bf16)", 5.0, "ms", batch_size=1),
            metric("p50_ms", "qat", "openvino (f32)", 50.0, "ms", batch_size=32),
        )
    )
    assert {(row.engine, row.batch_size): row.speedup for row in rows if row.variant == "qat"} == {
        ("openvino (bf16)", 1): None,
        ("openvino (f32)", 32): None,
    }
    assert all(row.cells()[SUMMARY_COLUMNS.index("speed-up")] == "n/a" for row in rows if row.variant == "qat")


def test_an_engines_own_file_counts_before_the_onnx_file():
    rows = summary_table(
        metrics_of(
            metric("p50_ms", "float", "tensorrt", 2.0, "ms", batch_size=1),
            metric("p50_ms", "float", "onnxruntime", 3.0, "ms", batch_size=1),
            metric("file_bytes", "float", "", 100.0, "bytes"),
            metric("file_bytes", "float", "tensorrt", 60.0, "bytes"),
        )
    )
    assert {row.engine: row.file_bytes for row in rows} == {"tensorrt": 60.0, "onnxruntime": 100.0}


def test_what_several_reasons_share_is_said_once():
    rows = [
        metric("top1", variant, "tensorrt-rtx", None, "%", status="unavailable", reason=f"built {variant}, but no GPU")
        for variant in ("float", "ptq")
    ]
    rows.append(metric("p50_ms", "qat", "tensorrt-rtx", None, "ms", status="unavailable", reason="too large"))
    reasons = unavailable_engines(map(Metric.from_dict, rows))
    assert reasons == {"tensorrt-rtx": "built float, built ptq, but no GPU; too large"}
    assert "tensorrt" not in {row.engine for row in summary_table(SAMPLE)}
    assert not any("tensorrt package" in note for note in summary_notes(SAMPLE))


def test_notes_tell_the_reason_of_every_gap_and_mark():
    metrics = metrics_of(
        metric("top1", "float", "onnxruntime", 90.0, "%", status="partial", reason="100 of 360 images"),
        metric("p50_ms", "float", "onnxruntime", 3.0, "ms", batch_size=1),
        metric("p99_ms", "float", "onnxruntime", None, "ms", batch_size=1, status="unavailable", reason="too few runs"),
        metric("top1", "float", "torch", 91.0, "%"),
    )
    notes = "\n".join(summary_notes(metrics))
    assert "float on ONNX Runtime: top1 partial: 100 of 360 images" in notes
    assert "float on ONNX Runtime, batch 1: p99_ms unavailable: too few runs" in notes
    assert "ONNX Runtime: images_per_s not measured" in notes
    assert "ONNX Runtime: file_bytes not measured" in notes
    assert "torch: not timed in this run" in notes
    assert "p99_ms not measured" not in notes
    assert summary_table(metrics)[0].cells()[SUMMARY_COLUMNS.index("top-1 %")] == "90.00*"


@given(st.floats(1e-6, 1e12))
def test_significant_is_the_number_to_three_digits(value):
    assert float(significant(value).replace(",", "")) == pytest.approx(float(f"{value:.3g}"), rel=5e-3)
    assert "e" not in significant(value)


@given(st.integers(0, 10**13))
def test_in_bytes_is_within_half_a_percent(value):
    text, unit = in_bytes(value).split(" ")
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert math.isclose(float(text.replace(",", "")) * factor, value, rel_tol=5.1e-3)


def test_headline_takes_the_fastest_float_precision_of_the_engine():
    said = headline(SAMPLE, bits=frozenset({8}))
    # 6.02 / 3.15 in bf16, not 11.52 / 3.19 in f32
    assert said.sentence.startswith("INT8 (QAT) is 1.9× faster than float at batch 1 on OpenVINO (bf16)")
    assert "loses 0.28 points of top-1" in said.sentence
    assert "0.26 of the file size" in said.sentence
    assert [tile.value for tile in said.tiles] == ["1.91×", "−0.28", "0.26", "99.72 %"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p50_ms": 20.0}, "is 2× slower than float"),
        ({"p50_ms": 10.05}, "is as fast as float"),
        ({"top1": 91.5}, "gains 1.50 points"),
        ({"top1": 90.001}, "keeps top-1 at 90.00 %"),
        ({"p50_ms": 0.5}, "is 20× faster"),
    ],
)
def test_headline_says_what_it_cost_as_plainly_as_what_it_gained(change, words):
    after = {"p50_ms": 5.0, "top1": 89.0} | change
    said = headline(
        metrics_of(
            metric("p50_ms", "float", "onnxruntime", 10.0, "ms", batch_size=1),
            metric("top1", "float", "onnxruntime", 90.0, "%"),
            metric("p50_ms", "ptq", "onnxruntime", after["p50_ms"], "ms", batch_size=1),
            metric("top1", "ptq", "onnxruntime", after["top1"], "%"),
        )
    )
    assert words in said.sentence
    assert said.sentence.startswith("The PTQ model ")


def test_headline_names_both_precisions_where_they_differ():
    said = headline(
        metrics_of(
            metric("p50_ms", "float", "openvino (f32)", 10.0, "ms", batch_size=1),
            metric("p50_ms", "float", "openvino (bf16)", 6.0, "ms", batch_size=1),
            metric("p50_ms", "qat", "openvino (f32)", 3.0, "ms", batch_size=1),
        )
    )
    assert "2× faster at batch 1 on OpenVINO, which runs float fastest as bf16" in said.sentence.replace(
        " than float", ""
    )


def test_headline_without_a_quantized_variant_or_without_anything():
    float_only = metrics_of(metric("top1", "float", "onnxruntime", 90.0, "%"))
    assert (
        headline(float_only).sentence
        == "The float model reaches 90.00 % top-1 on ONNX Runtime; nothing was quantized yet."
    )
    assert headline(()).sentence == "This run has measured nothing yet."
    untimed = metrics_of(metric("top1", "float", "torch", 90.0, "%"), metric("top1", "qat", "torch", 89.5, "%"))
    assert "loses 0.50 points of top-1" in headline(untimed).sentence
    alone = metrics_of(metric("top1", "qat", "torch", 89.5, "%"))
    assert headline(alone).sentence == "The QAT model has no number that can be set beside float's."


def test_an_engine_with_a_file_placed_for_another_is_named():
    rows = [("float", "tensorrt"), ("ptq", "openvino (f32)"), ("ptq", "onnxruntime"), ("ptq", "torch"), ("ptq", "mine")]
    metrics = metrics_of(*(metric("p50_ms", variant, engine, 1.0, "ms") for variant, engine in rows))
    recipe = "quantization: {target: TARGET}"

    def said(target):
        return foreign_files(RunData(folder=Path(), recipe=recipe.replace("TARGET", target), metrics=metrics))

    (note,) = said("openvino")
    assert note.startswith("ONNX Runtime was given files whose quantizers are placed for OpenVINO")
    assert "quantization.target: [openvino, onnxruntime]" in note
    assert said("[openvino, onnxruntime]") == () == foreign_files(RunData(folder=Path(), metrics=metrics))


PAIR = [
    metric("p50_ms", "float", "openvino (f32)", 9.0, "ms", batch_size=1),
    metric("p50_ms", "float", "openvino (bf16)", 8.0, "ms", batch_size=1),
    metric("p50_ms", "ptq", "openvino (f32)", 4.0, "ms", batch_size=1),
    metric("top1", "float", "openvino (f32)", 80.0, "%"),
    metric("top1", "float", "openvino (bf16)", 70.0, "%"),
    metric("top1", "ptq", "openvino (f32)", 79.0, "%"),
]


def speed(value, low, high):
    pair = {"speed": value, "speed_low": low, "speed_high": high}
    return [metric(name, "ptq", "openvino (f32)", one, "×", batch_size=1) for name, one in pair.items()]


def test_headline_has_the_interval_of_its_pair_and_calls_no_difference_one():
    said = headline(metrics_of(*PAIR, *speed(1.9, 1.7, 2.2)))
    assert "is 1.9× faster than float (95 % interval 1.70 to 2.20×) at batch 1" in said.sentence
    assert "95 % interval 1.70 to 2.20×" in said.tiles[0].label and said.tiles[0].value == "1.90×"
    for value, low, high in ((1.2, 0.9, 1.5), (0.9, 0.7, 1.1)):
        words = headline(metrics_of(*PAIR, *speed(value, low, high))).sentence
        assert "shows no measurable difference of speed from float" in words and "faster" not in words


def test_accuracy_is_compared_within_a_precision_whichever_runs_float_faster():
    slow = [
        row | {"value": 10.0} if row["engine"] == "openvino (bf16)" and row["value"] == 8.0 else row for row in PAIR
    ]
    words = [headline(metrics_of(*rows)).sentence for rows in (PAIR, slow)]
    assert all("loses 1.00 points of top-1" in one for one in words)
    row = {"metric": "top1", "unit": "%", "images": 45, "measurable": False, "value": 79.0, "low": 70.0, "high": 90.0}
    ends = {"difference": -1.0, "difference_low": -6.0, "difference_high": 3.0}
    interval = IntervalRow(variant="ptq", engine="openvino (f32)", **row, **ends)
    words = [headline(metrics_of(*rows), intervals=[interval]).sentence for rows in (PAIR, slow)]
    assert all("shows no measurable change of top-1" in one for one in words)


def test_an_untrained_network_is_called_so_in_the_place_of_its_accuracy():
    said = headline(metrics_of(*PAIR), untrained=True)
    assert said.sentence.startswith("The float network is untrained (random weights, train.epochs 0)")
    assert "2× faster" in said.sentence and "top-1" not in said.sentence
    assert [tile.value for tile in said.tiles] == ["2.00×"]
    alone = headline(metrics_of(metric("top1", "float", "onnxruntime", 0.03, "%")), untrained=True)
    assert alone.sentence.startswith("The float network is untrained")


@pytest.mark.parametrize(
    ("recipe", "untrained"),
    [
        ("model: {name: resnet18, weights: null}\ntrain: {epochs: 0}", True),
        ("model: {name: 'timm:resnet18', weights: null}\ntrain: {epochs: 0}", True),
        ("model: {name: resnet18, weights: null}\ntrain: {epochs: 1}", False),
        ("model: {name: resnet18, weights: DEFAULT}\ntrain: {epochs: 0}", False),
        ("model: {name: 'mine.nets:trained', weights: null}\ntrain: {epochs: 0}", False),
        ("model: {name: net.onnx, weights: null}\ntrain: {epochs: 0}", False),
        ("model: {name: resnet18}", False),
    ],
)
def test_what_is_untrained_follows_from_the_recipe(recipe, untrained):
    assert is_untrained(RunData(folder=Path(), recipe=recipe)) is untrained


# What is said of quantized networks that are not faster than float, from times that were recorded.


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
        "(0.625 against 0.500). `sensitivity --from RUN --set quantization.target=onnxruntime "
        "--costs onnxruntime --max-drop 1` finds the fastest formats that lose at most a point"
    )
    (said,) = slower_sentences([row(layers=(), rest_ms=0.5, float_rest_ms=0.25)])
    assert said.endswith("no single layer is slower, and the operations that belong to no layer take 0.250 ms more")


def test_the_rules_are_lines_of_a_recipe():
    rows = [row(), row(variant="qat", layers=row().layers[:1]), row(target="", layers=row().layers[1:2])]
    spec = parse_recipe(yaml.safe_load(rules_text(rows)), source="the advice").quantization
    wanted = [("features.3.0", "onnxruntime"), ("features.0.0", "onnxruntime"), ("features.0.0", None)]
    assert spec.rules == tuple(Rule(match=name, enable=False, target=target) for name, target in wanted)
    assert rules_text([row(layers=())]) == ""


def test_rows_are_kept_in_a_run_folder(tmp_path):
    SLOWER.write(tmp_path, [row()])
    assert SLOWER.read(tmp_path) == (row(),)
    assert SLOWER.read(Path(tmp_path) / "elsewhere") is None


@pytest.mark.parametrize("text", ["{}", '[{"variant": "ptq"}]'])
def test_another_content_is_refused(tmp_path, text):
    (tmp_path / SLOWER.name).write_text(text)
    with pytest.raises(Exception, match=SLOWER.name):
        SLOWER.read(tmp_path)


def test_reads_everything_that_the_sample_holds(run_folder):
    run = read_run(run_folder)
    assert [m.to_dict() for m in run.metrics] == sample_metrics()
    assert [row.tensor for row in run.placement] == [row["tensor"] for row in sample_placement()]
    assert {row.num_bits for row in run.placement if row.decision == "float"} == {None}
    assert {(row.axis, row.signed) for row in run.placement if row.decision == "quantize"} == {(None, True), (0, True)}
    assert [row.val_top1 for row in run.qat] == [
        r["val_top1"] for r in sample_epochs(2, lr=1, start=0.9806, end=0.9833)
    ]
    assert run.train[2].val_top1 is None  # an empty cell: not evaluated after the third epoch
    assert [row.activation_sqnr_db for row in run.layers] == [r["activation_sqnr_db"] for r in sample_layers()]
    assert len(run.histograms) == 54
    assert sum(row.int8 for row in run.operations) == 106
    assert run.environment is not None and run.environment["cores"] == 2
    assert run.recipe is not None and "resnet50" in run.recipe
    assert not run.absent


def test_every_part_may_be_missing_and_says_so(tmp_path):
    (tmp_path / "metrics.json").write_text("[]")
    run = read_run(tmp_path)
    assert (run.recipe, run.environment) == (None, None)
    assert (run.metrics, run.layers, run.train, run.histograms) == ((), (), (), ())
    assert set(run.absent) == {
        "recipe.yaml",
        "environment.json",
        "placement.csv",
        "train.csv",
        "qat.csv",
        "layers.json",
        "histograms.json",
        "audit.json",
        "notes.json",
    }
    assert all(name in reason for name, reason in run.absent.items())


def test_refuses_what_is_no_run_folder(tmp_path):
    with pytest.raises(RunError, match="not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"holds none of a run's files"):
        read_run(tmp_path)


def block(edges, kind="int8"):
    boxes = {name: {"title": name, "detail": "", "kind": kind} for name in ("a", "b")}
    return json.dumps({"block": "", "target": "tensorrt", "boxes": boxes, "edges": edges})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.json", "[{", "not JSON"),
        ("train.csv", b"\xff\xfe\x00", "cannot be read"),
        ("metrics.json", "{}", "list of objects"),
        ("metrics.json", '[{"name": "top1"}]', "missing variant"),
        ("layers.json", '[{"kind": "conv"}]', "row 1: name"),
        (
            "layers.json",
            '[{"name": "a", "kind": "conv"}, {"name": "b", "kind": "conv", "macs": "many"}]',
            "row 2: macs",
        ),
        ("environment.json", "[]", "one object"),
        ("train.csv", "epoch,step,lr\n1,2,0.1\n", "row 1: train_loss"),
        ("train.csv", "epoch,step,lr,train_loss,train_top1\nfirst,2,0.1,1,1\n", "row 1: epoch"),
        ("placement.csv", "tensor,layer,decision,num_bits\nx,y,quantize,eight\n", "row 1: num_bits"),
        ("histograms.json", '[{"name": "a", "counts": [1, 2], "bin_edges": [0, 1, 2, 3], "amax": 1}]', "bin edges"),
        ("histograms.json", '[{"name": "a", "counts": [], "bin_edges": [0, 1], "amax": 1}]', "bin edges"),
        ("notes.json", '{"a": 1}', "list of texts"),
        ("block.json", "[]", "an object with `boxes`"),
        ("block.json", '{"block": "", "target": "tensorrt", "boxes": {}, "edges": []}', "must hold boxes"),
        ("block.json", block([["b", "a"]]), "edges from one to a later one"),
        ("block.json", block([["a", "c"]]), "edges from one to a later one"),
        ("block.json", block([], kind="round"), "boxes.a.kind"),
        ("audit.json", '[{"variant": "qat", "name": "a", "op_type": "Conv"}]', "row 1: int8"),
    ],
)
def test_refuses_a_file_that_is_something_else_with_its_path(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunError, match=message) as caught:
        read_run(tmp_path)
    assert name in str(caught.value)


def test_columns_and_keys_of_later_versions_do_no_harm(tmp_path):
    (tmp_path / "layers.json").write_text(json.dumps([{"name": "a", "kind": "conv", "colour": "red"}]))
    (tmp_path / "qat.csv").write_text(
        "epoch,step,lr,train_loss,train_top1,images_per_s,seconds,mood\n1,2,0.1,0.5,0.9,80,9,good\n"
    )
    run = read_run(tmp_path)
    assert (run.layers[0].name, run.qat[0].train_top1) == ("a", 0.9)


def test_infinite_sqnr_is_a_number(tmp_path):
    row = {"name": "a", "kind": "conv", "weight_sqnr_db": "inf", "activation_sqnr_db": None}
    (tmp_path / "layers.json").write_text(json.dumps([row]))
    layer = read_run(tmp_path).layers[0]
    assert (layer.weight_sqnr_db, layer.activation_sqnr_db) == (math.inf, None)


def timed(variant, engine, score, time):
    return metric("top1", variant, engine, score, "%"), metric("p50_ms", variant, engine, time, "ms", batch_size=1)


@pytest.mark.parametrize(
    ("ptq", "qat", "best"),
    [((91.0, 2.0), (91.4, 2.1), "qat"), ((91.4, 2.0), (91.4, 1.8), "qat"), ((91.4, 2.0), (91.0, 1.8), "ptq")],
)
def test_the_network_to_ship_has_the_best_metric_then_the_best_time(ptq, qat, best):
    rows = [*timed("float", "openvino (f32)", 91.5, 4.0), *timed("ptq", "openvino (f32)", *ptq)]
    rows += timed("qat", "openvino (f32)", *qat)
    chosen, reason = best_variant(metrics_of(*rows))
    assert chosen == best and "x faster than float on OpenVINO (f32), batch 1" in reason
    for variant, time in (("float", 2.4), ("ptq", 2.0), ("qat", 2.0)):  # float is not run in f32 where bf16 is faster
        rows += timed(variant, "openvino (bf16)", 91.0, time)
    assert "1.20x faster than float on OpenVINO (bf16), batch 1" in best_variant(metrics_of(*rows))[1]
    busy = [m | {"status": "partial", "reason": "busy"} if m["value"] == 2.4 else m for m in rows]
    assert "faster" not in best_variant(metrics_of(*busy))[1]  # nor is float in f32 what it is compared with then


@pytest.mark.parametrize("status", ["complete", "partial"])
def test_a_network_that_is_neither_smaller_nor_faster_is_not_shipped_for_its_metric(status):
    rows = []
    for variant, score, time, size in (
        ("float", 91.0, 4.0, 40),
        ("sparse", 91.4, 4.0, 40),
        ("sparse_ptq", 91.3, 2.0, 10),
    ):
        quality, latency = timed(variant, "openvino (f32)", score, time)
        latency |= {"status": status, "reason": "" if status == "complete" else "busy"}
        rows += [quality, metric("file_bytes", variant, "", size, "bytes"), latency]
    chosen, reason = best_variant(metrics_of(*rows))
    assert chosen == "sparse_ptq" and reason.endswith("top-1 91.30 % (float 91.00 %), 0.25 of the file")


def test_float_is_shipped_where_nothing_is_faster():
    alone = timed("float", "openvino (f32)", 90.0, 2.0)
    found = best_variant(metrics_of(*alone, *timed("ptq", "openvino (f32)", 90.0, 3.0)))
    assert found == ("float", "PTQ is 1.50x slower than float on OpenVINO (f32), batch 1")
    assert best_variant(metrics_of(*alone)) is None
