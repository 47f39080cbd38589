"""The default keeps layers whose inputs have outlier channels, and products after a peaked softmax, accurate."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compress
from compress.onnx_ptq.quantize import quantize_onnx_file
from tests.exact import open_session
from tests.onnx_ptq.files import export

TOKENS = torch.randn(12, 20, 16, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(12, 3, 24, 24, generator=torch.Generator().manual_seed(0))


class Peaked(nn.Module):
    """Outlier channels after a LayerNorm and a GELU, and attention of a few large and many small weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.norm.weight[3], self.up.bias[5] = 80.0, 90.0
            self.qkv.weight[:, 3], self.down.weight[:, 5] = 1e-3, 1e-3

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2) * 3).softmax(-1) @ v)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Sink(nn.Module):
    """Attention that goes to the first token, which has no value: the result is made of the small weights."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)
        self.register_buffer("bias", torch.tensor([8.0] + 19 * [0.0]))
        self.register_buffer("mask", torch.tensor([0.0] + 19 * [1.0])[:, None])

    def forward(self, x):
        return self.out((x @ x.transpose(1, 2) / 16 + self.bias).softmax(-1) @ (x * self.mask))


class Wide(nn.Module):
    """A depthwise convolution behind channels whose ranges are far apart, through hard-swish and through ReLU."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.activation = nn.Conv2d(3, 16, 3), activation
        self.depthwise, self.last = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)
        with torch.no_grad():
            self.first.weight[2] *= 60
            self.depthwise.weight[2] /= 60

    def forward(self, x):
        return self.last(self.depthwise(self.activation(self.first(x))))


def decibel(path, wanted, x):
    session = open_session(path)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return 10 * np.log10((wanted**2).sum() / ((found - wanted) ** 2).sum())


@pytest.mark.parametrize("target", ["openvino", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    ("model", "x", "gain"),
    [(Peaked, TOKENS, 4), (lambda: Wide(nn.ReLU()), IMAGES, 8), (lambda: Wide(nn.Hardswish()), IMAGES, 8)],
)
def test_outlier_channels_cost_less_by_default(tmp_path, target, model, x, gain):
    torch.manual_seed(0)
    model = model().eval()
    with torch.no_grad():
        wanted = model(x).numpy()
    file, found = export(model, tmp_path / "float.onnx", x=x), {}
    for smooth in ("auto", None):
        spec = compress.QuantSpec(target=target, smooth=smooth)
        done = quantize_onnx_file(file, [x], spec=spec, out=tmp_path / f"{smooth}.onnx")
        found[smooth] = decibel(done.path, wanted, x)
    if target == "onnxruntime" and "Hardswish" in str(model):
        assert found["auto"] == found[None]  # a Mul of its own would not be in 8 bits there
    else:
        assert found["auto"] > found[None] + gain


def test_a_poor_product_stays_float_with_its_reason_unless_a_rule_says_otherwise(tmp_path):
    torch.manual_seed(0)
    file = export(Sink().eval(), tmp_path / "float.onnx", x=TOKENS)
    for rules in ((), (compress.Rule(match="*MatMul*"),)):
        spec = compress.QuantSpec(target="openvino", rules=rules)
        done = quantize_onnx_file(file, [TOKENS], spec=spec, out=tmp_path / "int8.onnx")
        reasons = [row.reason for row in done.placement.decisions if "dB on calibration images" in row.reason]
        assert len(reasons) == (0 if rules else 1)


def test_ordinary_ranges_add_nothing(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    file = export(model, tmp_path / "float.onnx", x=IMAGES)
    for smooth in ("auto", None):
        spec = compress.QuantSpec(target="openvino", smooth=smooth)
        compress.quantize_onnx(file, [IMAGES], spec=spec, out=tmp_path / f"{smooth}.onnx")
    kinds = [[n.op_type for n in onnx.load(tmp_path / f"{s}.onnx").graph.node] for s in ("auto", None)]
    assert kinds[0] == kinds[1] and "Mul" not in kinds[0]
