"""A torch model and the ONNX file of the same model get the same quantizers."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch

import compress
from analysis.random_networks.check import inputs
from analysis.random_networks.network import TABLES, Network, Step
from compress import ActivationSpec, QuantSpec
from compress.onnx_ptq import passes
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.numerics import scale_from_amax
from compress.quantization.spec import TARGETS
from examples.yolo import Yolo
from tests.families import FAMILIES
from tests.networks import TinyResNet, with_statistics
from tests.onnx_ptq.files import Attention, Gated, Shuffled, batches, export

SIZE = 32
OWN = {"resnet": TinyResNet, "gated": Gated, "attention": Attention, "shuffled": Shuffled}
NETWORKS = {
    **OWN, "YOLO": lambda: Yolo(3, width=4, decoded=(SIZE, SIZE)),
    **{name: FAMILIES[name] for name in ("MobileNetV3", "ConvNeXt", "Swin", "ViT", "DenseNet")},
}  # fmt: skip
CASES = [(name, target) for name in NETWORKS for target in TARGETS if name in OWN or target != "any"]
UNFOLDED = {"resnet", "DenseNet"}
"""Networks whose file holds BatchNorm as it is."""


def data_of(name):
    return batches(size=SIZE if name == "YOLO" else 16)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The network, its file and calibration data; each file is written once."""

    @functools.cache
    def made(name):
        torch.manual_seed(0)
        model = with_statistics(NETWORKS[name]())
        for parameter in model.parameters():
            if not bool(parameter.any()):
                torch.nn.init.normal_(parameter, std=0.02)
        path = tmp_path_factory.mktemp("same") / "float.onnx"
        return model, export(model, path, folded=name not in UNFOLDED, x=data_of(name)[0][:2])

    return made


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


@pytest.mark.parametrize(("name", "target"), CASES)
def test_quantizers_of_a_file_are_those_of_its_model(exported, tmp_path, name, target):
    (model, file), data = exported(name), data_of(name)
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"), smooth=None)
    result = quantize_onnx_file(file, data, spec=spec, out=tmp_path / "int8.onnx")
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


@pytest.mark.parametrize("name", OWN)
def test_ranges_of_the_default_calibrator_are_the_same(exported, tmp_path, monkeypatch, name):
    monkeypatch.setattr(passes, "_PIECE", 1)  # batches in pieces, as those of larger networks are
    (model, file), data = exported(name), data_of(name)
    spec = QuantSpec(smooth=None)  # a file gets products with scales, a network of torch does not
    result = quantize_onnx_file(file, data, spec=spec, out=tmp_path / "int8.onnx")
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


def test_quantizers_of_our_own_float_export(exported, tmp_path):
    (model, _), data = exported("resnet"), data_of("resnet")
    compress.export_onnx(model, data[0], tmp_path / "float.onnx")
    spec = QuantSpec(activations=ActivationSpec(calibrator="percentile"), smooth=None)
    result = quantize_onnx_file(tmp_path / "float.onnx", data, spec=spec)
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


FLOAT_IN_TORCH = {"hook after", "hook before", "addmm"}
"""A layer with hooks, and a product with a parameter that is no layer's weight, stay float and say so."""
OTHERWISE_WRITTEN = {
    "shared bn": "a BatchNorm that is called twice stays, and a file holds two",
    "in place": "SiLU in place is not looked for",
    "swin of version 2": "a file holds the results of layers that compute with constants alone",
    "list of branches": "of two branches of one length, the other is the identity",
    "conv of circles": "the exporter writes slices, which share the scale of the image that they are of",
}
"""Operations that an older exporter's file spells with others, or that it does not write."""
LAYERS_ALIKE = [name for name in TABLES[0] if name not in FLOAT_IN_TORCH | OTHERWISE_WRITTEN.keys()]


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("first", range(0, 48, 12))
def test_random_networks_get_the_same_quantizers_through_both_readers(tmp_path, first, target):
    """Each layer of the random networks between two convolutions, as a module and as the file of that module."""
    x, spec = inputs(), QuantSpec(target=target, activations=ActivationSpec(calibrator="max"), smooth=None)
    differ = []
    for name in LAYERS_ALIKE[first : first + 12]:
        model = Network((Step("conv bn relu", 1), Step(name, 2), Step("conv", 3))).eval()
        file = tmp_path / "float.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.onnx.export(model, (x,), str(file), dynamo=False, opset_version=17)
            except torch.onnx.OnnxExporterError:
                continue  # it loses the size of what it pads
        result = quantize_onnx_file(file, [x], spec=spec, out=tmp_path / "int8.onnx")
        (ours, our_weights), (theirs, their_weights) = (
            quantizers(one.placement, report.amax)
            for qmodel in [compress.quantize(model, x, [x], spec=spec)]
            for one, report in ((qmodel, qmodel.report.calibration), (result, result.calibration))
        )
        same = [key for key, _ in ours] == [key for key, _ in theirs] and np.allclose(
            [scale for _, scale in ours], [scale for _, scale in theirs], rtol=1e-3
        )
        if not same or {str(f) for f, _ in our_weights} != {str(f) for f, _ in their_weights}:
            differ.append(name)
    assert not differ
