# The latency model and the start of a search, against known coefficients and brute force.

import dataclasses
import itertools
import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compress
from compress.errors import SearchError
from compress.recipe.tree import parse_recipe
from compress.search import models
from compress.search.lab import Figures, build, with_formats
from compress.search.models import Sample, Timed, check, fit, rank_interval, rate_choices
from compress.search.network import distance
from compress.search.search import (
    NEAR,
    Attempt,
    Bound,
    Outcome,
    Point,
    _lab,
    after,
    best,
    check_request,
    choose,
    corrected,
    go_on,
    open_study,
    order,
    pareto,
    results,
)
from compress.search.space import Costs, Space, analyse, best_within, key_of, make_space, otherwise, uniform
from compress.support.progress import NoProgress
from compress.tasks.classification import classification
from tests.networks import network
from tests.search.worker import SPACE, figures

STRUCTURE = analyse(network(), torch.randn(2, 3, 16, 16))
NETWORKS = make_space(STRUCTURE, compress.SearchSpec(multiple=2), "openvino")
COSTS = Costs(STRUCTURE)


def known_time(costs):
    # Constants of an invented engine: INT8 has half the time for a mac, and each layer has a call.
    speed = {"float": 2e-6, "int8": 1e-6}
    return 0.01 + sum(0.002 + speed[c.format] * c.macs + 5e-7 * (c.read + c.written) for c in costs)


def networks(count, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]  # noqa: E731
    return [{e: draw(c) for e, c in NETWORKS.elements.items()} for _ in range(count)]


def test_costs_are_those_of_the_smaller_network():
    # conv1 takes 3 channels, 16 by 16 pixels, 3 by 3 weights; block1.conv1 8 by 8 pixels after the pool.
    rows = {c.path: c for c in COSTS.of({"width conv1": "4", "width block1.conv1": "6", "format block1": "int8"})}
    assert (rows["conv1"].macs, rows["conv1"].written) == (256 * 4 * 3 * 9, 256 * 4)
    assert (rows["block1.conv1"].macs, rows["block1.conv1"].format) == (64 * 6 * 4 * 9, "int8")
    assert rows["block1.conv2"].weights == 6 * 4 * 9
    assert "block1.conv1" not in {c.path for c in COSTS.of({"block block1": "left out"})}


def test_a_latency_model_finds_the_time_of_networks_it_has_not_seen():
    model = fit([Sample(costs=COSTS.of(c), time=known_time(COSTS.of(c))) for c in networks(24, 0)])
    unseen = [COSTS.of(c) for c in networks(12, 1)]
    seen = check(map(model.predict, unseen), map(known_time, unseen))
    assert seen.median_error < 0.05 and seen.spearman > 0.95


@pytest.mark.parametrize(("width", "block", "computed"), [("6", 4, "8"), ("4", 4, "4"), ("2", 8, "8"), ("6", 1, "6")])
def test_channels_that_fill_no_block_cost_as_much_as_the_block(width, block, computed):
    numbers = attrgetter("macs", "read", "written", "weights")
    small = {c.path: c.padded(block) for c in COSTS.of({"width block1.conv1": width})}
    for cost in COSTS.of({"width block1.conv1": computed}):
        if cost.path.startswith("block1"):
            assert numbers(small[cost.path]) == pytest.approx(numbers(cost))


def test_a_model_knows_that_widths_in_between_win_no_time():
    # An engine that computes four channels at a time.
    time = lambda chosen: known_time([c.padded(4) for c in COSTS.of(chosen)])  # noqa: E731
    model = fit([Sample(costs=COSTS.of(c), time=time(c)) for c in networks(24, 0)], block=4)
    predict = lambda width: model.predict(COSTS.of({"width block1.conv1": width}))  # noqa: E731
    assert predict("6") == pytest.approx(predict("8"), rel=0.01)
    assert predict("4") < 0.99 * predict("8")


def timed_of(samples):
    return Timed(model=fit(list(samples.values())), check=check([], []), samples=samples, cached=0)


def test_a_candidate_is_predicted_without_its_own_time():
    chosen = networks(12, 0)
    samples = {str(i): Sample(costs=COSTS.of(c), time=known_time(COSTS.of(c))) for i, c in enumerate(chosen)}
    samples["0"] = replace(samples["0"], time=10 * samples["0"].time)
    timed = timed_of(samples)
    costs = COSTS.of(chosen[0])
    assert timed.without(costs).predict(costs) < 2 * known_time(costs) < timed.model.predict(costs)
    assert timed.without(COSTS.of(networks(1, 5)[0])) is timed.model


