"""A gate that no calibration image opens leaves the layers behind it float, from torch and from a file."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import compress

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.branch, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        nn.init.constant_(self.gate.bias, -50.0)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x + self.branch(self.gate(x).relu()))


def layers_with_quantized_weights(path):
    graph = onnx.load(path).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    return [made.get(node.input[1]) == "DequantizeLinear" for node in graph.node if node.op_type == "Conv"]


@pytest.mark.parametrize("target", ["openvino", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("source", ["torch", "file"])
def test_a_closed_branch_stays_float_with_a_warning(target, source, tmp_path):
    torch.manual_seed(0)
    model, spec, out = Gated().eval(), compress.QuantSpec(target=target), tmp_path / "int8.onnx"
    with pytest.warns(compress.CompressWarning, match="branch"):
        if source == "torch":
            compress.export_onnx(compress.quantize(model, X[:1], [X], spec=spec), X[:1], out)
        else:
            path = compress.export_onnx(model, X[:1], tmp_path / "float.onnx", dynamic_batch=True)
            compress.quantize_onnx(path, [X], spec=spec, out=out)
    first, gate, branch, last = layers_with_quantized_weights(out)
    assert first and last and not branch
    assert gate == (target != "onnxruntime")  # its kernels want a pair on both sides
    session = onnxruntime.InferenceSession(out)
    found = session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]
    with torch.no_grad():
        wanted = model(X)
    assert (torch.from_numpy(found) - wanted).pow(2).mean() < 1e-3 * wanted.pow(2).mean()


def test_a_generator_is_refused_since_it_can_be_read_once():
    with pytest.raises(compress.CompressError, match="all collected values are zero"):
        compress.quantize(Gated().eval(), X[:1], iter([X]), spec=compress.QuantSpec(target="openvino"))
