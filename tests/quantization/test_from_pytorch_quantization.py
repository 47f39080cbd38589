import copy
import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn

import compress
from compress.errors import CalibrationError, QuantizationError
from compress.quantization.quantizer import QuantConv2d, quantizers
from compress.quantization.report import placement_of
from tests.exact import on_engine
from tests.networks import with_statistics

theirs = pytest.importorskip("pytorch_quantization.nn", reason="install the extra pytorch-quantization")
from pytorch_quantization import quant_modules  # noqa: E402
from pytorch_quantization.tensor_quant import QuantDescriptor  # noqa: E402

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
UNSIGNED = QuantDescriptor(num_bits=8, unsigned=True)
PER_TENSOR = QuantDescriptor(num_bits=8)


class Net(nn.Module):
    # As their users build them: quantized layers, a quantizer on the identity branch, quantized pools.
    def __init__(self, weight: QuantDescriptor = QuantDescriptor(num_bits=8, axis=(0,))) -> None:  # noqa: B008
        super().__init__()
        self.stem = theirs.QuantConv2d(3, 8, 3, padding=1, bias=False, quant_desc_weight=weight)
        self.bn = nn.BatchNorm2d(8)
        self.maxpool = theirs.QuantMaxPool2d(2)
        self.conv1 = theirs.QuantConv2d(8, 8, 3, padding=1, quant_desc_input=UNSIGNED, quant_desc_weight=weight)
        self.conv2 = theirs.QuantConv2d(8, 8, 3, padding=1, bias=False, groups=2, quant_desc_weight=weight)
        self.bn2 = nn.BatchNorm2d(8)
        self.residual = theirs.TensorQuantizer(QuantDescriptor(num_bits=8, narrow_range=True))
        self.up = theirs.QuantConvTranspose2d(8, 4, 2, stride=2)
        self.pool = theirs.QuantAdaptiveAvgPool2d(1)
        self.fc = theirs.QuantLinear(4, 10)

    def forward(self, x):
        x = self.maxpool(torch.relu(self.bn(self.stem(x))))
        x = torch.relu(self.bn2(self.conv2(torch.relu(self.conv1(x)))) + self.residual(x))
        return self.fc(torch.flatten(self.pool(self.up(x)), 1))


def calibrated(model, x=X):
    model = with_statistics(model)
    found = [m for m in model.modules() if isinstance(m, theirs.TensorQuantizer)]
    for quantizer in found:
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        model(x)
    for quantizer in found:
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()
    return model


def same(model, x=X):
    ours = compress.from_pytorch_quantization(model, x[:2])
    torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-5)
    return ours


@pytest.mark.parametrize("weight", [QuantDescriptor(axis=(0,)), PER_TENSOR, QuantDescriptor(num_bits=4, axis=(0,))])
def test_same_outputs_and_they_are_quantized(weight):
    model = calibrated(Net(weight))
    before = copy.deepcopy(model.state_dict())
    ours = same(model)
    off = copy.deepcopy(model)
    for module in off.modules():
        if isinstance(module, theirs.TensorQuantizer):
            module.disable()
    assert (off(X) - model(X)).abs().max() > 1e-3  # quantization shows, so equality says something
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found = dict(quantizers(ours))
    assert len([name for name in found if name.endswith("weight_quantizer")]) == 5
    assert {n for n in found if n.startswith("quantizers.")} >= {"quantizers.stem", "quantizers.conv1", "quantizers.fc"}
    assert found["quantizers.conv1"].format.signed is False and found["quantizers.residual"].format.narrow is True
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("weight", [QuantDescriptor(axis=(0,)), PER_TENSOR])
def test_on_to_onnx(weight, tmp_path):
    model = calibrated(Net(weight))
    path = compress.export_onnx(compress.from_pytorch_quantization(model, X[:2]), X[:2], tmp_path / "model.onnx")
    audit = compress.audit_onnx(path)
    assert audit.int8_share == 1 and len(audit.rows) == 5
    logits, expected = on_engine(path, "onnxruntime", X), model(X)
    assert (logits - expected).abs().max() < expected.abs().max() / 127  # a step


