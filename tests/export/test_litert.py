# LiteRT files: their scales are the ONNX file's, and the engine computes what ONNX Runtime computes of that file.

import sys

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import nn

import compress
from compress.errors import EngineError, EngineUnavailableError, ExportError
from compress.export.names import LABELS_KEY
from tests import exact
from tests.exact import compute, on_engine
from tests.further import further
from tests.networks import Net
from tests.onnx_models import onnx_model
from tests.onnx_ptq.files import sqnr, weights

fb = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="the extra litert is not installed")


def residual():
    def run(net, x):
        x = F.max_pool2d(F.relu6(net.norm(net.stem(x))), 3, 2, 1)
        y = F.relu(x + net.point(F.relu(net.deep(x))))
        return net.fc(torch.cat([x, y], 1).mean((2, 3)))

    return Net(
        run,
        stem=nn.Conv2d(3, 8, 3, stride=2, padding=1),
        norm=nn.BatchNorm2d(8),
        deep=nn.Conv2d(8, 16, 3, padding=2, dilation=2, groups=8),
        point=nn.Conv2d(16, 8, 1),
        fc=nn.Linear(16, 10),
    )


def squeeze():
    def run(net, x):
        x = F.hardswish(net.a(x))
        x = x * F.hardsigmoid(net.excite(F.relu(net.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return F.avg_pool2d(F.pad(F.silu(net.b(x)), (0, 2), value=1.0), 2).flatten(1)

    return Net(
        run,
        a=nn.Conv2d(3, 16, 3, padding=1),
        b=nn.Conv2d(16, 16, 3, padding=1, groups=4),
        squeeze=nn.Conv2d(16, 4, 1),
        excite=nn.Conv2d(4, 16, 1),
    )


def upscale():
    def run(net, x):
        x = F.pixel_shuffle(net.act(net.a(x)), 2)
        y = F.interpolate(net.b(x), scale_factor=0.5, mode="bilinear", align_corners=False)
        return net.c(F.pad(F.interpolate(x, scale_factor=2.0), (1, 1, 1, 1)))[:, :, 2:-2, 2:-2].abs() + F.interpolate(
            F.leaky_relu(y), size=(60, 60), mode="bilinear", align_corners=True
        )

    return Net(
        run,
        a=nn.Conv2d(3, 16, 3, padding=1),
        b=nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1),
        c=nn.Conv2d(4, 4, 3),
        act=nn.PReLU(16),
    )


def signal():
    def run(net, x):
        y = F.max_pool1d(F.relu(net.norm(net.a(x.flatten(2)))), 3, 2, 1)
        y = F.avg_pool1d(net.up(F.relu(net.b(y))), 2)
        return torch.cat([y.flatten(1), net.second(F.relu(net.first(x))).flatten(1)], 1)

    return Net(
        run,
        a=nn.Conv1d(3, 8, 5, padding=2),
        b=nn.Conv1d(8, 8, 3, stride=2, padding=1, groups=8),
        norm=nn.BatchNorm1d(8),
        up=nn.ConvTranspose1d(8, 4, 2, stride=2, output_padding=1, groups=2),
        first=nn.ConvTranspose2d(3, 6, 3, stride=2, dilation=2, padding=1, output_padding=1, groups=3),
        second=nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2),
    )


def encoder():
    def run(net, x):
        x = net.patch(x).flatten(2).transpose(1, 2)
        q, k, v = net.qkv(net.norm(x)).reshape(x.shape[0], -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1) * 0.35).softmax(-1) @ v
        x = x + y.transpose(1, 2).reshape(x.shape)
        return (x + net.down(F.gelu(net.up(x)))).mean(1)

    return Net(
        run,
        patch=nn.Conv2d(3, 16, 4, stride=4),
        norm=nn.LayerNorm(16),
        qkv=nn.Linear(16, 48),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
    )


def norms():
    def run(net, x):
        x = F.relu(net.norm(net.a(x)))
        x = net.b(x / (torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True) + 1.0))
        return net.pool(F.avg_pool2d(x, 3, 1, 1))

    return Net(
        run,
        a=nn.Conv2d(3, 8, 3),
        norm=nn.GroupNorm(2, 8),
        b=nn.Conv2d(8, 8, 3, padding=1),
        pool=nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False),
    )


