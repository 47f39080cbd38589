"""Points that no other beats, the choice among them, and requests that are refused before any work."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress import SearchSpec
from compress.errors import EngineError, SearchError
from compress.recipe.tree import parse_recipe
from compress.search.front import Point, choose, pareto
from compress.search.lab import Figures
from compress.search.search import check_request
from compress.search.space import make_space
from compress.search.structure import analyse
from tests.networks import network


def point(ratio, distance, agreement=1.0):
    figures = Figures(ms=ratio, ratio=ratio, distance=distance, agreement=agreement)
    return Point(
        label=f"{ratio} {distance}", configuration={}, figures=figures, predicted_ratio=0, predicted_distance=0
    )


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


@pytest.mark.parametrize("latency", [0.0, -0.5, 1.0, math.nan, math.inf])
def test_latencies_that_are_no_share_are_refused(latency):
    with pytest.raises(SearchError, match="above 0 and below 1"):
        check_request("openvino", latency=latency)


@pytest.mark.parametrize("drop", [-1.0, math.nan, math.inf])
def test_drops_below_zero_are_refused(drop):
    with pytest.raises(SearchError, match="0 or more"):
        check_request("openvino", max_drop=drop)


def test_other_requests_that_cannot_be_followed():
    with pytest.raises(SearchError, match="give one of them"):
        check_request("openvino", latency=0.5, max_drop=1.0)
    with pytest.raises(EngineError, match="unknown engine 'openvnio', did you mean 'openvino'"):
        check_request("openvnio", latency=0.5)
    with pytest.raises(EngineError, match="unknown engine 'torch'"):
        check_request("torch", latency=0.5)
    with pytest.raises(SearchError, match=r"search\.widths"):
        check_request("openvino", latency=0.5, spec=SearchSpec(widths=(0.5, 0.5)))
    with pytest.raises(SearchError, match=r"search\.trials is 0"):
        check_request("openvino", latency=0.5, spec=SearchSpec(trials=0))
    if not torch.cuda.is_available():
        with pytest.raises(compress.CompressError, match="cuda is not available here"):
            check_request("cuda", latency=0.5)


def test_an_empty_space_is_refused():
    spec = SearchSpec(widths=(), formats=("float",), blocks=False)
    with pytest.raises(SearchError, match="the space is empty"):
        make_space(analyse(network(), torch.randn(2, 3, 16, 16)), spec, "openvino")


def test_each_part_can_be_switched_off():
    structure = analyse(network(), torch.randn(2, 3, 16, 16))

    def kinds(**keys):
        elements = make_space(structure, SearchSpec(**keys), "openvino").elements
        return {element.split()[0] for element, choices in elements.items() if len(choices) > 1}

    assert kinds(sparsity=True) == {"width", "format", "sparse", "block"}
    assert kinds() == {"width", "format", "block"}
    assert kinds(widths=()) == {"format", "block"}
    assert kinds(formats=("int8",), blocks=False) == {"width"}


def test_pictures_that_are_nan_or_too_few_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4))
    for pictures, words in ((torch.full((16, 3, 5, 5), math.nan), "NaN"), (torch.zeros(3, 3, 5, 5), "3 pictures")):
        with pytest.raises(SearchError, match=words):
            compress.search(model, torch.zeros(2, 3, 5, 5), [pictures])


def test_the_section_of_a_recipe():
    recipe = parse_recipe({"search": {"widths": [0.5], "formats": ["int8"], "trials": 5}}, source="here")
    assert (recipe.search.widths, recipe.search.formats, recipe.search.trials) == ((0.5,), ("int8",), 5)
    assert dataclasses.asdict(recipe.search)["blocks"]
    with pytest.raises(compress.CompressError, match=r"search\.widths"):
        parse_recipe({"search": {"widths": [1.5]}}, source="here")
