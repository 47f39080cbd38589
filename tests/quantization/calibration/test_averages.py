"""Averages of tensors without a mean: the files of a network that centres its images run in ONNX Runtime."""

import numpy as np
import pytest
import torch
from torch import nn

from compress import ActivationSpec, QuantSpec, export_onnx, quantize
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.numerics import scale_from_amax
from tests.exact import open_session
from tests.onnx_ptq.files import export

SPEC = QuantSpec(target="onnxruntime", activations=ActivationSpec(calibrator="max"))
PLACES = 14 * 14
"""Values that the average is taken of."""


class Centred(nn.Module):
    """A gate that sees the mean of what the mean was taken from: zero but for rounding."""

    def __init__(self, offset):
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
        self.offset = offset

    def forward(self, x):
        x = self.stem(x)
        x = x - x.mean((2, 3), keepdim=True)
        x = x if self.offset is None else x + self.offset
        return self.last(x * torch.sigmoid(self.gate(nn.functional.adaptive_avg_pool2d(x, 1))))


def made(offset):
    torch.manual_seed(0)
    return Centred(offset).eval(), torch.randn(4, 3, 16, 16)


def from_model(model, x, path):
    qmodel = quantize(model, x, [x], spec=SPEC)
    return export_onnx(qmodel, x, path), qmodel.placement, qmodel.report.calibration.amax


def from_file(model, x, path):
    done = quantize_onnx_file(export(model, path.with_name("float.onnx")), [x], spec=SPEC, out=path)
    return done.path, done.placement, done.calibration.amax


WAYS = (from_model, from_file)


@pytest.mark.parametrize("offset", [None, 0.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_an_average_of_zero_runs(tmp_path, way, offset):
    model, x = made(offset)
    path, _, _ = way(model, x, tmp_path / "m.onnx")
    session = open_session(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = model(x).detach().numpy()
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_an_average_are_no_finer_than_its_values_and_others_stay(tmp_path, way):
    scales = {}
    for offset in (None, 1.0):
        _, placement, amax = way(*made(offset), tmp_path / "m.onnx")
        scale = {site.name: float(scale_from_amax(amax[site.name], site.format)) for site in placement.activations}
        reads = {tensor: consumer for site in placement.activations for tensor, consumer in site.edges}
        of_tensor = {tensor: scale[site.name] for site in placement.activations for tensor, _ in site.edges}
        (before,) = [t for t, c in reads.items() if "adaptive_avg_pool" in c or "GlobalAveragePool" in c]
        scales[offset] = (of_tensor[reads[before]], of_tensor[before] / PLACES)
    assert scales[None][0] == pytest.approx(scales[None][1])
    assert scales[1.0][0] > scales[1.0][1]