def test_the_interval_of_a_rank_correlation():
    # That of no correlation is tanh(1.96 / sqrt(n - 3)); few pairs say little, even in perfect order.
    assert rank_interval(0.0, 28) == pytest.approx((-math.tanh(1.96 / 5), math.tanh(1.96 / 5)))
    low, high = check(range(1, 7), range(1, 7)).interval
    assert low < 0.5 and high == 1.0
    assert math.isnan(check([1, 2, 3], [1, 2, 3]).interval[0])


def test_the_block_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_times", lambda engine: {64: 1.0, 72: 1.4, 80: 1.42, 96: 1.9})
    assert models.channel_block("openvino", version="1", cache=tmp_path) == 16
    monkeypatch.setattr(models, "_times", lambda engine: pytest.fail("measured again"))
    assert models.channel_block("openvino", version="1", cache=tmp_path) == 16
    assert models.channel_block("tensorrt", version="1", cache=tmp_path) == 16
    (file,) = tmp_path.iterdir()
    file.write_text("[]")
    monkeypatch.setattr(models, "_times", lambda engine: dict.fromkeys((64, 72, 80, 96), 1.0))
    assert models.channel_block("openvino", version="1", cache=tmp_path) == 8


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_the_error_of_a_format_in_a_block_is_that_of_a_network_quantized_there_alone(engine):
    pictures = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    lab = _lab(
        network(), pictures[:2], [pictures], engine=engine, spec=compress.SearchSpec(), quantization=None, block=2
    )
    model = rate_choices(lab, progress=NoProgress())
    lab = replace(lab, quantization=replace(lab.quantization, bias_correction=None))
    plain = [torch.cat([lab.structure.graph(images) for images in lab.held]).detach()]
    for element in ("format conv1", "format block1"):
        alone = with_formats(lab, build(lab, {element: "int8"}, steps=0), {element: "int8"}, quick=True)
        got = [torch.cat([alone(images) for images in lab.held]).detach()]
        assert model[element] == {"int8": pytest.approx(distance(got, plain), rel=1e-3), "float": 0.0}


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
@settings(max_examples=25)
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
    # The work of a layer is a product of two widths, so that times do not add up.
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


# A bound of latency is kept although the model takes networks for faster than they are.

ERRORS = {e: {c: float((4 - int(c)) ** 2) for c in choices} for e, choices in SPACE.elements.items()}


@pytest.mark.parametrize("latency", [0.9, 0.6, 0.45])
def test_networks_become_smaller_until_one_keeps_the_bound(tmp_path, latency):
    # Every network takes 1.4 times as long as its prediction; the smallest takes 0.35.
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=4)

    def slower(configuration):
        return replace(figures(configuration), ratio=1.4 * figures(configuration).ratio)

    def best(budget):
        return best_within(SPACE, ERRORS, lambda c: figures(c).ratio, budget)

    smallest = dict.fromkeys(SPACE.elements, "1")
    go_on(study, SPACE, best, smallest, slower, latency=latency, progress=NoProgress())
    found = [measured for _, _, measured in results(study)]
    assert min(f.ratio for f in found) <= latency
    assert min(f.distance for f in found if f.ratio <= latency) < slower(smallest).distance or latency < 0.46


def test_the_fastest_network_is_tried_where_the_model_finds_none(tmp_path):
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=4)
    smallest = dict.fromkeys(SPACE.elements, "1")
    go_on(study, SPACE, lambda budget: None, smallest, figures, latency=0.1, progress=NoProgress())
    assert [configuration for _, configuration, _ in results(study)] == [smallest]


def test_a_model_is_corrected_until_a_network_that_it_asks_for_keeps_the_bound():
    # The smaller a network is, the more it takes beyond what the model expects, which saw nothing but large ones.
    whole = known_time(COSTS.of({}))

    def time(configuration):
        share = known_time(COSTS.of(configuration)) / whole
        return 0.5 + 0.5 * share**2

    def sample(configuration):
        return Sample(costs=COSTS.of(configuration), time=time(configuration))

    def wanted(timed):
        predict = lambda c: timed.model.predict(COSTS.of(c))  # noqa: E731
        errors = {e: {c: float(i) for i, c in enumerate(choices)} for e, choices in NETWORKS.elements.items()}
        found = [best_within(NETWORKS, errors, predict, share * 0.65) for share in NEAR]
        return [c for c in found if c is not None]

    before = timed_of({key_of(c): sample(c) for c in ({}, *networks(30, 3)) if time(c) > 0.75})
    assert min(time(c) for c in wanted(before)) > 0.65
    after = corrected(
        before, wanted, lambda timed, some: timed_of({**timed.samples, **{key_of(c): sample(c) for c in some}}), 0.65
    )
    assert min(s.time for s in after.samples.values()) <= 0.65


