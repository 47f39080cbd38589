import ctypes
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

import compress
from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, quantize, sensitivity
from compress.errors import QuantizationError
from compress.quantization.placement.insert import float_graph
from compress.quantization.quantizer import quantizers
from compress.quantization.report import placement_of
from compress.quantization.sensitivity import (
    choose_formats,
    everywhere,
    front,
    layer_settings,
    mixed_spec,
    sqnr,
)
from tests.networks import Net, TinyResNet, network, unchanged, with_statistics
from tests.onnx_ptq.test_improve import outliers, unequal

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 10


def spec_of(target: str, *rules: Rule) -> QuantSpec:
    weights, activations = WeightSpec(num_bits=4), ActivationSpec(num_bits=6, calibrator="max")
    return QuantSpec(target=target, weights=weights, activations=activations, rules=rules)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_rows_are_what_recipes_with_those_rules_give(target):
    model = network()
    report = sensitivity(model, X[:2], [X], [(X[:5], Y[:5]), (X[5:], Y[5:])], spec=spec_of(target))
    names = [row.layer for row in report.rows]
    weighted = ["conv1", "block1.conv1", "block1.conv2", "block2.conv1", "block2.conv2", "block2.downsample.0", "fc"]
    assert [name for name in names if name in weighted] == weighted
    assert len(set(names)) == len(names)
    reference = model(X)
    for row in report.rows:
        for effect, rules in (
            (row.alone, (Rule(match="*", enable=False), Rule(match=row.layer))),
            (row.left_out, (Rule(match=row.layer, enable=False),)),
        ):
            logits = quantize(model, X[:2], [X], spec=spec_of(target, *rules))(X)
            assert effect.sqnr_db == pytest.approx(sqnr(reference, logits), abs=1e-3)
            assert effect.agreement == (logits.argmax(1) == reference.argmax(1)).float().mean()
            assert effect.score == (logits.argmax(1) == Y).float().mean()
    logits = quantize(model, X[:2], [X], spec=spec_of(target))(X)
    assert report.quantized.sqnr_db == pytest.approx(sqnr(reference, logits), abs=1e-3)
    assert report.float_score == (reference.argmax(1) == Y).float().mean()
    assert report.images == 8


def test_noise_of_layers_alone_adds_up_to_about_that_of_all():
    # The assumption that mixed precision rests on, where no layer shares a tensor with another.
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10)).eval()
    x = torch.randn(256, 64)
    spec = QuantSpec(activations=ActivationSpec(num_bits=6, calibrator="max"))
    report = sensitivity(model, x[:2], [x], [x], spec=spec)
    assert 0.5 < sum(row.alone.noise for row in report.rows) / report.quantized.noise < 2


def test_a_stopped_call_goes_on_and_layers_left_float_are_no_rows():
    model, spec = network(), spec_of("tensorrt", Rule(match="fc", enable=False))
    seen = {}
    whole = sensitivity(model, X[:2], [X], [X], spec=spec, keep=lambda row: seen.update({row.layer: row}))
    assert tuple(seen.values()) == whole.rows and "fc" not in seen
    half = dict(list(seen.items())[:3])
    measured = []
    again = sensitivity(model, X[:2], [X], [X], spec=spec, known=half, keep=measured.append)
    assert again == whole and measured == list(whole.rows[3:])
    assert whole.float_score is None and whole.rows[0].alone.score is None


def test_the_model_is_left_as_it_was():
    model = network().train()
    with unchanged(model):
        sensitivity(model, X[:2], [X], [X[:2]])
    assert model.training and not list(quantizers(model))


class Two(Net):
    def forward(self, x, facts):
        return self.head(self.image(x).mean((2, 3)).relu() + self.facts(facts))


@pytest.mark.parametrize("nested", [False, True])
def test_a_network_of_two_inputs(nested):
    layers = {"image": nn.Conv2d(3, 8, 3, 2), "facts": nn.Linear(6, 8), "head": nn.Linear(8, 10)}
    model, facts = Two(None, **layers).eval(), torch.randn(8, 6)
    batch = ((X, facts), Y) if nested else (X, facts, Y)
    report = sensitivity(model, (X[:2], facts[:2]), [batch], [batch])
    assert report.float_score == (model(X, facts).argmax(1) == Y).float().mean() and report.images == 8
    assert {row.layer for row in report.rows} >= {"image", "facts", "head"}


# Mixed precision against brute force over all assignments, and its recipe against the network that it makes.

FORMATS = ("float", "w8a8", "w4a8")
NUMBERS = st.integers(0, 10**6).map(lambda n: n / 1000)


def tables():
    row = st.fixed_dictionaries(dict.fromkeys(FORMATS, NUMBERS))
    table = st.dictionaries(st.sampled_from("abcde"), st.tuples(row, row), min_size=1, max_size=5)
    return table.map(lambda t: ({k: v[0] for k, v in t.items()}, {k: v[1] for k, v in t.items()}))


def every(noise, cost):
    for names in itertools.product(FORMATS, repeat=len(noise)):
        pairs = list(zip(noise, names, strict=True))
        yield sum(noise[k][f] for k, f in pairs), sum(cost[k][f] for k, f in pairs)


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


@settings(max_examples=30)
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
    with pytest.raises(QuantizationError, match="no images"):
        sensitivity(network(), X[:2], [X], [])


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
    # scipy's solver itself prints a line of its debugging in such a program.
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


# The accuracy debugger on networks whose fault is known, because it was put there.


