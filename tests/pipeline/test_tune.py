"""The choice of float layers by time and noise: against brute force, and with times that are given."""

from itertools import chain, combinations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compress
from compress.errors import CompressError
from compress.measure.latency import Latency
from compress.pipeline.studies import tune as tuning
from compress.pipeline.studies.tune import Group, choices
from tests.exact import on_engine
from tests.onnx_ptq.files import sqnr

NUMBERS = st.integers(-8, 8).map(float)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS.map(abs)), min_size=1, max_size=6))
def test_no_other_choice_is_faster_with_as_little_noise(table):
    groups = [
        Group(pattern=str(i), layers=(str(i),), gain_ms=gain, noise=noise) for i, (gain, noise) in enumerate(table)
    ]
    subsets = list(chain.from_iterable(combinations(groups, count) for count in range(len(groups) + 1)))

    def figures(chosen):
        return -sum(g.gain_ms for g in chosen), sum(g.noise for g in groups if g not in chosen)

    found = list(choices([*groups, Group(pattern="not tried", layers=("x",))]))
    assert figures(found[0])[0] == min(figures(each)[0] for each in subsets)
    for chosen in found:
        ms, noise = figures(chosen)
        assert all(figures(each)[0] >= ms for each in subsets if figures(each)[1] <= noise)


def _network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(),
        nn.Linear(8 * 36, 4),
    ).eval()  # fmt: skip


def _ms(path):
    """Times in which a depthwise layer is slower in INT8, and other layers are faster."""
    graph = onnx.load(path).graph
    pairs = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    ms = 1.0
    for node in graph.node:
        depthwise = any(a.name == "group" and a.i > 1 for a in node.attribute)
        if node.op_type in ("Conv", "Gemm"):
            ms += 1.0 if node.input[1] not in pairs else 3.0 if depthwise else 0.5
    return ms


def _islands_ms(path):
    """Times in which depthwise layers are faster float, but one of them alone pays for casts."""
    graph = onnx.load(path).graph
    pairs = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    convs = [node for node in graph.node if node.op_type == "Conv"]
    left = [node.input[1] not in pairs for node in convs if any(a.name == "group" and a.i > 1 for a in node.attribute)]
    plain = sum(node.input[1] not in pairs for node in convs) - sum(left)
    return 40.0 + 10.0 * plain + (7.0 if not all(left) else 0.0) + 2.0 * (any(left) and not all(left))


_TIMES = [_ms]