def exported(model, path, *, quantized=True, **options):
    torch.manual_seed(0)
    images, model = torch.rand(4, 3, 16, 16) * 2 - 1, model.eval()
    if quantized:
        model = compress.quantize(model, images[:1], [images], spec=compress.QuantSpec(target="litert", **options))
    return compress.export_onnx(model, images[:1], path, labels=["a", "b"]), images.numpy()


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(
    "network", further([residual, squeeze, upscale, signal, norms, encoder], [residual, squeeze, encoder])
)
def test_the_engine_computes_the_onnx_file(tmp_path, network, quantized):
    path, images = exported(network(), tmp_path / "model.onnx", quantized=quantized)
    check_results(path, images, quantized)


def layers_of_near_results(path, images, least):
    # The layers of LiteRT, which computes what ONNX Runtime does of the file, to that many dB.
    with compress.build_engine(path, "onnxruntime", fuse="no") as engine:
        wanted = engine.run({"input": images})
    with compress.build_engine(path, "litert", batch_size=4) as engine:
        got, layers = engine.run({"input": images}), engine.runtime_layers()
    assert wanted.keys() == got.keys()
    assert all(sqnr(wanted[name], got[name]) > least for name in wanted)
    return layers


def check_results(path, images, quantized):
    layers = {layer.kind: layer for layer in layers_of_near_results(path, images, 35 if quantized else 100)}
    assert layers["CONV_2D"].precision == ("i8" if quantized else "f32")
    assert layers["CONV_2D"].kernel == "XNNPACK"


@pytest.mark.parametrize("network", further([residual, upscale, signal, norms, encoder], [residual, upscale]))
def test_activations_of_16_bits_are_integers_too(tmp_path, network):
    # Half of the layers, so that tensors of 8 and 16 bits meet, and all.
    net, wide = network(), compress.ActivationSpec(num_bits=16)
    layers = [name for name, part in net.named_modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Linear))]
    rules = tuple(compress.Rule(match=name, activations=wide) for name in layers[1::2])
    for least, options in ((35, {"rules": rules}), (60, {"activations": wide})):
        kinds = layers_of_near_results(*exported(net, tmp_path / "model.onnx", **options), least)
        products = {layer.precision for layer in kinds if "CONV" in layer.kind or layer.kind == "FULLY_CONNECTED"}
        assert products <= ({"i8", "i16"} if "rules" in options else {"i16"}) and "i16" in products


def _gelu(y, scale=0.5**0.5, one=1.0):
    return y * (torch.erf(y * scale) + one) * 0.5


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (_gelu, ""),
        (lambda y: _gelu(y, scale=0.5), "Erf"),
        (lambda y: _gelu(y, one=2.0), "Erf"),
        (lambda y: (y * 30).int().float() + (y * 50).long() * 0.5, ""),
        (lambda y: F.hardtanh(y, -0.1, 0.15), ""),
        (lambda y: torch.cat([y.repeat(1, 2, 1, 1), y[:, :1].expand(-1, 2, -1, -1)], 1), ""),
        (lambda y: y.clamp(0, 0.1), ""),  # limits of two types, which torch.onnx refuses
        (
            lambda y: torch.where((y > 0) & ~(y <= 0.1) | (y == y.mean((2, 3), keepdim=True)), y, y[0, :2, 0, 0].sum()),
            "",
        ),
        (lambda y: F.softplus(50 * y) + F.mish(y) + F.selu(y) + F.celu(y, 0.7) + F.elu(y, 0.3), ""),
        (lambda y: y + y.argmax(1, keepdim=True) + y.argmax(-1)[..., None], ""),
        (lambda y: F.interpolate(y, scale_factor=1.3, mode="bilinear"), "whole size"),
        (lambda y: F.interpolate(y, size=(5, 5), mode="bilinear", antialias=True), "antialias"),
    ],
)
@pytest.mark.parametrize("quantized", further([True, False], [True]))
def test_what_is_written_computes_the_same_or_is_refused(tmp_path, function, refused, quantized):
    model = Net(lambda net, x: (x, function(net.conv(x))), conv=nn.Conv2d(3, 8, 3))
    path, images = exported(model, tmp_path / "model.onnx", quantized=quantized)
    if refused:
        with pytest.raises(ExportError, match=refused):
            compress.export_litert(path, tmp_path / "model.tflite")
    else:
        check_results(path, images, quantized)


# Attributes by which a transposed convolution states its padding, and the error if LiteRT has no operator for it.
STATED = [
    ({"auto_pad": "SAME_UPPER"}, ""),
    ({"auto_pad": "SAME_LOWER"}, ""),
    ({"auto_pad": "VALID"}, ""),
    ({"output_shape": [15, 17]}, ""),
    ({"output_shape": [15, 16], "auto_pad": "SAME_UPPER"}, ""),
    ({"output_shape": [20, 16]}, "output_shape beyond what its kernel reaches"),
]


