"""A torch model and the ONNX file of the same model get the same quantizers."""

from __future__ import annotations

import pytest
import torch

import compress
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.numerics import scale_from_amax
from compress.quantization.spec import TARGETS, ActivationSpec, QuantSpec
from tests.networks import TinyResNet, with_statistics
from tests.onnx_ptq.files import Attention, Gated, Shuffled, batches, export

NETWORKS = {"resnet": TinyResNet, "gated": Gated, "attention": Attention, "shuffled": Shuffled}


def made(name):
    torch.manual_seed(0)
    return with_statistics(NETWORKS[name]())


def quantizers(placement, amax):
    """Formats and scales: of activations sorted by scale, since names differ, of weights in the order of the layers."""
    activations = sorted(
        (str(site.format), float(scale_from_amax(amax[site.name], site.format))) for site in placement.activations
    )
    weights = [
        (site.format, scale_from_amax(amax[f"{site.path}.weight_quantizer"], site.format)) for site in placement.weights
    ]
    return activations, weights


def assert_same(qmodel, result):
    (ours, our_weights), (theirs, their_weights) = (
        quantizers(one.placement, report.amax)
        for one, report in ((qmodel, qmodel.report.calibration), (result, result.calibration))
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    torch.testing.assert_close(
        torch.tensor([s for _, s in theirs]), torch.tensor([s for _, s in ours]), rtol=1e-6, atol=1e-6
    )
    assert [f for f, _ in our_weights] == [f for f, _ in their_weights]
    for (_, a), (_, b) in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_quantizers_of_a_file_are_those_of_its_model(tmp_path, name, target):
    model, data = made(name), batches()
    file = export(model, tmp_path / "float.onnx", folded=name != "resnet")
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"))
    result = quantize_onnx_file(file, data, spec=spec)
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


@pytest.mark.parametrize("name", NETWORKS)
def test_ranges_of_the_default_calibrator_are_the_same(tmp_path, name):
    model, data = made(name), batches()
    file = export(model, tmp_path / "float.onnx", folded=name != "resnet")
    assert_same(compress.quantize(model, data[0], data), quantize_onnx_file(file, data))


def test_quantizers_of_our_own_float_export(tmp_path):
    model, data = made("resnet"), batches()
    compress.export_onnx(model, data[0], tmp_path / "float.onnx")
    spec = QuantSpec(activations=ActivationSpec(calibrator="percentile"))
    result = quantize_onnx_file(tmp_path / "float.onnx", data, spec=spec)
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)
