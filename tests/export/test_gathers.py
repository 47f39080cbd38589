"""Gathers by tables of indices: OpenVINO takes them after an INT8 layer, and computes what fake quantization does."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress import ActivationSpec, QuantSpec, build_engine, export_onnx, quantize
from compress.quantization.sensitivity.compare import sqnr
from tests.exact import WEIGHTS

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Windows(nn.Module):
    """Overlapping windows of a convolution's result, as in HaloNet; no bias, so that its scales move on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        windows = F.pad(self.conv(x), [1, 1, 1, 1]).unfold(2, 6, 4).unfold(3, 6, 4)
        return self.fc(windows.amax((4, 5)).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("dynamic", [True, False])
def test_windows_behind_an_int8_convolution_run_on_openvino(dynamic, tmp_path):
    spec = QuantSpec(target="openvino", activations=ActivationSpec(calibrator="max"), weights=WEIGHTS)
    qmodel = quantize(Windows().eval(), X, [X], spec=spec)
    path = export_onnx(qmodel, X, tmp_path / "model.onnx", dynamic_batch=dynamic)
    nodes = onnx.load(path).graph.node
    assert [node.op_type for node in nodes].count("Gather") == 2 and len({node.name for node in nodes}) == len(nodes)
    with build_engine(path, "openvino", threads=1, precision="f32") as engine, torch.no_grad():
        (result,) = engine.run({"input": X.numpy()}).values()
        assert sqnr(qmodel(X), torch.from_numpy(result)) > 40