@pytest.mark.parametrize(("stated", "refused"), STATED)
def test_pads_that_a_transposed_convolution_does_not_write_out(tmp_path, stated, refused):
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], **stated)
    model = onnx_model([node], {"x": [1, 3, 8, 8]}, {"y": None}, {"w": weights(3, 4, 3, 5)})
    onnx.save(model, tmp_path / "m.onnx")
    if refused:
        with pytest.raises(ExportError, match=refused):
            compress.export_litert(tmp_path / "m.onnx", tmp_path / "m.tflite")
        return
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)
    path = compress.export_litert(tmp_path / "m.onnx", tmp_path / "m.tflite")
    np.testing.assert_allclose(on_engine(path, "litert", x), compute(model, x), atol=1e-4)


def test_two_engines_compute_the_same_integers(tmp_path):
    # ONNX Runtime's QLinear kernels and XNNPACK's, which share no code, of layers that both run in integers.
    path, images = exported(residual(), tmp_path / "model.onnx")
    assert torch.equal(*(on_engine(path, name, images, batch_size=4) for name in ("onnxruntime", "litert")))


def test_a_file_with_the_zero_points_of_another_target_names_it(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
    _, path = exact.exported(network, torch.rand(4, 3, 16, 16) * 2 - 1, tmp_path / "model.onnx", target="openvino")
    with pytest.raises(ExportError, match=r"openvino.*target: litert"):
        compress.export_litert(path, tmp_path / "model.tflite")


def test_scales_zero_points_and_integers_are_those_of_the_onnx_file(tmp_path):
    path, _ = exported(residual(), tmp_path / "model.onnx")
    model = onnx.load(path)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    wanted = {}
    for node in model.graph.node:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            scale, zero = (np.atleast_1d(arrays[name]) for name in node.input[1:])
            shift = 128 if zero.dtype == np.uint8 else 0
            wanted[scale.tobytes(), (zero.astype(int) - shift).tobytes()] = arrays.get(node.input[0])
    written = compress.export_litert(path, tmp_path / "model.tflite").read_bytes()
    file = fb.ModelT.InitFromObj(fb.Model.GetRootAs(written, 0))
    found = set()
    for tensor in file.subgraphs[0].tensors:
        if tensor.quantization is None:
            continue
        key = tensor.quantization.scale.tobytes(), tensor.quantization.zeroPoint.tobytes()
        assert key in wanted, tensor.name
        found.add(key)
        if wanted[key] is not None:  # weights, whose axes are in another order, and biases
            data = np.asarray(file.buffers[tensor.buffer].data, np.uint8).view(wanted[key].dtype)
            assert np.array_equal(np.sort(data), np.sort(wanted[key].reshape(-1)))
    assert found == wanted.keys()


def test_a_file_is_an_engine_and_is_inspected(tmp_path):
    path, images = exported(residual(), tmp_path / "model.onnx")
    file = compress.export_litert(path, tmp_path / "model.tflite", batch_size=2)
    with compress.build_engine(path, "litert") as engine, compress.build_engine(file, "litert") as same:
        assert np.array_equal(
            engine.run({"input": images[:2]})["logits"], same.run({"input": images[:2]})["logits"]
        )  # of a file with an open batch, and of one without
        assert engine.run({"input": images})["logits"].shape == (4, 10)
        assert same.metadata == engine.metadata and LABELS_KEY in same.metadata
        assert same.inputs[0].shape == (2, 3, 16, 16)
        with pytest.raises(EngineError, match="shape"):
            same.run({"input": images})
    audit = compress.audit_engine(file)
    assert audit.share("int8") == 1.0
    assert {layer.tactic for layer in audit.weighted} == {"XNNPACK"}


def test_what_litert_lacks_is_named(tmp_path):
    ranked = Net(lambda net, x: torch.topk(x.flatten(1), 3)[0])
    path, _ = exported(ranked, tmp_path / "model.onnx", quantized=False)
    with pytest.raises(ExportError, match=r"TopK.*onnxruntime"):
        compress.export_litert(path, tmp_path / "model.tflite")
    assert not (tmp_path / "model.tflite").exists()
    (tmp_path / "broken.tflite").write_bytes(b"no file of LiteRT")
    with pytest.raises(EngineError, match="LiteRT file"):
        compress.build_engine(tmp_path / "broken.tflite", "litert")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    path, _ = exported(nn.Conv2d(3, 4, 3), tmp_path / "model.onnx", quantized=False)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    for call, argument in ((compress.build_engine, "litert"), (compress.export_litert, tmp_path / "model.tflite")):
        with pytest.raises(EngineUnavailableError, match=r"compress-vision\[litert\]"):
            call(path, argument)
