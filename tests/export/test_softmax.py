"""ONNX Runtime's integer softmax wraps around where a probability is above the calibrated range; our files saturate."""

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from compress import ActivationSpec, QuantSpec, export_onnx, quantize
from compress.quantization.sensitivity.compare import sqnr
from tests.exact import open_session


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_probabilities_above_the_range_saturate_in_onnxruntime(target, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 5)).eval()
    nn.init.zeros_(model[0].bias)
    x = torch.randn(4, 3, 8, 8)
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"))
    path = export_onnx(quantize(model, x, [0.2 * x], spec=spec), x, tmp_path / "m.onnx")  # calibrated with less
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    (got,) = open_session(path).run(None, {"input": x.numpy()})
    assert sqnr(torch.from_numpy(expected), torch.from_numpy(got)) > 30
    bounds = [node.op_type for node in onnx.load(path).graph.node].count("Min")
    assert bounds == (1 if target == "onnxruntime" else 0)
