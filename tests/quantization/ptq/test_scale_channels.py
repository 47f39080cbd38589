"""`smooth: auto` of torch models: what it gains, that it changes no module, and that its choice can be repeated."""

import copy

import pytest
import torch
from torch import nn

import compress
from compress.errors import CheckpointError
from tests.onnx_ptq.test_smooth import IMAGES, TOKENS, Peaked, Sink, Wide

TARGETS = ("tensorrt", "openvino", "onnxruntime")


class NormAlone(nn.Module):
    """Outlier channels after a LayerNorm that two linear layers consume, one of them through dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.left, self.right, self.drop = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Dropout()
        with torch.no_grad():
            self.norm.weight[3] = 90.0
            self.left.weight[:, 3] /= 90
            self.right.weight[:, 3] /= 90

    def forward(self, x):
        x = self.drop(self.norm(x))
        return self.left(x) * 2 + self.right(x)


def sqnr(wanted, found):
    return float(10 * torch.log10(wanted.square().sum() / (found - wanted).square().sum()))


def quantized(model, x, target, **keys):
    return compress.quantize(model, x[:2], [x], spec=compress.QuantSpec(target=target, **keys))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("make", "x"),
    [(NormAlone, TOKENS), (Peaked, TOKENS), (lambda: Wide(nn.ReLU()), IMAGES)],
    ids=["norm", "vit", "conv"],
)
def test_outlier_channels_cost_less(make, x, target):
    torch.manual_seed(0)
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    found = {smooth: quantized(model, x, target, smooth=smooth) for smooth in ("auto", None)}
    with torch.no_grad():
        db = {smooth: sqnr(model(x), qmodel(x)) for smooth, qmodel in found.items()}
    assert db["auto"] > db[None] + 3, db
    assert any("smooth: auto" in note for note in found["auto"].report.notes())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the caller's own"


def test_the_float_network_stays_what_it_was():
    """Without quantizers the scaled network computes what the caller's does."""
    torch.manual_seed(0)
    model = NormAlone().eval()
    qmodel = quantized(model, TOKENS, "openvino")
    for module in qmodel.modules():
        if isinstance(module, compress.Quantizer):
            module.enabled = False
    with torch.no_grad():
        torch.testing.assert_close(qmodel(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)


def test_a_poor_product_stays_float_and_the_choice_can_be_repeated(tmp_path):
    torch.manual_seed(0)
    model = Sink().eval()
    qmodel = quantized(model, TOKENS, "openvino")
    (rule,) = qmodel.placement.measured_rules
    assert "dB on calibration images" in rule.reason
    path = compress.save(qmodel, tmp_path / "q.safetensors")
    spec = compress.QuantSpec(target="openvino")
    with pytest.raises(CheckpointError, match="measured_rules"):
        compress.load(path, into=compress.insert_quantizers(model, TOKENS[:2], spec))
    spec = compress.QuantSpec(target="openvino", rules=qmodel.placement.measured_rules)
    again = compress.load(path, into=compress.insert_quantizers(model, TOKENS[:2], spec))
    assert torch.equal(again(TOKENS), qmodel(TOKENS))
    own = compress.QuantSpec(target="openvino", rules=(compress.Rule(match=rule.match),))
    assert not compress.quantize(model, TOKENS[:2], [TOKENS], spec=own).placement.measured_rules, "a rule of one's own"


def test_a_generator_and_ordinary_ranges():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    read = []

    def batches():
        for start in range(0, 12, 4):
            read.append(start)
            yield IMAGES[start : start + 4]

    once = compress.quantize(model, IMAGES[:2], batches())
    assert read == [0, 4, 8] and not once.report.notes()
    plain = compress.quantize(
        model, IMAGES[:2], list(IMAGES.split(4)), spec=compress.QuantSpec(target="tensorrt", smooth=None)
    )
    assert torch.equal(once(IMAGES), plain(IMAGES)), "nothing is scaled where 8 bits cost little"
