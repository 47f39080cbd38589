"""OpenVINO computes what fake quantization does where signed tensors meet in a concat."""

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
        torch.manual_seed(0)
        self.split = split
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(3, 24, 3, padding=1)
        self.c, self.d = nn.Conv2d(48, 48, 1), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        y = torch.cat([self.a(x), self.b(x)], 1)
        if self.split:
            y = y.chunk(2, 1)[1]
            y = torch.cat([y, y], 1)
        return self.d(self.c(y))


@pytest.mark.parametrize("split", [False, True])
def test_signed_tensors_that_meet_in_a_concat(split, tmp_path):
    qmodel = quantize(Branches(split=split).eval(), X, [X], spec=QuantSpec(target="openvino"))
    path = export_onnx(qmodel, X, tmp_path / "model.onnx")
    with build_engine(path, "openvino", threads=1, precision="f32") as engine, torch.no_grad():
        (result,) = engine.run({"input": X.numpy()}).values()
        assert sqnr(qmodel(X), torch.from_numpy(result)) > 40
