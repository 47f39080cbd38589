"""INT32 biases: ONNX Runtime then runs matrix products in 8 bits, and computes what fake quantization does."""

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress import ActivationSpec, QuantSpec, build_engine, export_onnx, quantize
from compress.quantization.sensitivity.compare import sqnr
from tests.exact import session_options

X = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b, self.fc = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.b(torch.nn.functional.gelu(self.a(self.norm(x))))
        return self.fc(x.mean(1))


def written(tmp_path, target, precision="fp32"):
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"))
    qmodel = quantize(Block().eval(), X, [X], spec=spec)
    return qmodel, export_onnx(qmodel, X, tmp_path / "model.onnx", precision=precision)


def test_all_products_run_in_8_bits_and_agree_with_fake_quantization(tmp_path, capfd):
    qmodel, path = written(tmp_path, "onnxruntime")
    ort.InferenceSession(str(path))
    assert capfd.readouterr() == ("", "")  # it warns of constants that nothing reads
    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_free_dimension_override_by_name("batch", 3)
    session = ort.InferenceSession(str(path), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QGemm") + kinds.count("MatMulIntegerToFloat") == 3 and "Gemm" not in kinds
    (result,) = session.run(None, {"input": X.numpy()})
    with torch.no_grad():
        assert sqnr(qmodel(X), torch.from_numpy(result)) > 40


@pytest.mark.parametrize(("target", "precision"), [("openvino", "fp32"), ("tensorrt", "fp32"), ("onnxruntime", "fp16")])
def test_other_targets_and_precisions_keep_their_biases(tmp_path, target, precision):
    _, path = written(tmp_path, target, precision)
    types = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.INT32 not in types


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_biases_of_channels_that_are_nearly_zero_come_out(tmp_path, target, precision):
    """ONNX Runtime adds biases as INT32; beside weights of 1e-8 a bias of 1 came out as another number (6 dB)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    with torch.no_grad():
        for layer, channel in ((model[0], 2), (model[2], 5), (model[5], 1)):
            layer.weight[channel] *= 1e-8
            layer.bias[channel] = 1.0
    x = torch.randn(8, 3, 8, 8)
    qmodel = quantize(model.eval(), x, [x], spec=QuantSpec(target=target))
    path = export_onnx(qmodel, x, tmp_path / "m.onnx", precision=precision)
    with build_engine(path, "onnxruntime") as engine, torch.no_grad():
        result = torch.from_numpy(engine.run({"input": x.numpy()})["logits"])
        assert sqnr(qmodel(x), result) > 40
        assert sqnr(model(x), result) > 30
