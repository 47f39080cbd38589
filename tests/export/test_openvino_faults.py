"""Files in a form that OpenVINO computes right: what ONNX Runtime computes of them, node by node, is the reference."""

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress.engines.registry import build_engine
from compress.export.onnx import export_onnx
from compress.quantization.calibrate import quantize
from compress.quantization.compare import sqnr
from compress.quantization.spec import QuantSpec

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Two branches and a convolution of both; `split`: of one part of the first, twice."""

    def __init__(self, *, split: bool):
        super().__init__()
        self.split = split
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(3, 24, 3, padding=1)
        self.c, self.d = nn.Conv2d(48, 48, 1), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        y = torch.cat([self.a(x), self.b(x)], 1)
        if self.split:
            y = y.chunk(2, 1)[1]
            y = torch.cat([y, y], 1)
        return self.d(self.c(y))


class Scaled(nn.Module):
    """A convolution of a signed tensor that an operation stands between and the concat."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 16, 3, padding=1)

    def forward(self, x):
        return self.conv(0.5 * torch.cat([x, x.sin()], 1))


class Products(nn.Module):
    """A matrix product along the last axis of a concat along another."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(torch.cat([x, x.sin()], 1))


class Shared(nn.Module):
    """Convolutions without a bias, and with one of zeros, quantized for the next one and read as they are beside it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.Conv2d(12, 12, 3, groups=3)
        self.c = nn.Conv2d(12, 12, 3, padding=1)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        x = self.a(x)
        y = self.b(x) + x[..., 1:-1, 1:-1].sigmoid()
        y = self.b(y)
        return self.c(y) + y.sigmoid()


@pytest.mark.parametrize(
    ("model", "precision", "target"),
    [
        pytest.param(lambda: Branches(split=False), "fp32", "openvino", id="concat"),
        pytest.param(lambda: Branches(split=True), "fp32", "openvino", id="concat of parts"),
        pytest.param(Scaled, "fp32", "openvino", id="behind a concat"),
        pytest.param(Products, "fp32", "openvino", id="matrix product of a concat"),
        pytest.param(Shared, "fp32", "openvino", id="no bias"),
        pytest.param(Shared, "fp16", "openvino", id="no bias, fp16"),
        pytest.param(Shared, "fp32", "tensorrt", id="no bias, for TensorRT"),
    ],
)
def test_openvino_computes_what_the_file_says(model, precision, target, tmp_path):
    torch.manual_seed(0)
    qmodel = quantize(model().eval(), X, [X], spec=QuantSpec(target=target))
    path = export_onnx(qmodel, X, tmp_path / "model.onnx", precision=precision)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = ort.InferenceSession(str(path), options).run(None, {"input": X.numpy()})
    with build_engine(path, "openvino", threads=1, precision="f32") as engine, torch.no_grad():
        (result,) = engine.run({"input": X.numpy()}).values()
        assert sqnr(torch.from_numpy(expected), torch.from_numpy(result)) > 40
        assert sqnr(qmodel(X), torch.from_numpy(result)) > 40


def test_onnxruntime_gets_no_bias(tmp_path):
    qmodel = quantize(Shared().eval(), X, [X], spec=QuantSpec(target="onnxruntime"))
    convs = [n for n in onnx.load(export_onnx(qmodel, X, tmp_path / "m.onnx")).graph.node if n.op_type == "Conv"]
    assert sorted(len(node.input) for node in convs) == [2, 2, 2, 3]
