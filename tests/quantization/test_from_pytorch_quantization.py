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
from tests.networks import Net, unchanged, with_statistics

theirs = pytest.importorskip("pytorch_quantization.nn", reason="install the extra pytorch-quantization")
from pytorch_quantization import quant_modules  # noqa: E402
from pytorch_quantization.tensor_quant import QuantDescriptor  # noqa: E402

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
UNSIGNED = QuantDescriptor(num_bits=8, unsigned=True)
PER_TENSOR = QuantDescriptor(num_bits=8)
PER_CHANNEL = QuantDescriptor(num_bits=8, axis=(0,))


def network(weight=PER_CHANNEL):
    # As their users build them: quantized layers, a quantizer on the identity branch, quantized pools.
    def run(net, x):
        x = net.maxpool(torch.relu(net.bn(net.stem(x))))
        x = torch.relu(net.bn2(net.conv2(torch.relu(net.conv1(x)))) + net.residual(x))
        return net.fc(torch.flatten(net.pool(net.up(x)), 1))

    return Net(
        run,
        stem=theirs.QuantConv2d(3, 8, 3, padding=1, bias=False, quant_desc_weight=weight),
        bn=nn.BatchNorm2d(8),
        maxpool=theirs.QuantMaxPool2d(2),
        conv1=theirs.QuantConv2d(8, 8, 3, padding=1, quant_desc_input=UNSIGNED, quant_desc_weight=weight),
        conv2=theirs.QuantConv2d(8, 8, 3, padding=1, bias=False, groups=2, quant_desc_weight=weight),
        bn2=nn.BatchNorm2d(8),
        residual=theirs.TensorQuantizer(QuantDescriptor(num_bits=8, narrow_range=True)),
        up=theirs.QuantConvTranspose2d(8, 4, 2, stride=2),
        pool=theirs.QuantAdaptiveAvgPool2d(1),
        fc=theirs.QuantLinear(4, 10),
    )


def calibrated(model, x=X):
    model = with_statistics(model)
    found = [m for m in model.modules() if isinstance(m, theirs.TensorQuantizer)]
    for quantizer in found:
        quantizer.disable_quant()
        quantizer.enable_calib()
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


@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR, QuantDescriptor(num_bits=4, axis=(0,))])
def test_same_outputs_and_they_are_quantized(weight):
    model = calibrated(network(weight))
    with unchanged(model):
        ours = same(model)
    off = copy.deepcopy(model)
    for module in off.modules():
        if isinstance(module, theirs.TensorQuantizer):
            module.disable()
    assert (off(X) - model(X)).abs().max() > 1e-3  # quantization shows, so equality says something
    found = dict(quantizers(ours))
    assert len([name for name in found if name.endswith("weight_quantizer")]) == 5
    assert {n for n in found if n.startswith("quantizers.")} >= {"quantizers.stem", "quantizers.conv1", "quantizers.fc"}
    assert found["quantizers.conv1"].format.signed is False and found["quantizers.residual"].format.narrow is True
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR])
def test_on_to_onnx(weight, tmp_path):
    model = calibrated(network(weight))
    path = compress.export_onnx(compress.from_pytorch_quantization(model, X[:2]), X[:2], tmp_path / "model.onnx")
    audit = compress.audit_onnx(path)
    # The library scales the input channels of a transposed convolution, which no product of integers sums over.
    assert [row.op_type for row in audit.rows if not row.int8] == ["ConvTranspose"] and len(audit.rows) == 5
    logits, expected = on_engine(path, "onnxruntime", X), model(X)
    assert (logits - expected).abs().max() < expected.abs().max() / 127  # a step


def test_a_shared_tensor_gets_one_quantizer_and_what_is_off_stays_off():
    layers = {name: theirs.QuantLinear(n, m) for name, n, m in (("a", 6, 4), ("b", 6, 4), ("c", 4, 3))}
    x = torch.randn(16, 6)
    model = calibrated(Net(lambda net, x: net.c(net.a(x) + net.b(x)), **layers), x)
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
    model = nn.Sequential(theirs.TensorQuantizer(QuantDescriptor(learn_amax=True, amax=1.5)), nn.ReLU())
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
    ours = compress.from_pytorch_quantization(calibrated(network()), X[:2]).train()
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
