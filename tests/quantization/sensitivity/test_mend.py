# The accuracy debugger on networks whose fault is known, because it was put there.

import math

import pytest
import torch
from torch import nn

import compress
from compress.errors import QuantizationError
from compress.quantization.sensitivity.compare import sqnr
from tests.networks import Net, TinyResNet, with_statistics
from tests.onnx_ptq.test_improve import outliers, unequal

X = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAX = compress.ActivationSpec(calibrator="max")
CLIPPED = compress.ActivationSpec(calibrator="percentile", percentile=70)
PER_TENSOR = compress.QuantSpec(weights=compress.WeightSpec(axis=None), activations=MAX, smooth=None)


def logits(inner):
    return Net(lambda net, x: net.inner(x).mean((2, 3)), inner=inner)


def two_ranges():
    # A concat of a tensor and of another, which is 300 times as large.
    net = Net(
        lambda net, x: net.c(torch.cat([net.a(x), net.b(x)], 1)).mean((2, 3)),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3),
        c=nn.Conv2d(8, 4, 1),
    )
    with torch.no_grad():
        net.b.weight.mul_(300)
        net.c.weight[:, 4:].div_(300)
    return net


def flat():
    # A softmax over 256 positions with peaks near 1, so that all other probabilities are below half a step.
    def run(net, x):
        tokens = net.embed(x).flatten(2).transpose(1, 2)
        return net.last((torch.softmax(4 * tokens @ tokens.transpose(1, 2), -1) @ tokens)[:, 0])

    return Net(run, embed=nn.Conv2d(3, 8, 1), last=nn.Linear(8, 4))


def faulty(name):
    torch.manual_seed(0)
    return {"two ranges": two_ranges, "softmax tails": flat}[name]().eval()


@pytest.mark.parametrize(
    ("name", "model", "spec"),
    [
        ("channel ranges", logits(unequal()), PER_TENSOR),
        ("outlier channels", outliers(), compress.QuantSpec(activations=MAX, smooth=None)),
        ("two ranges", faulty("two ranges"), compress.QuantSpec(activations=MAX)),
        ("softmax tails", faulty("softmax tails"), compress.QuantSpec(activations=MAX)),
        (
            "saturation",
            with_statistics(TinyResNet()),
            compress.QuantSpec(activations=CLIPPED),
        ),
    ],
)
def test_the_cause_is_named(name, model, spec):
    found = compress.diagnose(model, X, [X], [X], spec=spec)
    assert name in {cause.kind for row in found.rows for cause in row.causes}
    qmodel = compress.quantize(model.eval(), X, [X], spec=spec)
    with torch.no_grad():
        assert found.quantized.sqnr_db == pytest.approx(sqnr(model(X), qmodel(X)), abs=0.01)
    assert math.isclose(sum(row.share for row in found.rows), 1, rel_tol=1e-6)
    assert [row.share for row in found.rows] == sorted((row.share for row in found.rows), reverse=True)


def test_the_first_tensor_that_diverges():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten()
    )
    bad = compress.Rule(match="2", weights=compress.WeightSpec(num_bits=2))
    found = compress.diagnose(model.eval(), X, [X], [X], spec=compress.QuantSpec(rules=(bad,), activations=MAX))
    assert found.first.tensor == "_2" and found.first.sqnr_db < 20 < found.first.before_db
    assert found.rows[0].layer == "2" and found.rows[0].share > 0.9
    assert compress.diagnose(model, X, [X], [X], spec=compress.QuantSpec(activations=MAX)).first is None


@pytest.mark.parametrize(
    ("model", "spec", "words"),
    [
        (logits(unequal()), PER_TENSOR, "equalize: true"),
        (outliers(), compress.QuantSpec(activations=MAX, smooth=None), "smooth: auto"),
        (with_statistics(TinyResNet()), compress.QuantSpec(activations=CLIPPED), "calibrator: mse"),
    ],
)
def test_one_change_of_the_whole_network_mends_it(model, spec, words):
    done = compress.mend(model, X, [X], [X], spec=spec, sqnr_db=30)
    assert done.met and len(done.changes) == 1 and done.changes[0].text.startswith(words)
    assert done.diagnosis.quantized.sqnr_db < 30 <= done.effect.sqnr_db
    assert_holds(model, done, 30)


def test_layers_are_changed_where_nothing_else_helps():
    model = with_statistics(TinyResNet()).eval()
    bad = compress.Rule(match="block*", weights=compress.WeightSpec(num_bits=2))
    done = compress.mend(model, X, [X], [X], spec=compress.QuantSpec(rules=(bad,), activations=MAX), sqnr_db=25)
    assert done.met and done.changes
    assert {change.layer for change in done.changes} <= {row.layer for row in done.diagnosis.rows}
    for change in done.changes:
        assert change.without.sqnr_db < 25, "each is needed"
    assert_holds(model, done, 25)


def assert_holds(model, done, least):
    qmodel = compress.quantize(model, X, [X], spec=done.spec)
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) == pytest.approx(done.effect.sqnr_db, abs=0.01)
        assert sqnr(model(X), qmodel(X)) >= least


def test_a_network_that_is_good_is_left_alone():
    model = with_statistics(TinyResNet()).eval()
    targets = model(X).argmax(1)
    done = compress.mend(model, X, [X], [(X, targets)], spec=compress.QuantSpec(activations=MAX), drop=100)
    assert done.met and not done.changes and done.spec == compress.QuantSpec(activations=MAX)
    assert done.diagnosis.float_score == 1.0


@pytest.mark.parametrize("goal", [{}, {"drop": 1, "sqnr_db": 20}])
def test_one_goal(goal):
    with pytest.raises(QuantizationError, match="one goal"):
        compress.mend(TinyResNet(), X, [X], [X], **goal)