IMAGES = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAX = compress.ActivationSpec(calibrator="max")
CLIPPED = compress.ActivationSpec(calibrator="percentile", percentile=70)
PER_TENSOR = compress.QuantSpec(weights=compress.WeightSpec(axis=None), activations=MAX, smooth=None)


def logits(inner):
    return Net(lambda net, x: net.inner(x).mean((2, 3)), inner=inner)


torch.manual_seed(0)  # of the networks below, which are made once


def two_ranges():
    # A concat of a tensor and of another, which is 300 times as large.
    net = Net(
        lambda net, x: net.c(torch.cat([net.a(x), net.b(x)], 1)).mean((2, 3)),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3),
        c=nn.Conv2d(8, 4, 1),
    )
    net.b.weight.data.mul_(300)
    net.c.weight.data[:, 4:].div_(300)
    return net


def flat():
    # A softmax over 256 positions with peaks near 1, so that all other probabilities are below half a step.
    def run(net, x):
        tokens = net.embed(x).flatten(2).transpose(1, 2)
        return net.last((torch.softmax(4 * tokens @ tokens.transpose(1, 2), -1) @ tokens)[:, 0])

    return Net(run, embed=nn.Conv2d(3, 8, 1), last=nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("name", "model", "spec"),
    [
        ("channel ranges", logits(unequal()), PER_TENSOR),
        ("outlier channels", outliers(), compress.QuantSpec(activations=MAX, smooth=None)),
        ("two ranges", two_ranges(), compress.QuantSpec(activations=MAX)),
        ("softmax tails", flat(), compress.QuantSpec(activations=MAX)),
        ("saturation", with_statistics(TinyResNet()), compress.QuantSpec(activations=CLIPPED)),
    ],
)
def test_the_cause_is_named(name, model, spec):
    found = compress.diagnose(model, IMAGES, [IMAGES], [IMAGES], spec=spec)
    assert name in {cause.kind for row in found.rows for cause in row.causes}
    qmodel = compress.quantize(model.eval(), IMAGES, [IMAGES], spec=spec)
    assert found.quantized.sqnr_db == pytest.approx(sqnr(model(IMAGES), qmodel(IMAGES)), abs=0.01)
    assert math.isclose(sum(row.share for row in found.rows), 1, rel_tol=1e-6)
    assert [row.share for row in found.rows] == sorted((row.share for row in found.rows), reverse=True)


def test_the_first_tensor_that_diverges():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten()
    )
    bad = compress.Rule(match="2", weights=compress.WeightSpec(num_bits=2))
    found = compress.diagnose(
        model.eval(), IMAGES, [IMAGES], [IMAGES], spec=compress.QuantSpec(rules=(bad,), activations=MAX)
    )
    assert found.first.tensor == "_2" and found.first.sqnr_db < 20 < found.first.before_db
    assert found.rows[0].layer == "2" and found.rows[0].share > 0.9
    assert compress.diagnose(model, IMAGES, [IMAGES], [IMAGES], spec=compress.QuantSpec(activations=MAX)).first is None


@pytest.mark.parametrize(
    ("model", "spec", "words"),
    [
        (logits(unequal()), PER_TENSOR, "equalize: true"),
        (outliers(), compress.QuantSpec(activations=MAX, smooth=None), "smooth: auto"),
        (with_statistics(TinyResNet()), compress.QuantSpec(activations=CLIPPED), "calibrator: mse"),
    ],
)
def test_one_change_of_the_whole_network_mends_it(model, spec, words):
    done = compress.mend(model, IMAGES, [IMAGES], [IMAGES], spec=spec, sqnr_db=30)
    assert done.met and len(done.changes) == 1 and done.changes[0].text.startswith(words)
    assert done.diagnosis.quantized.sqnr_db < 30 <= done.effect.sqnr_db
    assert_holds(model, done, 30)


def test_layers_are_changed_where_nothing_else_helps():
    model = with_statistics(TinyResNet()).eval()
    bad = compress.Rule(match="block*", weights=compress.WeightSpec(num_bits=2))
    done = compress.mend(
        model, IMAGES, [IMAGES], [IMAGES], spec=compress.QuantSpec(rules=(bad,), activations=MAX), sqnr_db=25
    )
    assert done.met and done.changes
    assert {change.layer for change in done.changes} <= {row.layer for row in done.diagnosis.rows}
    assert all(change.without.sqnr_db < 25 for change in done.changes), "each is needed"
    assert_holds(model, done, 25)


def assert_holds(model, done, least):
    qmodel = compress.quantize(model, IMAGES, [IMAGES], spec=done.spec)
    assert sqnr(model(IMAGES), qmodel(IMAGES)) == pytest.approx(done.effect.sqnr_db, abs=0.01)
    assert sqnr(model(IMAGES), qmodel(IMAGES)) >= least


def test_a_network_that_is_good_is_left_alone():
    model = with_statistics(TinyResNet()).eval()
    targets = model(IMAGES).argmax(1)
    done = compress.mend(
        model, IMAGES, [IMAGES], [(IMAGES, targets)], spec=compress.QuantSpec(activations=MAX), drop=100
    )
    assert done.met and not done.changes and done.spec == compress.QuantSpec(activations=MAX)
    assert done.diagnosis.float_score == 1.0


@pytest.mark.parametrize("goal", [{}, {"drop": 1, "sqnr_db": 20}])
def test_one_goal(goal):
    with pytest.raises(QuantizationError, match="one goal"):
        compress.mend(TinyResNet(), IMAGES, [IMAGES], [IMAGES], **goal)