def test_a_shared_tensor_gets_one_quantizer_and_what_is_off_stays_off():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = theirs.QuantLinear(6, 4), theirs.QuantLinear(6, 4)
            self.c = theirs.QuantLinear(4, 3)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    x = torch.randn(16, 6)
    model = calibrated(Two(), x)
    model.c._input_quantizer.disable()
    model.c._weight_quantizer.disable()
    ours = same(model, x)
    assert [n for n, _ in quantizers(ours)] == ["a.weight_quantizer", "b.weight_quantizer", "quantizers.a"]
    assert type(ours.c) is nn.Linear
    assert placement_of(ours).activations[0].edges == (("x", "a"), ("x", "b"))
    compress.calibrate(ours, [2 * x])  # it is one of ours: ranges can be measured again
    assert dict(quantizers(ours))["quantizers.a"].amax == 2 * x.abs().max()


def test_ranges_measured_at_each_call_learned_ones_and_dead_channels():
    x = torch.randn(16, 6)
    model = calibrated(nn.Sequential(theirs.QuantLinear(6, 4)), x)
    del model[0]._weight_quantizer._amax  # dynamic: for a weight that is still known
    same(model, x)
    model = nn.Sequential(theirs.QuantLinear(6, 4))
    model[0].weight.data[1] = 0
    same(calibrated(model, x), x)
    learning = QuantDescriptor(learn_amax=True, amax=1.5)
    model = nn.Sequential(theirs.TensorQuantizer(learning), nn.ReLU())
    same(model, x)
    model[0].clip.clip_value_max.data.fill_(1.0)
    with pytest.raises(QuantizationError, match="from -1.5 to 1"):
        compress.from_pytorch_quantization(model, x)


def test_a_torchvision_model_made_under_their_patch_of_torch():
    # As their users make them: torch.nn holds their layers while the model is built, and while it is taken over.
    quant_modules.initialize()
    try:
        model = torchvision.models.resnet18(num_classes=10)
        assert isinstance(model.conv1, theirs.QuantConv2d)
        calibrated(model)
        ours = compress.from_pytorch_quantization(model, X[:2])
    finally:
        quant_modules.deactivate()
    names = [name for name, _ in quantizers(ours)]
    assert len([name for name in names if name.endswith("weight_quantizer")]) == 21
    assert type(ours.get_submodule("layer1.0.conv1")) is QuantConv2d
    torch.testing.assert_close(ours(X), model(X), rtol=1e-5, atol=1e-5)


def test_importing_compress_under_their_patch_is_refused():
    lines = [
        "from pytorch_quantization import quant_modules; quant_modules.initialize()",
        "import compress, torch; m = torch.nn.Sequential(torch.nn.Linear(6, 4))",
        "compress.from_pytorch_quantization(m, torch.randn(2, 6))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode and "import compress before quant_modules.initialize()" in done.stderr


def test_it_trains_on():
    ours = compress.from_pytorch_quantization(calibrated(Net()), X[:2]).train()
    ours(X).square().mean().backward()
    assert ours.stem.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: delattr(m[0]._input_quantizer, "_amax"), CalibrationError, "0._input_quantizer has no calibrated"),
        (lambda m: m[0]._input_quantizer.enable_calib(), CalibrationError, "still in calibration"),
        (lambda m: [q.disable() for q in (m[0]._input_quantizer, m[0]._weight_quantizer)], QuantizationError, "is on"),
        (lambda m: m[0]._input_quantizer._amax.zero_(), CalibrationError, "everything becomes zero"),
        (lambda m: setattr(m[0]._input_quantizer, "_fake_quant", False), QuantizationError, "fake_quant=False"),
    ],
)
def test_refusals(change, error, words):
    x = torch.randn(4, 6)
    model = calibrated(nn.Sequential(theirs.QuantLinear(6, 4)), x)
    change(model)
    with pytest.raises(error, match=words):
        compress.from_pytorch_quantization(model, x)


def test_a_plain_model_and_a_foreign_padding_are_refused():
    with pytest.raises(QuantizationError, match="no quantizer of pytorch-quantization"):
        compress.from_pytorch_quantization(nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6))
    model = calibrated(nn.Sequential(theirs.QuantConv2d(3, 4, 3, padding=1, padding_mode="circular")))
    with pytest.raises(QuantizationError, match="circular"):
        compress.from_pytorch_quantization(model, X)