# Points that no other beats, the choice among them, and requests that are refused before any work.


def point(ratio, distance, agreement=1.0, label=""):
    figures = Figures(ms=1.0, ratio=ratio, distance=distance, agreement=agreement)
    predicted = {"predicted_ratio": ratio, "predicted_distance": distance}
    return Point(label=label, configuration={"a": label}, figures=figures, **predicted)


NUMBERS = st.floats(0.01, 2.0)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12))
def test_no_point_of_the_front_is_slower_than_a_better_one(pairs):
    points = [point(*pair) for pair in pairs]
    found = {(p.figures.ratio, p.figures.distance) for p in pareto(points)}
    beaten = {(r, d) for r, d in pairs for x, y in pairs if x <= r and y <= d and (x, y) != (r, d)}
    assert found == set(pairs) - beaten


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.floats(0, 1)), min_size=1, max_size=8), NUMBERS)
def test_the_chosen_point_keeps_the_bound_or_there_is_none(rows, bound):
    points = [point(*row) for row in rows]
    within = [d for r, d, _ in rows if r <= bound]
    if within:
        assert choose(points, latency=bound).figures.distance == min(within)
    else:
        with pytest.raises(SearchError, match=f"the fastest network found.* takes {min(r for r, _, _ in rows):.3f}"):
            choose(points, latency=bound)


def test_a_drop_that_nothing_keeps_names_the_best():
    points = [point(0.5, 0.2, 0.9), point(0.7, 0.1, 0.97)]
    assert choose(points, max_drop=3.0) is points[1]
    assert choose(points, max_drop=10.0) is points[0]
    with pytest.raises(SearchError, match="loses 3.00 points at 0.700"):
        choose(points, max_drop=1.0)


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        *(("openvino", {"latency": value}, "above 0 and below 1") for value in (0.0, -0.5, 1.0, math.nan, math.inf)),
        *(("openvino", {"latency": None, "max_drop": drop}, "0 or more") for drop in (-1.0, math.nan, math.inf)),
        ("openvino", {"max_drop": 1.0}, "give one of them"),
        ("openvnio", {}, "unknown engine 'openvnio', did you mean 'openvino'"),
        ("torch", {}, "unknown engine 'torch'"),
        ("openvino", {"spec": compress.SearchSpec(widths=(0.5, 0.5))}, r"search\.widths"),
        ("openvino", {"spec": compress.SearchSpec(trials=0)}, r"search\.trials is 0"),
        *([] if torch.cuda.is_available() else [("cuda", {}, "cuda is not available here")]),
    ],
)
def test_requests_that_cannot_be_followed(engine, options, message):
    with pytest.raises(compress.CompressError, match=message):
        check_request(engine, **{"latency": 0.5, **options})


def test_each_part_can_be_switched_off_but_not_all():
    def kinds(**keys):
        elements = make_space(STRUCTURE, compress.SearchSpec(**keys), "openvino").elements
        return {element.split()[0] for element, choices in elements.items() if len(choices) > 1}

    assert kinds(sparsity=True) == {"width", "format", "sparse", "block"}
    assert kinds() == {"width", "format", "block"}
    assert kinds(widths=()) == {"format", "block"}
    assert kinds(formats=("int8",), blocks=False) == {"width"}
    with pytest.raises(SearchError, match="the space is empty"):
        kinds(widths=(), formats=("float",), blocks=False)


def test_pictures_that_are_nan_or_too_few_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4))
    for pictures, words in ((torch.full((16, 3, 5, 5), math.nan), "NaN"), (torch.zeros(3, 3, 5, 5), "3 images")):
        with pytest.raises(SearchError, match=words):
            compress.search(model, torch.zeros(2, 3, 5, 5), [pictures])


def test_the_section_of_a_recipe():
    recipe = parse_recipe({"search": {"widths": [0.5], "formats": ["int8"], "trials": 5}}, source="here")
    assert (recipe.search.widths, recipe.search.formats, recipe.search.trials) == ((0.5,), ("int8",), 5)
    assert dataclasses.asdict(recipe.search)["blocks"]
    with pytest.raises(compress.CompressError, match=r"search\.widths"):
        parse_recipe({"search": {"widths": [1.5]}}, source="here")


# Which points are fine-tuned, which of them is taken, and the advice at the end of a search.


def outcome(ratio):
    made = Attempt(
        label="start 1", folder="network-1", variant="ptq", file="f", ms=1.0, ratio=ratio, score=0.9, drop=0.5
    )
    return Outcome(
        bound=Bound(max_drop=1.0),
        front=SimpleNamespace(points=(point(ratio, 0.1, label="start 1"),)),
        metric=classification(10).metric,
        scores={},
        attempts=(made,),
        chosen=made,
        images=10,
        folder=Path("run"),
    )