@pytest.fixture
def given_times(monkeypatch, tmp_path):
    def timed(files, *_, seconds, **__):
        each = {name: _TIMES[-1](path) for name, path in files.items()}
        turns = min(30, max(1, int(1000 * seconds * len(each) / (6 * sum(each.values())))))
        return {
            name: Latency(
                label=name, batch_size=1, p50_ms=ms, p90_ms=ms, p99_ms=ms, mean_ms=ms, images_per_s=1.0, runs=30,
                float_precision="f32", turns_ms=(ms,) * turns,
            )
            for name, ms in each.items()
        }  # fmt: skip

    monkeypatch.setattr(tuning, "time_files", timed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    del _TIMES[1:]


BATCHES = list(torch.randn(40, 3, 10, 10, generator=torch.Generator().manual_seed(1)).split(8))
SPEC = compress.QuantSpec(target="onnxruntime")


def test_a_layer_that_is_slower_in_int8_stays_float(given_times):
    poisoned = [*BATCHES[:4], 2 * BATCHES[4]]  # the fifth batch is held back: no range has seen it
    found = compress.tune(_network(), poisoned, out=given_times / "q.onnx", spec=SPEC, sqnr_db=0.5)
    assert found.choice == "tuned" and found.images == 8, found.why
    assert [form.ms for form in found.forms] == [5.0, 5.5, 3.5]
    assert _ms(found.path) == 3.5
    alone = compress.quantize_onnx(found.forms[0].path, BATCHES[:4], spec=SPEC, out=given_times / "alone.onnx")
    assert alone.read_bytes() == (given_times / "q.onnx").read_bytes()
    stored = tuning.cached()
    again = compress.tune(found.forms[0].path, BATCHES, out=given_times / "r.onnx", spec=SPEC, sqnr_db=0.5)
    assert again.choice == "tuned" and tuning.cached() == stored
    assert {round(ms, 6) for times in stored.values() for ms in times.values()} == {2.0, -0.5}


def test_float_is_recommended_where_the_floor_is_out_of_reach(given_times):
    found = compress.tune(_network(), BATCHES, out=given_times / "q.onnx", spec=SPEC, sqnr_db=300.0)
    assert found.choice == "float" and found.path == found.forms[0].path and "floor" in found.why
    noises = [group.noise for group in found.groups]
    assert np.isfinite(noises).all() and max(noises) > 0


def test_a_float_file_that_the_engine_does_not_compute_is_named(given_times, monkeypatch):
    build = tuning.build_engine

    def overflowing(path, engine):
        built = build(path, "onnxruntime")
        if engine == "openvino":
            run = built.run
            built.run = lambda feed: {name: 0 * value for name, value in run(feed).items()}
        return built

    monkeypatch.setattr(tuning, "build_engine", overflowing)
    with pytest.warns(compress.CompressWarning, match="the float file itself misses the floor.* keeps 0.0 dB to ONNX"):
        compress.tune(_network(), BATCHES, out=given_times / "q.onnx", spec=SPEC, sqnr_db=5.0, engine="openvino")


def _depthwise_network():
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU()]
    for kernel in (3, 1, 5):
        layers += [nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def test_layers_of_a_kind_stay_float_where_only_all_of_them_are_faster(given_times):
    _TIMES.append(_islands_ms)
    found = compress.tune(_depthwise_network(), BATCHES, out=given_times / "q.onnx", spec=SPEC, sqnr_db=0.5)
    assert found.choice == "tuned" and [form.ms for form in found.forms] == [80.0, 47.0, 40.0], found.why


def test_the_time_of_slow_files_is_measured_in_as_many_turns(given_times):
    _TIMES.append(lambda path: 300 * _ms(path))
    found = compress.tune(_network(), BATCHES, out=given_times / "q.onnx", spec=SPEC, sqnr_db=0.5)
    assert found.choice == "tuned" and found.forms[2].ms == 300 * 3.5, found.why


def _decibels(before, after):
    return sqnr(*(on_engine(path, "onnxruntime", BATCHES[4]).numpy() for path in (before, after)))


def test_a_floor_that_rules_miss_is_kept_by_layers_that_stay_float(given_times):
    path = compress.export_onnx(_network(), (BATCHES[0],), given_times / "float.onnx")
    rules = compress.quantize_onnx(path, BATCHES[:4], spec=SPEC, out=given_times / "rules.onnx")
    floor = _decibels(path, rules) + 2
    found = compress.tune(path, BATCHES, out=given_times / "q.onnx", spec=SPEC, sqnr_db=floor)
    assert found.choice == "tuned" and not found.forms[1].kept, found.why
    assert "rules" in found.why and "which misses the floor" in found.why
    assert _decibels(path, found.path) >= floor and _ms(found.path) < _ms(path)


@pytest.mark.parametrize(
    ("batches", "options", "words"),
    [
        (BATCHES[:1], {"drop": 1.0}, "two batches"),
        ([], {"drop": 1.0}, "two batches"),
        (BATCHES, {}, "one floor"),
        (BATCHES, {"drop": 1.0, "minutes": 0.0}, "minutes above 0"),
        (BATCHES, {"drop": 1.0, "engine": "onxruntime"}, "onnxruntime"),
    ],
)
def test_refusals(given_times, batches, options, words):
    with pytest.raises(CompressError, match=words):
        compress.tune(_network(), batches, out=given_times / "q.onnx", spec=SPEC, **options)


@pytest.mark.parametrize("text", ["[1]", '{"a": {"b": "x"}}', "{" * 9, '{"a": 1}'])
def test_a_cache_that_is_no_table_of_times_is_refused(given_times, text):
    path = given_times / "cache/compress/tuned.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(CompressError, match="delete it"):
        tuning.cached()
