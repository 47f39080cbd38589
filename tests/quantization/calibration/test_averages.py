"""Averages of tensors without a mean: the file of a network that centres its images runs in ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from compress.export.onnx import export_onnx
from compress.quantization.ptq.quantize import quantize
from compress.quantization.quantizer import quantizers
from compress.quantization.spec import ActivationSpec, QuantSpec

MAX = ActivationSpec(calibrator="max")


class Centred(nn.Module):
    """A gate that sees the mean of what the mean was taken from: zero but for rounding."""

    def __init__(self, offset):
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
        self.offset = offset

    def forward(self, x):
        x = self.stem(x)
        x = x - x.mean((2, 3), keepdim=True) + self.offset
        return self.last(x * torch.sigmoid(self.gate(nn.functional.adaptive_avg_pool2d(x, 1))))


def made(offset):
    torch.manual_seed(0)
    model, x = Centred(offset).eval(), torch.randn(4, 3, 10, 10)
    return model, x, quantize(model, x, [x], spec=QuantSpec(target="onnxruntime", activations=MAX))


def test_a_file_with_an_average_of_zero_runs(tmp_path):
    model, x, qmodel = made(0.0)
    path = export_onnx(qmodel, x, tmp_path / "m.onnx")
    (got,) = onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})
    expected = model(x).detach().numpy()
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


def test_steps_of_an_average_are_no_finer_than_its_values_and_others_stay():
    scales = {}
    for offset in (0.0, 1.0):
        found = dict(quantizers(made(offset)[2]))
        (name,) = [name for name in found if "adaptive_avg_pool" in name]
        before = next(found[n] for n in ("quantizers.add", "quantizers.sub") if n in found)
        scales[offset] = (float(found[name].scale), float(before.scale) / 64)
    assert scales[0.0][0] == pytest.approx(scales[0.0][1])
    assert scales[1.0][0] > scales[1.0][1]
