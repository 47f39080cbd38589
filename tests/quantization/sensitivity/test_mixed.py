"""Mixed precision against brute force over all assignments, and its recipe against the network that it makes."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from compress import QuantSpec, Rule, WeightSpec, quantize
from compress.errors import QuantizationError
from compress.quantization.placement.insert import float_graph
from compress.quantization.report import placement_of
from compress.quantization.sensitivity.mixed import choose_formats, everywhere, front, mixed_spec
from compress.quantization.sensitivity.sensitivity import layer_settings
from tests.networks import network

FORMATS = ("float", "w8a8", "w4a8")
NUMBERS = st.integers(0, 10**6).map(lambda n: n / 1000)


def tables():
    row = st.fixed_dictionaries(dict.fromkeys(FORMATS, NUMBERS))
    table = st.dictionaries(st.sampled_from("abcde"), st.tuples(row, row), min_size=1, max_size=5)
    return table.map(lambda t: ({k: v[0] for k, v in t.items()}, {k: v[1] for k, v in t.items()}))


def every(noise, cost):
    """(noise, cost) of all assignments."""
    for names in itertools.product(FORMATS, repeat=len(noise)):
        pairs = list(zip(noise, names, strict=True))
        yield sum(noise[k][f] for k, f in pairs), sum(cost[k][f] for k, f in pairs)


@settings(max_examples=60, deadline=None)
@given(tables(), st.floats(0, 1))
def test_no_assignment_within_the_budget_has_less_noise(both, share):
    noise, cost = both
    totals = sorted(c for _, c in every(noise, cost))
    budget = totals[int(share * (len(totals) - 1))]
    choice = choose_formats(noise, cost, budget=budget)
    assert choice.cost <= budget * (1 + 1e-6) + 1e-9
    best = min(n for n, c in every(noise, cost) if c <= budget)
    assert choice.noise <= best * (1 + 1e-6) + 1e-6
    assert choice.noise == pytest.approx(sum(noise[k][f] for k, f in choice.formats.items()))


@settings(max_examples=30, deadline=None)
@given(tables())
def test_front_runs_from_the_cheapest_to_the_quietest_and_is_not_beaten(both):
    noise, cost = both
    found = front(noise, cost, points=6)
    totals = list(every(noise, cost))
    assert found[0].cost == pytest.approx(min(c for _, c in totals), rel=1e-5, abs=1e-3)
    assert found[-1].noise == pytest.approx(min(n for n, _ in totals), rel=1e-5, abs=1e-3)
    for point in found:
        assert not [(n, c) for n, c in totals if n < point.noise * (1 - 1e-5) - 1e-3 and c <= point.cost]
    assert [p.noise for p in found] == sorted({p.noise for p in found}, reverse=True)


def test_noises_of_very_different_size_do_not_drown_each_other():
    noise = {f"l{i}": {"float": 0.0, "w8a8": 10.0 ** -(i + 1)} for i in range(8)}
    cost = {name: {"float": 2.0, "w8a8": 1.0} for name in noise}
    choice = choose_formats(noise, cost, budget=8 + 5)
    assert [name for name, chosen in choice.formats.items() if chosen == "float"] == ["l0", "l1", "l2", "l3", "l4"]
    assert choose_formats(noise, cost, noise_limit=choice.noise * 1.0001).cost == 13


@pytest.mark.parametrize(
    ("limits", "words"),
    [({}, "one of"), ({"budget": 1, "noise_limit": 1}, "one of"), ({"budget": 0.5}, "least that formats allow is 1")],
)
def test_refusals(limits, words):
    with pytest.raises(QuantizationError, match=words):
        choose_formats({"a": {"float": 0, "w8a8": 1}}, {"a": {"float": 2, "w8a8": 1}}, **limits)
    with pytest.raises(QuantizationError, match="b"):
        choose_formats({"a": {"float": 0}, "b": {"w8a8": 1}}, {"a": {"float": 1}, "b": {"float": 1}}, budget=9)


def test_the_recipe_gives_each_layer_its_format():
    model, x = network(), torch.randn(4, 3, 16, 16)
    spec = QuantSpec(weights=WeightSpec(axis=None), rules=(Rule(match="block2.*", weights=WeightSpec(num_bits=6)),))
    graph, _ = float_graph(model, x, spec)
    four = everywhere(spec, "weights", num_bits=4)
    choice = {"conv1": "float", "block1.conv1": "w8a8", "block1.conv2": "w4a8", "block2.conv1": "w4a8", "fc": "w8a8"}
    mixed = mixed_spec(
        spec, choice, {"w8a8": layer_settings(graph, spec), "w4a8": layer_settings(graph, four)}, base="w8a8"
    )
    sites = {site.path: site.format for site in placement_of(quantize(model, x, [x], spec=mixed)).weights}
    assert "conv1" not in sites
    bits = {path: quant_format.num_bits for path, quant_format in sites.items()}
    assert bits["block1.conv1"] == 8 and bits["block1.conv2"] == 4 and bits["block2.conv1"] == 4
    assert bits["block2.conv2"] == 6 and bits["fc"] == 8
    assert sites["block1.conv2"].axis is None and sites["block2.conv1"].axis == 0


def test_a_large_choice_is_that_of_an_integer_program_and_prints_nothing(capfd):
    """scipy's solver itself prints a line of its debugging in such a program."""
    draw = np.random.default_rng(32)
    noises = np.sort(10.0 ** draw.uniform(-4, 0, (40, 3)))
    costs = np.sort(draw.uniform(0, 1, (40, 3)))[:, ::-1]
    noise, cost = ({str(i): dict(zip("abc", row, strict=True)) for i, row in enumerate(t)} for t in (noises, costs))
    budget = float(costs.min(1).sum() + costs.max(1).sum()) / 2
    choice = choose_formats(noise, cost, budget=budget)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
    limits = [
        LinearConstraint(np.kron(np.eye(40), np.ones(3)), 1, 1),
        LinearConstraint(costs.reshape(1, -1), -np.inf, budget),
    ]
    best = milp(noises.ravel(), constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0.0})
    assert choice.cost <= budget and choice.noise == pytest.approx(best.fun, rel=1e-6)
