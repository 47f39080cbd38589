"""Training at few bits: target `any`, LSQ's first step size, first and last layers, weight normalization, damping."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, learn_scales
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.learned import bake_weights, freeze_scales, normalize_weights
from compress.quantization.quantizer import quantizers
from compress.training.passes import damping_loss
from tests.exact import open_session
from tests.networks import network, tiny

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def spec(bits=2, axis=0, **more):
    weights = WeightSpec(num_bits=bits, axis=axis, calibrator="lsq")
    return QuantSpec(
        target="any", weights=weights, activations=ActivationSpec(num_bits=bits, calibrator="lsq"),
        batchnorm="keep", first_last_bits=8, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("bits", "signed"), [(2, True), (2, False), (4, False), (8, True)])
def test_the_first_step_is_lsqs(bits, signed):
    x, high = torch.randn(5, 300).abs() if not signed else torch.randn(5, 300), 2 ** (bits - signed) - 1
    for axis in (None, 0):
        calibrator = make_calibrator("lsq", num_bits=bits, signed=signed, axis=axis)
        for part in x.split(100, dim=1):
            calibrator.collect(part)
        mean = x.abs().mean() if axis is None else x.abs().mean(1)
        largest = x.abs().max() if axis is None else x.abs().amax(1)
        expected = torch.minimum(2 * mean / math.sqrt(high), largest / high)
        torch.testing.assert_close(calibrator.compute_amax() / high, expected)


def test_products_alone_are_quantized_with_all_integers():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    found = {name: (q.format.num_bits, q.format.low, q.format.high) for name, q in quantizers(qmodel)}
    assert found["conv1.weight_quantizer"] == (8, -127, 127)
    assert found["fc.weight_quantizer"] == (8, -127, 127)
    assert found["block1.conv1.weight_quantizer"] == (2, -2, 1)
    inner = {f for name, f in found.items() if name.startswith("quantizers.")}
    assert (2, 0, 3) in inner and not any(low == 0 and bits not in (2, 8) for bits, low, _ in inner)
    adds = [row for row in qmodel.placement.decisions if row.rule == "add stays float"]
    assert adds


def test_a_rule_decides_before_first_and_last():
    rules = (Rule(match="fc", weights=WeightSpec(num_bits=5)),)
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec(rules=rules))
    assert qmodel.fc.weight_quantizer.format.num_bits == 5
    assert qmodel.conv1.weight_quantizer.format.num_bits == 8


@pytest.mark.parametrize("axis", [None, 0])
def test_the_file_computes_what_was_trained_also_where_batchnorm_changes_the_sign(axis, tmp_path):
    torch.manual_seed(0)
    model = tiny()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)  # half of them below zero
            nn.init.uniform_(module.running_var, 0.5, 2)
    qmodel = compress.quantize(model.eval(), X[:2], [X], spec=spec(axis=axis))
    learn_scales(qmodel)
    normalize_weights(qmodel)
    expected = qmodel(X).detach().numpy()
    path = compress.export_onnx(qmodel, X[:2], tmp_path / "m.onnx")
    session = open_session(path, optimize=False)
    got = np.concatenate([session.run(None, {session.get_inputs()[0].name: x.numpy()})[0] for x in X.split(2)])
    assert 10 * np.log10((expected**2).sum() / ((got - expected) ** 2).sum()) > 30


def test_normalized_weights_keep_mean_and_width_and_are_baked():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    before = qmodel.block1.conv1.weight.detach().clone()
    names = normalize_weights(qmodel)
    assert "conv1" not in names and "fc" not in names and "block1.conv1" in names
    with torch.no_grad():
        qmodel.block1.conv1.parametrizations.weight.original.mul_(3).add_(0.7)
    weight = qmodel.block1.conv1.weight
    torch.testing.assert_close(weight, before - before.mean(), rtol=1e-4, atol=1e-6)
    expected = qmodel(X)
    qmodel.block1.conv1.parametrizations.weight.original.grad = None
    again = copy.deepcopy(qmodel)
    bake_weights(again)
    assert torch.equal(again(X), expected)
    assert "block1.conv1.weight" in again.state_dict()


def test_damping_pulls_weights_to_their_integer():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    learn_scales(qmodel)
    loss = damping_loss(qmodel)
    expected = 0.0
    for layer in qmodel.modules():
        if hasattr(layer, "weight_quantizer"):
            q = layer.weight_quantizer
            s = q.scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
            n = (layer.weight / s).clamp(q.format.low, q.format.high)
            expected += (((n - n.round()) * s) ** 2).sum().item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(q.amax.grad is None for _, q in quantizers(qmodel))
    weight = qmodel.block1.conv1.weight
    assert bool((weight.grad != 0).any())
    with torch.no_grad():
        for layer in qmodel.modules():
            if hasattr(layer, "weight_quantizer"):
                layer.weight.sub_(0.25 * layer.weight.grad)
    assert damping_loss(qmodel).item() < 0.5 * loss.item()


def test_two_bits_learn():
    """Two classes of images, told apart by a trained network of 2 bits: the loss falls to a half and stays finite."""
    torch.manual_seed(0)
    model = network().eval()
    qmodel = compress.quantize(model, X[:2], [X], spec=spec())
    learn_scales(qmodel)
    normalize_weights(qmodel)
    y = (X.mean((1, 2, 3)) > 0).long()
    optimizer = torch.optim.SGD(qmodel.train().parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(qmodel(X), y) + 1e-3 * damping_loss(qmodel)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) / 3 < 0.5 * losses[0]
    freeze_scales(qmodel)
    bake_weights(qmodel)
    assert qmodel.eval()(X).isfinite().all()
