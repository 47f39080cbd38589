"""Zero points move into the biases of convolutions without padding; the reference evaluator sees no difference."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from analysis.engine_check.run import ask
from compress.export.openvino import zero_points_into_biases
from compress.measure.layer_parity import layer_parity
from tests.exact import WEIGHTS
from tests.onnx_ptq.files import model_of

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((2, 4, 6, 6)).astype(np.float32)


def quantized(*, groups=1, size=1, bias=True, zero_point=128, dtype=np.float32, axis=0, result=False, **attributes):
    """A quantized tensor that a convolution and a sum read."""
    q = GENERATOR.integers(-127, 128, (8, 4 // groups, size, size)).astype(np.int8)
    constants = {
        "scale": np.array(0.02, dtype), "zero": np.array(zero_point, np.uint8), "q": q,
        "steps": (0.01 * (1 + GENERATOR.random(8 if axis == 0 else ()))).astype(dtype),
        "none": np.zeros(8 if axis == 0 else (), np.int8), "b": GENERATOR.standard_normal(8).astype(dtype),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["integers"]),
        helper.make_node("DequantizeLinear", ["integers", "scale", "zero"], ["values"], name="pair"),
        helper.make_node("DequantizeLinear", ["q", "steps", "none"], ["w"], axis=0),
        helper.make_node("Conv", ["values", "w", *(["b"] if bias else [])], ["c"], group=groups, **attributes),
        helper.make_node("ReduceSum", ["c"], ["a"], keepdims=0),
        helper.make_node("ReduceSum", ["values" if result else "c"], ["s"], keepdims=0),
        helper.make_node("Add", ["a", "s"], ["y"]),
    ]
    model = model_of(nodes, {k: v for k, v in constants.items() if bias or k != "b"}, rank=0, opset=19)
    model.ir_version = 9
    model.graph.output.append(
        helper.make_tensor_value_info("c", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list("nchw"))
    )
    return model


MOVED = {
    "plain": {},
    "without a bias": {"bias": False},
    "groups, stride and window": {"groups": 2, "size": 3, "strides": [2, 2], "pads": [0, 0, 0, 0]},
    "one scale": {"axis": None, "auto_pad": "VALID"},
    "another zero point": {"zero_point": 77},
    "a sum beside it": {"result": True},
}
STAYS = {
    "padding": {"size": 3, "pads": [1, 1, 1, 1]},
    "automatic padding": {"size": 3, "auto_pad": "SAME_UPPER"},
    "no zero point": {"zero_point": 0},
    "half precision": {"dtype": np.float16},
}


@pytest.mark.parametrize("case", [*MOVED, *STAYS])
def test_zero_points(case):
    model = quantized(**MOVED.get(case, STAYS.get(case)))
    x = X.astype(np.float16 if case == "half precision" else np.float32)
    before, written = ReferenceEvaluator(model).run(["c", "y"], {"x": x}), model.SerializeToString()
    assert zero_points_into_biases(model) == (case in MOVED)
    if case in STAYS:
        assert model.SerializeToString() == written
        return
    onnx.checker.check_model(model)
    for a, b in zip(ReferenceEvaluator(model).run(["c", "y"], {"x": x}), before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    pairs = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] == "integers"]
    assert [node.name for node in pairs] == (
        ["pair", "pair_shifted"] if case == "a sum beside it" else ["pair_shifted"]
    )


class Bottlenecks(nn.Module):
    """Signed tensors that a convolution without padding reads: alone, beside a sum, and beside a concat."""

    def __init__(self):
        super().__init__()
        self.stem, self.wide, self.narrow = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.last, self.beside = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 8, 2, stride=2, bias=False)

    def forward(self, x):
        x = self.stem(x)
        x = self.narrow(self.wide(x).clamp(0, 6)) + x
        return self.last(torch.cat([x, x], 1)).mean((2, 3)) + self.beside(x).mean((2, 3))


class Reparametrized(nn.Module):
    """Two branches with a stride on one signed tensor, as a MobileOne or FastViT begins: one pads, one does not."""

    def __init__(self, stride):
        super().__init__()
        self.stem, self.last = nn.Conv2d(4, 8, 3, 1, 1), nn.Conv2d(16, 8, 1)
        self.scale, self.wide = nn.Conv2d(8, 16, 1, stride), nn.Conv2d(8, 16, 3, stride, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.last(nn.functional.gelu(self.scale(x) + self.wide(x)))


@pytest.mark.parametrize("stride", [1, 2])
def test_openvino_computes_both_branches_in_8_bits(tmp_path, stride):
    torch.manual_seed(0)
    answer = ask(Reparametrized(stride).eval(), torch.randn(2, 4, 32, 32), "openvino", tmp_path)
    assert len(answer.int8) == 4 and answer.lost == ()


def test_engines_and_parity_follow(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4, 16, 16)
    spec = compress.QuantSpec(target="openvino", weights=WEIGHTS)
    qmodel = compress.quantize(Bottlenecks().eval(), x, [x], spec=spec)
    path = compress.export_onnx(qmodel, x, tmp_path / "m.onnx")
    kinds = [node.name for node in onnx.load(path).graph.node if node.name.endswith("_shifted")]
    assert len(kinds) == 2 and compress.audit_onnx(path).int8_share == 1
    for engine, precision in (("onnxruntime", None), ("openvino", "f32")):
        found = layer_parity(qmodel, path, x, engine=engine, precision=precision)
        assert found.first is None and found.missing == () and found.logits.sqnr_db > 30, found.verdict
