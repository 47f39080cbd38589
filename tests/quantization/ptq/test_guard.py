"""Methods beyond calibration are measured beside plain PTQ, and those that lose are taken back."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from compress import ActivationSpec, QuantSpec, WeightSpec, quantize
from compress.quantization.report import Comparison
from compress.quantization.sensitivity.compare import sqnr

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MAX = ActivationSpec(calibrator="max")


def clipped(scale=8.0):
    """Two convolutions that ReLU6 joins; with a large `scale` most activations exceed 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(scale)
    return model


def test_relu_in_the_place_of_relu6_is_measured():
    model, spec = clipped(), QuantSpec(relu6="relu", activations=MAX, insist=True)
    qmodel = quantize(model, X, (x for x in [X]), spec=spec)
    seen = qmodel.report.comparison
    assert seen.methods == ("relu6",) and seen.worse
    assert seen.sqnr_db == pytest.approx(sqnr(model(X), qmodel(X)), abs=0.01)
    simple = quantize(model, X, [X], spec=QuantSpec(activations=MAX))
    assert seen.plain_sqnr_db == pytest.approx(sqnr(model(X), simple(X)), abs=0.01)
    assert simple.report.comparison is None
    (note,) = [note for note in qmodel.report.notes() if "worse than plain PTQ" in note]
    assert note.startswith("with quantization.relu6 the outputs")


def test_what_makes_the_network_worse_is_taken_back():
    model = clipped()
    qmodel = quantize(model, X, (x for x in [X]), spec=QuantSpec(relu6="relu", activations=MAX))
    seen = qmodel.report.comparison
    assert seen.taken_back == ("relu6",) and seen.sqnr_db < seen.plain_sqnr_db
    simple = quantize(model, X, [X], spec=QuantSpec(activations=MAX))
    assert torch.equal(qmodel(X), simple(X))
    (note,) = [note for note in qmodel.report.notes() if "worse than plain PTQ" in note]
    assert "quantization.relu6 taken back (quantization.insist: true" in note


def test_what_helps_is_kept_beside_what_does_not():
    """ReLU6 clips here, so that ReLU ruins the network; bias correction restores what 3-bit weights shift."""
    model, weights = clipped(), WeightSpec(num_bits=3)
    spec = QuantSpec(relu6="relu", bias_correction="empirical", activations=MAX, weights=weights)
    qmodel = quantize(model, X, [X], spec=spec)
    assert qmodel.report.comparison.taken_back == ("relu6",)
    simple = quantize(model, X, [X], spec=QuantSpec(activations=MAX, weights=weights))
    assert sqnr(model(X), qmodel(X)) > sqnr(model(X), simple(X))
    assert qmodel.report.corrections and not qmodel.report.prepared.relu6


def test_a_gain_needs_no_note():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 2, 8)[:, None, None, None])
        model[2].weight.div_(torch.logspace(-2, 2, 8)[:, None, None])
    spec = QuantSpec(equalize=True, weights=WeightSpec(axis=None), activations=MAX)
    report = quantize(model, X, [X], spec=spec).report
    assert report.comparison.sqnr_db > report.comparison.plain_sqnr_db + 3
    assert not [note for note in report.notes() if "worse" in note]


def test_methods_that_end_at_zeros_are_worse_than_any_plain_ptq():
    """A network that returns zeros has 0 dB, more than one whose noise is larger than its signal."""
    seen = Comparison(methods=("bias_correction",), sqnr_db=0.1, plain_sqnr_db=-2.1)
    assert seen.worse
    assert not Comparison(methods=("bias_correction",), sqnr_db=2.0, plain_sqnr_db=-2.1).worse
    report = replace(quantize(clipped(), X, [X]).report, comparison=replace(seen, taken_back=seen.methods))
    assert "one that returns zeros, which has 0 dB; quantization.bias_correction taken back" in report.notes()[-1]


def few_places(scale=40.0):
    """A network whose activations are nearly all alike; entropy keeps what is common and clips the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = X.clamp(0.4, 0.6)
    x[:, :, :1, :1] *= scale
    return model, x


@pytest.mark.parametrize("options", [{}, {"bias_correction": "empirical"}])
def test_ranges_that_lose_to_the_default_ones_are_noted(options):
    model, x = few_places()
    spec = QuantSpec(activations=ActivationSpec(calibrator="percentile", percentile=90.0), **options)
    qmodel = quantize(model, x, (part for part in [x]), spec=spec)
    seen = qmodel.report.calibration.compared
    usual = quantize(model, x, [x], spec=QuantSpec())
    clipped = quantize(model, x, [x], spec=replace(spec, bias_correction=None))
    assert seen.methods == ("percentile",) and seen.worse
    assert seen.plain_sqnr_db == pytest.approx(sqnr(model(x), usual(x)), abs=0.01)
    assert seen.sqnr_db == pytest.approx(sqnr(model(x), clipped(x)), abs=0.01)
    assert any("calibrator percentile the outputs" in note and "worse than plain PTQ" in note
               for note in qmodel.report.notes())  # fmt: skip


@pytest.mark.parametrize("calibrator", ["max", "mse", "lsq"])
def test_ranges_that_clip_by_the_error_or_not_at_all_are_not_compared(calibrator):
    spec = QuantSpec(activations=ActivationSpec(calibrator=calibrator))
    assert quantize(clipped(), X, [X], spec=spec).report.calibration.compared is None


def test_ranges_that_are_as_good_need_no_note():
    spec = QuantSpec(activations=ActivationSpec(calibrator="percentile", percentile=100.0))
    report = quantize(clipped(), X, [X], spec=spec).report
    assert report.calibration.compared is not None
    assert not [note for note in report.notes() if "worse" in note]
