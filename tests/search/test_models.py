"""The latency model and the start of a search, against known coefficients and brute force."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import SearchSpec
from compress.errors import SearchError
from compress.search import timing
from compress.search.accuracy_model import rate_choices
from compress.search.lab import build, with_formats
from compress.search.latency_model import Costs, Sample, check, fit, rank_interval
from compress.search.network import distance
from compress.search.search import _lab
from compress.search.space import Space, best_within, make_space, otherwise, uniform
from compress.search.structure import analyse
from compress.search.timing import Timed
from compress.support.progress import NoProgress
from tests.networks import network

STRUCTURE = analyse(network(), torch.randn(2, 3, 16, 16))
NETWORKS = make_space(STRUCTURE, SearchSpec(multiple=2), "openvino")
COSTS = Costs(STRUCTURE)


def known_time(costs):
    """Constants of an invented engine: INT8 has half the time for a mac, and each layer has a call."""
    speed = {"float": 2e-6, "int8": 1e-6}
    return 0.01 + sum(0.002 + speed[c.format] * c.macs + 5e-7 * (c.read + c.written) for c in costs)


def networks(count, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]  # noqa: E731
    return [{e: draw(c) for e, c in NETWORKS.elements.items()} for _ in range(count)]


def test_costs_are_those_of_the_smaller_network():
    """conv1 takes 3 channels, 16 by 16 pixels, 3 by 3 weights; block1.conv1 8 by 8 pixels after the pool."""
    rows = {c.path: c for c in COSTS.of({"width conv1": "4", "width block1.conv1": "6", "format block1": "int8"})}
    assert (rows["conv1"].macs, rows["conv1"].written) == (256 * 4 * 3 * 9, 256 * 4)
    assert (rows["block1.conv1"].macs, rows["block1.conv1"].format) == (64 * 6 * 4 * 9, "int8")
    assert rows["block1.conv2"].weights == 6 * 4 * 9
    assert "block1.conv1" not in {c.path for c in COSTS.of({"block block1": "left out"})}


def test_a_latency_model_finds_the_time_of_networks_it_has_not_seen():
    samples = [Sample(costs=COSTS.of(c), time=known_time(COSTS.of(c))) for c in networks(24, 0)]
    model = fit(samples)
    unseen = [COSTS.of(c) for c in networks(12, 1)]
    seen = check(map(model.predict, unseen), map(known_time, unseen))
    assert seen.median_error < 0.05
    assert seen.spearman > 0.95


def test_networks_that_a_model_takes_for_the_best_correct_it():
    """The best by a model are those whose time it takes for too short; with their times it errs less on the next."""
    generator = torch.Generator().manual_seed(0)
    slower = {c.path: 1 + float(torch.rand(1, generator=generator)) for c in COSTS.of({})}
    time = lambda chosen: sum(slower[c.path] * known_time((c,)) for c in COSTS.of(chosen))  # noqa: E731
    errors = {e: {c: float(i) for i, c in enumerate(choices)} for e, choices in NETWORKS.elements.items()}
    samples = [Sample(costs=COSTS.of(c), time=time(c)) for c in ({}, *networks(6, 0))]

    def best(model):
        predict = lambda c: model.predict(COSTS.of(c))  # noqa: E731
        shares = [best_within(NETWORKS, errors, predict, share * time({})) for share in (0.9, 0.8, 0.7, 0.6)]
        chosen = [c for c in shares if c is not None]
        return chosen, check(map(predict, chosen), map(time, chosen)).median_error

    chosen, before = best(fit(samples))
    _, after = best(fit([*samples, *(Sample(costs=COSTS.of(c), time=time(c)) for c in chosen)]))
    assert after < before


@pytest.mark.parametrize(("width", "block", "computed"), [("6", 4, "8"), ("4", 4, "4"), ("2", 8, "8"), ("6", 1, "6")])
def test_channels_that_fill_no_block_cost_as_much_as_the_block(width, block, computed):
    fields = ("macs", "read", "written", "weights")
    small = {c.path: c.padded(block) for c in COSTS.of({"width block1.conv1": width})}
    for cost in COSTS.of({"width block1.conv1": computed}):
        if cost.path.startswith("block1"):
            for field in fields:
                assert getattr(small[cost.path], field) == pytest.approx(getattr(cost, field))


def test_a_model_knows_that_widths_in_between_win_no_time():
    """An engine that computes four channels at a time."""
    time = lambda chosen: known_time([c.padded(4) for c in COSTS.of(chosen)])  # noqa: E731
    model = fit([Sample(costs=COSTS.of(c), time=time(c)) for c in networks(24, 0)], block=4)
    predict = lambda width: model.predict(COSTS.of({"width block1.conv1": width}))  # noqa: E731
    assert predict("6") == pytest.approx(predict("8"), rel=0.01)
    assert predict("4") < 0.99 * predict("8")


def test_a_candidate_is_predicted_without_its_own_time():
    chosen = networks(12, 0)
    samples = {str(i): Sample(costs=COSTS.of(c), time=known_time(COSTS.of(c))) for i, c in enumerate(chosen)}
    samples["0"] = replace(samples["0"], time=10 * samples["0"].time)
    timed = Timed(model=fit(list(samples.values())), check=check([], []), samples=samples, cached=0)
    costs = COSTS.of(chosen[0])
    assert timed.without(costs).predict(costs) < 2 * known_time(costs) < timed.model.predict(costs)
    assert timed.without(COSTS.of(networks(1, 5)[0])) is timed.model


def test_the_interval_of_a_rank_correlation():
    """That of no correlation is tanh(1.96 / sqrt(n - 3)); few pairs say little, even in perfect order."""
    assert rank_interval(0.0, 28) == pytest.approx((-math.tanh(1.96 / 5), math.tanh(1.96 / 5)))
    low, high = check(range(1, 7), range(1, 7)).interval
    assert low < 0.5 and high == 1.0
    assert math.isnan(check([1, 2, 3], [1, 2, 3]).interval[0])


def test_the_block_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_times", lambda engine: {64: 1.0, 72: 1.4, 80: 1.42, 96: 1.9})
    assert timing.channel_block("openvino", version="1", cache=tmp_path) == 16
    monkeypatch.setattr(timing, "_times", lambda engine: pytest.fail("measured again"))
    assert timing.channel_block("openvino", version="1", cache=tmp_path) == 16
    assert timing.channel_block("tensorrt", version="1", cache=tmp_path) == 16
    (file,) = tmp_path.iterdir()
    file.write_text("[]")
    monkeypatch.setattr(timing, "_times", lambda engine: dict.fromkeys((64, 72, 80, 96), 1.0))
    assert timing.channel_block("openvino", version="1", cache=tmp_path) == 8


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_the_error_of_a_format_in_a_block_is_that_of_a_network_quantized_there_alone(engine):
    pictures = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    lab = _lab(network(), pictures[:2], [pictures], engine=engine, spec=SearchSpec(), quantization=None, block=2)
    model = rate_choices(lab, progress=NoProgress())
    with torch.no_grad():
        plain = [torch.cat([lab.structure.graph(images) for images in lab.held])]
        for element in ("format conv1", "format block1"):
            chosen = {element: "int8"}
            alone = with_formats(lab, build(lab, chosen, steps=0), chosen, quick=True)
            got = [torch.cat([alone(images) for images in lab.held])]
            assert model.distance[element]["int8"] == pytest.approx(distance(got, plain), rel=1e-3)
            assert model.distance[element]["float"] == 0.0


def test_times_of_layers_are_used_where_the_engine_has_them():
    costs = COSTS.of({})
    layers = {c.path: 0.1 * (i + 1) for i, c in enumerate(costs)}
    model = fit([Sample(costs=costs, time=sum(layers.values()) + 0.05, layers=layers)])
    for cost in costs:
        assert model.layer(cost) == pytest.approx(layers[cost.path], rel=0.25)


@pytest.mark.parametrize("time", [0.0, float("nan"), -1.0])
def test_times_that_are_none_are_refused(time):
    with pytest.raises(SearchError, match="above zero"):
        fit([Sample(costs=COSTS.of({}), time=time)])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_start_is_the_best_of_all_where_times_add_up(data):
    elements = {f"width {i}": tuple(map(str, range(3, 0, -1))) for i in range(4)}
    number = st.floats(0.01, 1.0)
    times = {
        e: dict(zip(c, sorted((data.draw(number) for _ in c), reverse=True), strict=True)) for e, c in elements.items()
    }
    errors = {e: dict(zip(c, sorted(data.draw(number) for _ in c), strict=True)) for e, c in elements.items()}
    sums = lambda table, chosen: sum(table[e][c] for e, c in chosen.items())  # noqa: E731
    everything = [dict(zip(elements, choice, strict=True)) for choice in itertools.product(*elements.values())]
    budget = data.draw(st.floats(0.05, 4.0))
    within = [c for c in everything if sums(times, c) <= budget]
    found = best_within(Space(elements=elements), errors, lambda c: sums(times, c), budget)
    if not within:
        assert found is None
    else:
        assert sums(times, found) <= budget
        assert sums(errors, found) == pytest.approx(min(sums(errors, c) for c in within), abs=1e-4)


@pytest.mark.parametrize(("seed", "share"), [(0, 0.8), (7, 0.5), (9, 0.6), (10, 0.5)])
def test_a_start_leaves_no_time_in_which_a_better_choice_would_fit(seed, share):
    """The work of a layer is a product of two widths, so that times do not add up."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: sorted(torch.rand(count, generator=generator).tolist())  # noqa: E731
    errors = {e: dict(zip(c, draw(len(c)), strict=True)) for e, c in NETWORKS.elements.items()}
    predict = lambda c: known_time(COSTS.of(c))  # noqa: E731
    budget = share * predict({})
    found = best_within(NETWORKS, errors, predict, budget)
    assert predict(found) <= budget
    for element, row in errors.items():
        better = [choice for choice, error in row.items() if error < row[found[element]]]
        assert all(predict({**found, element: choice}) > budget for choice in better)


def test_uniform_choices_and_the_cost_of_another():
    half = uniform(NETWORKS, width=0.5, format_="int8")
    assert {c for e, c in half.items() if e.startswith("format")} == {"int8"}
    assert (half["width conv1"], half["width block2.conv1"], half["block block1"]) == ("4", "8", "kept")
    errors = {e: {c: float(i) for i, c in enumerate(choices)} for e, choices in NETWORKS.elements.items()}
    rows = {(o.element, o.choice): o for o in otherwise(NETWORKS, errors, lambda c: float(c["width conv1"]), half)}
    assert (rows["width conv1", "6"].time, rows["width conv1", "6"].distance) == (2.0, -1.0)
    assert rows["block block1", "left out"].time == 0.0