@pytest.mark.parametrize(
    ("ratio", "begin"), [(0.5, "Take network-1 (start 1; ptq): 90.00 %"), (1.23, "Keep the float network: ")]
)
def test_a_network_that_is_no_faster_is_not_advised(ratio, begin):
    advice = outcome(ratio).advice
    assert advice.startswith(begin) and f"{ratio:.2f} of" in advice


@pytest.mark.parametrize("ratio", [0.45, 1.23])
def test_no_factor_is_advised_of_a_busy_machine(ratio):
    quiet = outcome(ratio)
    busy = replace(quiet.attempts[0], unquiet="the machine was busy (its hypervisor kept 9% of the time)")
    advice = replace(quiet, attempts=(busy,), chosen=busy).advice
    assert "not measured: the machine was busy" in advice and f"{ratio:.2f}" not in advice
    for one in (busy, replace(point(ratio, 0.1, None, "a").figures, unquiet=busy.unquiet)):
        assert one.ratio_text() == "not measured: the machine was busy"
    assert quiet.attempts[0].ratio_text() == point(ratio, 0.1, None, "a").figures.ratio_text() == f"{ratio:.3f}"


POINTS = (
    point(0.38, 0.39, None, "start 1 (0.40)"),
    point(0.33, 0.43, None, "start 2 (0.37)"),
    point(0.27, 0.468, None, "width 0.5, float"),
    point(0.25, 0.470, None, "width 0.5, int8"),
    point(0.24, 0.46, None, "trial 9"),
    point(0.45, 0.30, None, "width 0.75, int8"),
)
FRONT = SimpleNamespace(points=POINTS, front=pareto(POINTS), failed={})


def fine_tuned(bound, results):
    # Go on as the command does, with (ratio, drop) of each network in the place of a training.
    waiting, made = order(FRONT, bound), []
    while waiting:
        now = waiting.pop(0)
        ratio, drop = results[now.label]
        made.append(
            Attempt(label=now.label, folder="f", variant="ptq", file="f", ms=1, ratio=ratio, score=1 - drop, drop=drop)
        )
        waiting = after(waiting, now, made[-1], bound)
    return [one.label for one in made], best(made, bound)


def test_the_best_uniform_choice_is_fine_tuned_beside_the_best_point_and_accuracy_decides():
    # Their errors before fine-tuning are 0.39 and 0.47, of two uniform ones that are as good the faster one's.
    bound, results = Bound(latency=0.4), {"start 1 (0.40)": (0.38, 0.22), "width 0.5, int8": (0.25, 0.0)}
    tried, taken = fine_tuned(bound, results)
    assert (tried, taken.label) == (["start 1 (0.40)", "width 0.5, int8"], "width 0.5, int8")
    assert fine_tuned(bound, {**results, "width 0.5, int8": (0.25, 0.3)})[1].label == "start 1 (0.40)"


def test_a_point_that_misses_the_latency_is_followed_by_a_faster_one():
    results = {p.label: (p.figures.ratio * 1.1, 0.1) for p in POINTS}
    tried, taken = fine_tuned(Bound(latency=0.4), results)
    assert tried == ["start 1 (0.40)", "start 2 (0.37)", "width 0.5, int8"]
    assert taken.label == tried[-1]  # as accurate, and faster


def test_by_drop_the_fastest_that_keeps_it_is_looked_for():
    results = {p.label: (p.figures.ratio, 2 * p.figures.distance) for p in POINTS}
    tried, taken = fine_tuned(Bound(max_drop=0.9), results)
    assert taken.label == "start 2 (0.37)" and len(tried) <= 4


def test_a_loss_of_another_unit_is_told_in_it():
    made = outcome(0.5)
    metric = replace(made.metric, name="rmse", unit="m", direction="lower")
    told = replace(made, metric=metric, chosen=replace(made.chosen, score=0.0123, drop=0.0021)).advice
    assert "0.01230 m rmse at 0.50 of the float network's latency, 0.002100 m above it" in told
    assert Bound(max_drop=0.005, unit="m").words == "at most 0.005 m lost"


def test_the_advice_names_what_else_was_fine_tuned():
    made = outcome(0.5)
    other = replace(made.attempts[0], label="width 0.5", ratio=0.4, score=0.8, drop=0.9)
    advice = replace(made, attempts=(made.chosen, other)).advice
    assert "fine-tuned as well, width 0.5 has 80.00 % at 0.40." in advice
