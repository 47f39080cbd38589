"""Bias correction: closed-form moments against samples, and a mean output error that becomes zero."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import nn

from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, insert_quantizers, quantize
from compress.errors import QuantizationError
from compress.quantization.ptq.bias_correction import expected_shift
from compress.quantization.ptq.moments import clipped_normal
from compress.quantization.sensitivity.compare import sqnr
from tests.networks import network

W3 = WeightSpec(num_bits=3, axis=None)
FINE = ActivationSpec(calibrator="max")


@settings(max_examples=25, deadline=None)
@given(st.floats(-4, 8), st.floats(0.05, 4), st.sampled_from([6.0, np.inf]))
def test_moments_of_a_clipped_normal_are_those_that_integration_finds(mean, deviation, high):
    density = stats.norm(mean, deviation)
    top = min(high, mean + 12 * deviation)
    tail = density.sf(high) if np.isfinite(high) else 0.0
    found = []
    for power in (1, 2):
        area = integrate.quad(lambda x, p=power: x**p * density.pdf(x), 0, max(top, 0), points=[max(mean, 0)])[0]
        found.append(area + (high**power * tail if tail else 0.0))
    got_mean, got_deviation = clipped_normal(torch.tensor([mean]), torch.tensor([deviation]), float(high))
    assert got_mean.item() == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert got_deviation.item() ** 2 == pytest.approx(found[1] - found[0] ** 2, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 4, 3, bias=False),
        nn.Conv2d(6, 6, 3, groups=6, bias=False),
        nn.Conv2d(6, 9, 1, groups=3, bias=False),
        nn.Linear(6, 5, bias=False),
        nn.ConvTranspose2d(6, 9, 2, stride=2, groups=3, bias=False),
    ],
    ids=lambda layer: type(layer).__name__ + str(getattr(layer, "groups", "")),
)
def test_expected_shift_is_the_layers_output_for_constant_inputs(layer):
    mean = torch.randn(6, generator=torch.Generator().manual_seed(1))
    linear = isinstance(layer, nn.Linear)
    x = mean[None] if linear else mean.view(1, 6, 1, 1).expand(1, 6, 8, 8)
    with torch.no_grad():
        y = layer(x)
        expected = y[0] if linear else y.mean((0, 2, 3))
        torch.testing.assert_close(expected_shift(layer, layer.weight, mean), expected)


def gaussian_pair(relu):
    """A convolution whose outputs have the BatchNorm's normal distribution, and a 1x1 convolution after it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU() if relu else nn.Identity(), nn.Conv2d(8, 6, 1)
    )
    nn.init.normal_(model[1].weight, 1.0, 0.3)
    nn.init.normal_(model[1].bias, 0.5, 0.5)
    x = torch.randn(64, 16, 16, 16)
    with torch.no_grad():
        y = model[0](x)
        model[1].running_mean.copy_(y.mean((0, 2, 3)))
        model[1].running_var.copy_(y.var((0, 2, 3)))
    return model.eval(), x


@pytest.mark.parametrize("relu", [False, True])
def test_analytic_correction_removes_the_mean_error_of_normal_inputs(relu):
    model, x = gaussian_pair(relu)
    error = {}
    for way in (None, "analytic"):
        spec = QuantSpec(weights=W3, activations=FINE, bias_correction=way, rules=(Rule(match="0", enable=False),))
        quantized = quantize(model, x[:2], [x], spec=spec)
        with torch.no_grad():
            error[way] = (quantized(x) - model(x)).mean((0, 2, 3)).abs().max().item()
    assert error["analytic"] < 0.02 * model(x).std() and error["analytic"] < error[None] / 5


def test_empirical_correction_gives_every_channel_its_float_mean():
    model, x = network(), torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = {}
    for way in (None, "empirical"):
        quantized = quantize(model, x[:2], [x], spec=QuantSpec(weights=W3, activations=FINE, bias_correction=way))
        with torch.no_grad():
            seen[way] = (quantized(x) - model(x)).mean(0).abs().max().item(), sqnr(model(x), quantized(x))
    assert seen["empirical"][0] < 1e-5  # the last layer is a linear one: its outputs are the model's
    assert seen["empirical"][1] > seen[None][1]
    rows = quantized.report.corrections
    assert len(rows) == 7 and all(row.shift > 0 and not row.reason for row in rows)


def test_layers_without_bias_get_one_and_load_back():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False)), torch.randn(8, 3, 4, 4)
    spec = QuantSpec(weights=W3, activations=FINE, bias_correction="empirical")
    quantized = quantize(model, x[:2], [x], spec=spec)
    again = insert_quantizers(model, x[:2], spec)
    again.load_state_dict(quantized.state_dict())
    torch.testing.assert_close(again(x), quantized(x))
    assert model[0].bias is None and quantized.get_submodule("0").bias.abs().max() > 0


def test_analytic_needs_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(4, 3, 4, 4)
    with pytest.raises(QuantizationError, match="empirical"):
        quantize(model, x[:2], [x], spec=QuantSpec(activations=FINE, bias_correction="analytic"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bias_correction", "guess", "analytic, empirical"),
        ("relu6", "clip", "one of: keep, relu"),
        ("smooth", -1.0, "0 to 1"),
    ],
)
def test_bad_values_are_refused(key, value, words):
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(QuantizationError, match=words):
        quantize(network(), x, [x], spec=QuantSpec(**{key: value}))


@pytest.mark.parametrize("asked", [{"equalize": True}, {"bias_correction": "empirical"}])
def test_kept_batchnorm_does_not_go_with_it(asked):
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(QuantizationError, match="batchnorm: fold"):
        quantize(network(), x, [x], spec=QuantSpec(batchnorm="keep", **asked))
