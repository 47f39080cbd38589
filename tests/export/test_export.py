import json
import keyword
import string
import sys
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torchvision.models import DenseNet, MobileNetV2, ShuffleNetV2
from torchvision.models.detection import RetinaNet

import compress
from compress.data.base import Preprocessing
from compress.detection import DetectorHead, DetectorNetwork
from compress.errors import ExportError, ModelError
from compress.export import names, targets
from compress.export.nms import NMS_OUTPUTS, export_with_nms
from compress.export.onnx import looked_up_once, prepare, quiet
from compress.export.openvino import batches_kept
from compress.graph.inputs import flat_tensors
from compress.graph.ops import node_kind
from compress.quantization import TARGETS
from compress.quantization.sensitivity import sqnr
from tests.exact import WEIGHTS, compute, on_engine, open_session, optimized
from tests.further import further
from tests.networks import Net, TinyResNet, network
from tests.onnx_models import onnx_model
from tests.tiny_detectors import FAMILIES, SIZE

X = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
MAX = compress.ActivationSpec(calibrator="max")


def quantized(model=None, x=X, **changes):
    spec = compress.QuantSpec(**{"activations": MAX, **changes})
    return compress.quantize(model or network(), x[:2], [x], spec=spec)


def exported(folder, model=None, x=X, *, precision="fp32", **changes):
    # A quantized network, and its file.
    qmodel = quantized(model, x, **changes)
    return qmodel, compress.export_onnx(qmodel, x[:1], folder / "m.onnx", precision=precision)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    qmodel, out = quantized(), tmp_path_factory.mktemp("written") / "m.onnx"
    told = {"preprocessing": Preprocessing(image_size=16), "labels": list("abc"), "metadata": {"k": "v"}}
    return qmodel, compress.export_onnx(qmodel, X[:1], out, **told)


def run(path, x=X):
    return open_session(path, optimize=False).run(None, {"input": x.numpy()})[0]


def assert_computed(path, model, x=X, share=0.01):
    # Values on the border of two steps may fall to either side of it: `share` of the largest one.
    expected = model(x).detach().numpy()
    np.testing.assert_allclose(run(path, x), expected, atol=share * float(np.abs(expected).max()) + 1e-6)


def constants(path):
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("target", TARGETS)
def test_file_computes_what_fake_quantization_does(target, tmp_path):
    qmodel, path = exported(tmp_path, target=target)
    assert_computed(path, qmodel)
    expected = qmodel(X).detach().numpy()
    found = ReferenceEvaluator(str(path)).run(None, {"input": X.numpy()})[0]
    np.testing.assert_allclose(found, expected, atol=float(np.abs(expected).max()) / 100)


def test_what_stands_in_the_file(written):
    qmodel, path = written
    model, audit = onnx.load(path), compress.audit_onnx(path)
    onnx.checker.check_model(model, full_check=True)
    assert audit.ops["QuantizeLinear"] == len(qmodel.placement.activations)
    assert audit.ops["DequantizeLinear"] == len(qmodel.placement.activations) + len(qmodel.placement.weights)
    assert "BatchNormalization" not in audit.ops and audit.ops["GlobalAveragePool"] == 1
    assert all(row.int8 and row.per_channel and row.weight_type == "int8" for row in audit.rows)
    assert {row.name for row in audit.rows} >= {"/conv1/Conv", "/block2/downsample/0/Conv", "/fc/Gemm"}
    own = constants(path)
    integers = [v for v in own.values() if v.dtype == np.int8 and v.ndim > 1]
    assert len(integers) == len(audit.rows) and all(v.min() >= -127 for v in integers)
    assert any(v.dtype == np.float32 and v.ndim == 1 for v in own.values())  # scales and biases stay float
    assert not [v for v in own.values() if v.dtype == np.float32 and v.ndim > 1]  # no float weight is left


def test_integers_are_those_of_fake_quantization(tmp_path):
    qmodel, path = exported(tmp_path, weights=compress.WeightSpec(num_bits=4))
    scale, weight = qmodel.fc.weight_quantizer.scale.numpy(), qmodel.fc.quantized_weight.detach().numpy()
    (found,) = [v for v in constants(path).values() if v.dtype == np.int8 and v.shape == weight.shape]
    np.testing.assert_array_equal(found, np.rint(weight / scale[:, None]).astype(np.int8))
    assert np.abs(found).max() == 7


def sizes(path):
    return [d.dim_value for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]


def test_batch_is_dynamic_or_not(written, tmp_path):
    qmodel, dynamic = written
    assert run(dynamic, X[:1]).shape == (1, 10) and run(dynamic).shape == (6, 10)
    assert sizes(compress.export_onnx(qmodel, X[:1], tmp_path / "s.onnx", dynamic_batch=False)) == [1, 3, 16, 16]


def test_a_batch_that_the_network_fixes_is_not_silently_two(tmp_path):
    model = Net(lambda net, x: torch.stack([row * i for i, row in zip(range(len(x)), x.flatten(1), strict=True)]))
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(ExportError, match="the batch size of input cannot be left open"):
        compress.export_onnx(model, x, tmp_path / "m.onnx")
    assert sizes(compress.export_onnx(model, x, tmp_path / "m.onnx", dynamic_batch=False)) == [1, 3, 4, 4]


def test_a_convolution_with_as_many_groups_as_images_is_told_to_fix_them(tmp_path):
    def forward(net, x):
        kernels = net.fc(x.mean((2, 3))).view(-1, 1, 3, 3)
        return F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernels, groups=x.shape[0] * 3)

    model, x = Net(forward, fc=nn.Linear(3, 27)).eval(), torch.randn(4, 3, 8, 8)
    with pytest.raises(ExportError, match=r"groups=x\.shape\[0\].*dynamic_batch=False"):
        compress.export_onnx(model, x, tmp_path / "m.onnx")
    path = compress.export_onnx(model, x, tmp_path / "m.onnx", dynamic_batch=False)
    assert np.allclose(run(path, x), model(x).detach().numpy(), atol=1e-5)


def test_half_precision_remainder(tmp_path):
    qmodel, path = exported(tmp_path, precision="fp16")
    assert compress.audit_onnx(path).float_type == "float16"
    assert not [v for v in constants(path).values() if v.dtype == np.float32]
    assert run(path).dtype == np.float32
    assert_computed(path, qmodel, share=0.05)


def test_fewer_bits_of_activations_are_exact(tmp_path):
    qmodel, path = exported(tmp_path, activations=compress.ActivationSpec(num_bits=4, calibrator="max"))
    assert_computed(path, qmodel, share=0.1)
    assert compress.audit_onnx(path).ops["Clip"] == len(qmodel.placement.activations)


def test_batchnorm_kept_in_training_folds_at_export_and_what_a_rule_left_float_is_told(tmp_path):
    qmodel, path = exported(tmp_path, batchnorm="keep", rules=(compress.Rule(match="fc", enable=False),))
    assert [m for m in qmodel.modules() if isinstance(m, nn.BatchNorm2d)]
    assert_computed(path, qmodel.eval())
    assert "BatchNormalization" not in compress.audit_onnx(path).ops
    assert [row.name for row in compress.audit_onnx(path).rows if not row.int8] == ["/fc/Gemm"]


def test_batchnorm_kept_after_groups_of_a_transposed_convolution_stays(tmp_path):
    # Its groups share the scales of their outputs, so that no scale could take up BatchNorm's factors.
    norm = nn.BatchNorm2d(6)
    for values in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        values.uniform_(0.5, 2.0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, groups=2), norm).eval()
    qmodel, path = exported(tmp_path, model, batchnorm="keep")
    assert_computed(path, qmodel)
    audit = compress.audit_onnx(path)
    assert audit.ops["BatchNormalization"] == 1 and all(row.int8 for row in audit.rows)


def test_float_models_export_folded(tmp_path):
    path = compress.export_onnx(network(), X[:1], tmp_path / "m.onnx")
    np.testing.assert_allclose(run(path), network()(X).detach().numpy(), rtol=1e-4, atol=1e-5)
    audit = compress.audit_onnx(path)
    assert audit.int8_share == 0 and "BatchNormalization" not in audit.ops
    assert all(row.reason == "its input is not quantized; its weight is not quantized" for row in audit.rows)


def test_numbers_and_texts_beside_tensors_are_left_out(tmp_path):
    model = Net(lambda net, x: {"twice": 2 * x, "count": 3, "parts": [x.sum(1), "name"]})
    path = compress.export_onnx(model, X[:1], tmp_path / "m.onnx")
    got = open_session(path).run(None, {"input": X.numpy()})
    np.testing.assert_allclose(got[0], 2 * X.numpy(), rtol=1e-6)
    np.testing.assert_allclose(got[1], X.sum(1).numpy(), rtol=1e-4, atol=1e-5)


def shares(net, x):
    x = x.relu()
    return x / (x.sum(1, keepdim=True) + 1e-12) + x / (1e-8 + x.sum(1, keepdim=True)).sub(1e-10)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_small_number_keeps_zero_from_being_divided_by_zero(precision, tmp_path):
    x = torch.tensor([[-1.0, -2.0], [1.0, -2.0]])[..., None, None].expand(2, 2, 3, 3)
    path = compress.export_onnx(Net(shares), x, tmp_path / "shares.onnx", precision=precision)
    np.testing.assert_allclose(run(path, x), shares(None, x).numpy(), atol=2e-3)


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(IsADirectoryError, match="it is a folder; name a file"):
        compress.export_onnx(network(), X[:1], tmp_path)
    assert not list(tmp_path.iterdir())


def test_attention_of_five_axes_exports(tmp_path):
    # Attention within windows, as an axis before the heads: torch.onnx takes four axes (Twins has five).
    def windows(net, x):
        x = x.unflatten(2, (4, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x.cos(), x.sin())

    path = compress.export_onnx(Net(windows), X[:1], tmp_path / "m.onnx")
    np.testing.assert_allclose(run(path), windows(None, X).numpy(), rtol=1e-4, atol=1e-5)


def test_the_exporter_is_silent_and_other_threads_are_not(capfd):
    def speak(words):
        print(words, file=sys.stderr)
        warnings.warn(words, UserWarning, stacklevel=1)

    with pytest.warns(UserWarning) as seen, quiet():
        speak("of the exporter")
        thread = threading.Thread(target=speak, args=["of a thread"])
        thread.start()
        thread.join()
    assert [str(one.message) for one in seen] == ["of a thread"]
    print("afterwards", file=sys.stderr)
    assert capfd.readouterr().err == "of a thread\nafterwards\n"


def test_metadata(written):
    found = compress.audit_onnx(written[1]).metadata
    assert Preprocessing.from_json(found["compress.preprocessing"]) == Preprocessing(image_size=16)
    assert json.loads(found["compress.labels"]) == ["a", "b", "c"] and found["k"] == "v"


ARCHITECTURES = {  # every kind of block of the network, few of each
    "mobilenet_v2": lambda: MobileNetV2(inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]),
    "densenet": lambda: DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16),
    "shufflenet_v2": lambda: ShuffleNetV2([2, 1, 1], [24, 48, 96, 192, 256]),
}


@pytest.mark.parametrize("name", further(ARCHITECTURES, ["mobilenet_v2"]))
def test_other_architectures(name, tmp_path):
    x = torch.randn(2, 3, 32, 32)
    qmodel, path = exported(tmp_path, ARCHITECTURES[name]().eval(), x)
    assert_computed(path, qmodel, x, share=0.05)
    assert all(row.int8 for row in compress.audit_onnx(path).rows)


def overwriting(net, x):
    # The results of activations in place that return what later layers read, and of those that do not.
    kept = net.one(x)
    net.act(kept)
    x = net.own(net.two(x))
    x += kept
    kept += net.three(x)
    return net.act(x) + kept


def read_before_and_after(net, x):
    y = net.one(x)
    z = y.sigmoid()
    y.add_(x).relu_()
    return z - y


WRITES = {
    "several layers": overwriting,
    "another reader before": read_before_and_after,
    "a view of the result": lambda net, x: net.one(x).flatten(1).relu_(),
    "a result behind its view": lambda net, x: (lambda y: (y[:, :1].mul_(3), y))(net.one(x))[1],
    "one after the other": lambda net, x: net.one(x).mul_(2).add_(x).clamp_(-1, 2).mean((2, 3)),
    "the image": lambda net, x: (x.relu_(), net.one(x))[1] - x,
    "another type": lambda net, x: net.one(x).gt(0).add(1).mul_(x.gt(1)).float() + x,
    "two flattenings": lambda net, x: (net.one(x).flatten(1).mean(1, True) + x.flatten(1)) * x.flatten(2).flatten(1),
    "an average": lambda net, x: F.adaptive_avg_pool2d(net.one(x).relu_(), 1).sigmoid_() * x,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("traced", [True, False], ids=["graph", "module"])
def test_what_is_changed_in_place_is_read_changed(write, traced, tmp_path):
    layers = {name: nn.Conv2d(3, 3, 3, padding=1) for name in ("one", "two", "three")}
    model = Net(WRITES[write], **layers, act=nn.ReLU6(True), own=nn.ReLU6(True)).eval()
    model = torch.fx.symbolic_trace(model) if traced else model
    path = compress.export_onnx(model, X[:1], tmp_path / "m.onnx")
    expected = model((X * 4).clone()).detach()
    np.testing.assert_allclose(run(path, X * 4), expected, rtol=1e-4, atol=1e-5)


@dataclass
class Boxes:
    logits: torch.Tensor
    boxes: torch.Tensor
    loss: torch.Tensor | None = None


def detector(form):
    # Returns a dict, a dataclass or a tuple, made by `form`.
    def run(net, x):
        x = net.conv(x).relu().mean((2, 3))
        return net.form(logits=net.fc(x), boxes=net.box(x))

    return Net(run, form=form, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 5), box=nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("form", "precision", "names"),
    [
        (dict, "fp32", ["logits", "boxes"]),
        (Boxes, "fp16", ["logits", "boxes"]),
        (lambda logits, boxes: (logits, boxes), "fp32", ["output_0", "output_1"]),
    ],
)
def test_several_outputs_have_the_names_of_their_keys(form, precision, names, tmp_path):
    qmodel, path = exported(tmp_path, detector(form).eval(), precision=precision)
    assert [output.name for output in onnx.load(path).graph.output] == names
    found = open_session(path).run(None, {"input": X.numpy()})
    for got, expected in zip(found, flat_tensors(qmodel(X)), strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), atol=0.02)


def test_a_key_may_be_called_as_a_value_within_the_graph(tmp_path):
    def run(net, x):  # torch.onnx names the results of functions `relu`, `mean`, `softmax`
        x = net.conv(x).relu().mean((2, 3))
        return {"mean": net.fc(x).softmax(1), "relu": net.box(x), "softmax": x}

    model = Net(run, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 5), box=nn.Linear(8, 4)).eval()
    session = open_session(compress.export_onnx(model, X[:1], tmp_path / "m.onnx"))
    assert [value.name for value in session.get_outputs()] == ["mean", "relu", "softmax"]
    for got, expected in zip(session.run(None, {"input": X.numpy()}), model(X).values(), strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), atol=1e-5)


def test_weights_computed_by_weight_norm_are_quantized_as_they_are(tmp_path):
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5)).eval()
    qmodel, path = exported(tmp_path, model)
    step = model[0].weight.abs().amax((1, 2, 3)) / 127
    worst = ((qmodel.get_submodule("0").quantized_weight - model[0].weight).abs().amax((1, 2, 3)) / step).max()
    assert float(worst) <= 0.5 + 1e-4
    assert {name for name, _ in qmodel.named_parameters()} == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert compress.audit_onnx(path).rows[0].int8


def test_a_parametrized_model_is_left_as_it_was_by_its_export(tmp_path):
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), spectral_norm(nn.Conv2d(8, 4, 3)), nn.Flatten()).eval()
    expected, names = model(X), set(model.state_dict())
    path = compress.export_onnx(model, X[:1], tmp_path / "m.onnx")
    np.testing.assert_allclose(run(path), expected.detach().numpy(), atol=1e-5)
    assert torch.equal(model(X), expected) and set(model.state_dict()) == names


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        (lambda: nn.Conv2d(3, 8, 3).half(), {}, ExportError, r"torch.float32: RuntimeError: .*model.float\(\)"),
        (lambda: torch.jit.script(nn.Conv2d(3, 8, 3)), {}, ExportError, "scripted or traced from"),
        (lambda: torch.relu, {}, ModelError, "must be a torch.nn.Module"),
        (lambda: compress.insert_quantizers(TinyResNet(), X[:2]), {}, ExportError, "no ranges"),
        (network, {"opset": 13}, ExportError, "opset is 13"),
        (network, {"precision": "int4"}, ExportError, "precision is 'int4'"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_words(model, options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        compress.export_onnx(model(), X[:1], tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_what_stops_the_exporter_is_told_in_one_line(tmp_path, capfd):
    with pytest.raises(ExportError, match="cannot export the model") as caught:
        compress.export_onnx(Net(lambda net, x: x if x.sum() > 0 else -x), X[:1], tmp_path / "m.onnx")
    text = str(caught.value)
    assert "\x1b" not in text and "\n" not in text and "Next steps" not in text
    assert capfd.readouterr() == ("", "")  # torch prints the graph that it had so far


def test_the_audit_follows_what_placement_follows(tmp_path):
    # The quantizer is before a pixel shuffle, and the convolution after it computes in INT8.
    model, x = nn.Sequential(nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(3, 4, 1)), torch.randn(2, 12, 6, 6)
    audit = compress.audit_onnx(compress.export_onnx(compress.quantize(model, x, [x]), x, tmp_path / "m.onnx"))
    assert "DepthToSpace" in audit.ops and [row.reason for row in audit.rows] == [""]


def test_random_slopes_are_written_as_their_mean(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.RReLU(0.2, 0.6), nn.Conv2d(4, 4, 3)).eval()
    qmodel, path = exported(tmp_path, model)
    np.testing.assert_allclose(run(path), qmodel(X).detach().numpy(), atol=1e-5)
    assert [node.attribute[0].f for node in onnx.load(path).graph.node if node.op_type == "LeakyRelu"] == [
        pytest.approx(0.4)
    ]
    assert isinstance(qmodel.get_submodule("1"), nn.RReLU)


# Names in exported files: what is written is found, in a file that torch's exporter and a real engine have named.

part = st.text(string.ascii_lowercase + string.digits + "_", min_size=1, max_size=5).filter(
    lambda text: not keyword.iskeyword(text)
)
module = st.lists(part, min_size=1, max_size=4).map(".".join)


@given(module, st.sampled_from(["Conv", "Gemm", "DequantizeLinear"]), st.integers(0, 12))
def test_a_module_is_found_in_the_name_of_its_node(path, op_type, number):
    node = names.node_name(path, op_type, number)
    assert names.module_of(node) == path
    assert node.startswith(names.module_prefix(path))
    assert names.find_module(f"Convert_{node}_f16", [path]) == path
    assert names.is_node(node, node) and names.is_node(f"{node}/bias", node) and not names.is_node(f"{node}x", node)


def test_the_innermost_module_that_comes_first_is_found():
    known = ["block", "block.conv", "fc"]
    assert names.find_module("/block/conv/Conv", known) == "block.conv"
    assert names.find_module("/block/Add_/fc/Gemm", known) == "block"
    assert names.find_module("/other/Conv", known) is None
    assert names.module_of("/layer1/0/conv1/Conv") == "layer1.0.conv1"


def test_an_exported_file_has_these_names(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Flatten()).eval()
    qmodel, path = exported(tmp_path, model)
    graph = onnx.load(path).graph
    assert [node.name for node in graph.node if node.op_type == "Conv"] == [
        names.node_name("0", "Conv"),
        names.node_name("2.0", "Conv"),
    ]
    written = {name for node in graph.node for name in node.output}
    quantizers = [str(node.target) for node in qmodel.graph.nodes if node_kind(node) == "quantizer"]
    assert quantizers and {names.quantized_tensor(quantizer) for quantizer in quantizers} <= written
    assert [value.name for value in graph.input] == names.input_names(1)
    assert names.logits_output([value.name for value in graph.output]) == "logits"


@pytest.mark.parametrize(
    ("keys", "taken", "expected"),
    [
        ([""], (), ["logits"]),
        (["out", "aux"], (), ["out", "aux"]),
        (["0", "1"], (), ["output_0", "output_1"]),
        (["input", "aux"], ("input",), ["output_0", "output_1"]),
    ],
)
def test_outputs_have_the_names_of_keys_or_are_numbered(keys, taken, expected):
    assert names.output_names(keys, taken=taken) == expected
    assert names.logits_output(expected) == (expected[0] if expected[0] in {"logits", "out", "output_0"} else None)


# A Reshape that keeps the batch does not compute its size; ONNX Runtime says that the results stay the same.


def model(nodes, batch="batch", **others):
    # A model of open batches, of which every input has the name of its own batch.
    return onnx_model(nodes, {"x": (batch, 3, 9, 9), **others}, {"y": None}, CONSTANTS, opset=17, ir_version=8)


def computed(proto, **feeds):
    return open_session(proto).run(None, feeds)[0]


CONSTANTS = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1]), "w": np.ones((4, 3, 3, 3), np.float32)}
ASKED = [
    helper.make_node("Shape", ["x"], ["s"]),
    helper.make_node("Gather", ["s", "zero"], ["n"]),
    helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
]
CONV = helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2])
SHAPED = helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0)


def assert_kept(proto):
    # One Reshape keeps the batch now, and the results are the same.
    before = onnx.ModelProto.FromString(proto.SerializeToString())
    assert batches_kept(proto) == 1
    for images in (1, 2, 5):
        x = np.random.default_rng(images).normal(size=(images, 3, 9, 9)).astype(np.float32)
        np.testing.assert_array_equal(computed(proto, x=x), computed(before, x=x))


@pytest.mark.parametrize("batch", ["batch", None])
@pytest.mark.parametrize("asked", [ASKED, [helper.make_node("Shape", ["x"], ["n1"], start=0, end=1)]])
def test_a_reshape_that_keeps_the_batch_computes_nothing(asked, batch):
    proto = model([*asked, CONV, SHAPED, helper.make_node("Reshape", ["c", "shape"], ["y"])], batch)
    assert_kept(proto)
    assert [node.op_type for node in proto.graph.node] == ["Conv", "Reshape"]


def test_a_size_that_is_another_ones_stays_computed():
    proto = model([*ASKED, SHAPED, helper.make_node("Reshape", ["other", "shape"], ["y"])], other=("rows", 6))
    assert batches_kept(proto) == 0
    assert computed(proto, x=np.ones((4, 3, 9, 9), np.float32), other=np.ones((2, 6), np.float32)).shape == (4, 3)


def test_sizes_that_are_read_elsewhere_stay():
    flat = helper.make_node("Reshape", ["c", "shape"], ["flat"])
    number, product = (
        helper.make_node("Cast", ["n"], ["number"], to=1),
        helper.make_node("Mul", ["flat", "number"], ["y"]),
    )
    assert_kept(model([*ASKED, CONV, SHAPED, flat, number, product]))


def test_a_second_computed_size_stays():
    nodes = [*ASKED, CONV, helper.make_node("Concat", ["rest", "n1"], ["shape"], axis=0)]
    reshape = helper.make_node("Reshape", ["c", "shape"], ["y"])
    assert batches_kept(model([*nodes, reshape])) == 0


# Detectors with non-maximum suppression in the file, against torchvision's own decoding of whole pictures.


CLASSES = 3
# Fewer than there are anchors, so that the choice of candidates counts.
CANDIDATES = {"retinanet": 60, "fcos": 40, "ssd": 50}


@cache
def decoder(name):
    torch.manual_seed(3)
    made = FAMILIES[name](CLASSES).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
        for path, parameter in made.head.named_parameters():
            if parameter.dim() == 1 and "cls" in path:
                parameter.normal_(-1, 1)
    made.topk_candidates, made.detections_per_img, made.score_thresh = CANDIDATES[name], 30, 0.1
    return made, DetectorNetwork(made), torch.randn(2, 3, *SIZE)


@cache
def files(name):
    # The files of a decoder without and with suppression.
    made, network, pictures = decoder(name)
    folder = Path(mkdtemp())
    plain = compress.export_onnx(network, pictures, folder / "plain.onnx")
    return plain, export_with_nms(plain, DetectorHead(made, SIZE, CLASSES).boxes_and_scores(), folder / "nms.onnx")


def found(engine, pictures):
    # The boxes that an engine returns, place by place.
    boxes, scores, labels = (torch.from_numpy(engine.run({"input": pictures.numpy()})[n]) for n in NMS_OUTPUTS)
    assert boxes.shape == (len(pictures), scores.shape[1], 4)
    return [
        {"boxes": b[s > 0], "scores": s[s > 0], "labels": n[s > 0]}
        for b, s, n in zip(boxes, scores, labels, strict=True)
    ]


@pytest.mark.parametrize("engine_name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", further(FAMILIES, ["ssd"]))
def test_boxes_are_those_of_torchvisions_decoding(name, engine_name):
    made, network, pictures = decoder(name)
    precision = "f32" if engine_name == "openvino" else None
    with compress.build_engine(files(name)[1], engine_name, batch_size=2, precision=precision) as engine:
        got = found(engine, pictures)
    wanted = DetectorHead(made, SIZE, CLASSES).decode(tuple(network(pictures).values()))
    for one, other in zip(got, wanted, strict=True):
        assert len(one["scores"]) == len(other["scores"]) > 10
        torch.testing.assert_close(one["scores"], other["scores"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one["boxes"], other["boxes"], rtol=1e-3, atol=0.05)
        assert torch.equal(one["labels"], other["labels"])


def test_a_file_of_another_detector_is_refused(tmp_path):
    made, _, _ = decoder("retinanet")
    decoding = DetectorHead(made, SIZE, CLASSES).boxes_and_scores()
    with pytest.raises(ExportError, match="the decoding takes cls_logits, bbox_regression of 240 anchors"):
        export_with_nms(files("fcos")[0], decoding, tmp_path / "nms.onnx")
    assert not list(tmp_path.iterdir())


def test_a_decoding_of_ones_own_is_refused():
    class Own(RetinaNet):
        def postprocess_detections(self, *outputs):
            return super().postprocess_detections(*outputs)

    made, _, _ = decoder("retinanet")
    own = Own(made.backbone, CLASSES, anchor_generator=made.anchor_generator)
    with pytest.raises(ModelError, match="decodes its boxes in another way"):
        DetectorHead(own, SIZE, CLASSES).boxes_and_scores()


# Operations that an exporter does not know are spelled as others; the oracle is ONNX's reference evaluator.


def test_adaptive_maxima_over_equal_windows_are_maxima(tmp_path):
    def run(net, x):
        x = net.conv(x)
        y = net.pool(x)
        row = net.row(x.flatten(2)) + net.row(y.flatten(2))
        return row.flatten(1) + F.adaptive_max_pool2d(y, 1).flatten(1).repeat(1, 2)

    pools = {"pool": nn.AdaptiveMaxPool2d((4, 2)), "row": nn.AdaptiveMaxPool1d(2)}
    model, x = Net(run, conv=nn.Conv2d(3, 8, 3, padding=1), **pools).eval(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(prepare(model, x), (x,))
    assert not [node for node in program.graph.nodes if "adaptive" in str(node.target)]
    path = compress.export_onnx(model, x, tmp_path / "pools.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)
    assert any(node.name.startswith("/pool") for node in onnx.load(path).graph.node)


def assert_integers(path, model, x, least):
    # All layers are in integers, and ONNX Runtime's results that near to the float model's, in dB.
    assert compress.audit_onnx(path).int8_share == 1
    assert sqnr(model(x).detach(), torch.from_numpy(compute(path, x.numpy()))) > least


def both_ways(model, x, folder, spec):
    # The quantized model's file, and the float model's file quantized.
    yield compress.export_onnx(compress.quantize(model, x, [x], spec=spec), x, folder / "torch.onnx")
    yield compress.quantize_onnx(compress.export_onnx(model, x, folder / "float.onnx"), [x], spec=spec)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_layers_after_uneven_maxima_are_in_integers(target, tmp_path):
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d((3, 5)), nn.Flatten(), nn.Linear(60, 4))
    model, x = pooled.eval(), torch.randn(4, 3, 10, 10)
    _, path = exported(tmp_path, model, x, target=target, weights=WEIGHTS)
    assert_integers(path, model, x, 28)


@pytest.mark.parametrize("kind", [nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d])
@pytest.mark.parametrize("size", [(3, 5), (11, 8), (None, 3)])
def test_windows_of_several_sizes_are_slices(size, kind, tmp_path):
    # A pooling of equal windows would compute something else.
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), kind(size)).eval(), torch.randn(3, 3, 8, 8)
    path = compress.export_onnx(model, x[:2], tmp_path / "pool.onnx")
    assert "GatherND" not in {node.op_type for node in onnx.load(path).graph.node}  # which LiteRT does not have
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_tail_of_log_sigmoid_is_in_the_file(tmp_path, quantized):
    # The function and the module, on inputs far below -18, where ONNX Runtime's sigmoid ends.
    def run(net, x):
        y = 40 * net.conv(x)
        return torch.cat([F.logsigmoid(y), net.module(y)], 1)

    model, x = Net(run, conv=nn.Conv2d(3, 4, 1), module=nn.LogSigmoid()).eval(), torch.randn(2, 3, 6, 6)
    model = compress.quantize(model, x, [x]) if quantized else model
    path = compress.export_onnx(model, x, tmp_path / "m.onnx")
    expected = model(x).detach().numpy()
    assert expected.min() < -30
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        (got,) = onnxruntime.InferenceSession(str(path), options).run(None, {"input": x.numpy()})
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [3, 40])
def test_windows_over_the_edge_are_averaged_on_onnx_runtime_as_in_torch(window, tmp_path):
    pool = nn.AvgPool2d(window, 2 if window == 3 else None, ceil_mode=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(8, 4, 1)).eval()
    images = torch.randn(4, 3, 8, 8)
    qmodel, path = exported(tmp_path, model, images, target="onnxruntime")
    assert sqnr(qmodel(images).detach(), on_engine(path, "onnxruntime", images, batch_size=4)) > 30


@pytest.mark.parametrize(("vnni", "bits"), [(True, 8), (False, 7), (False, 8)])
def test_onnx_runtime_is_exact_in_any_session_without_vnni(vnni, bits, tmp_path, monkeypatch):
    # The session is a stranger's, with no option set; unsigned weights are slower, and only where sums saturate.
    def run(net, x):
        y = net.pool(F.relu(net.group(net.conv(x) + 1)))
        return net.fc(y.flatten(1)) @ net.w

    w, layers = nn.Parameter(torch.rand(10, 8)), {"conv": nn.Conv2d(3, 16, 3), "group": nn.Conv2d(16, 32, 3, groups=2)}
    model = Net(run, w=w, pool=nn.AvgPool2d(3), fc=nn.Linear(128, 10), **layers).eval()
    for layer in (model.conv, model.group, model.fc):
        layer.weight.data.abs_()  # two products of one sign saturate
    x = torch.rand(4, 3, 10, 10)
    spec = compress.QuantSpec(target="onnxruntime", weights=compress.WeightSpec(num_bits=bits), bias_correction=None)
    monkeypatch.setattr(targets, "sums_bytes_in_16_bits", lambda: not vnni)
    for path in both_ways(model, x, tmp_path, spec):
        weights = [one for one in onnx.load(path).graph.initializer if len(one.dims) > 1 and one.data_type < 4]
        assert {(one.data_type, len(weights)) for one in weights} == {(3 if vnni or bits == 7 else 2, 4)}
        assert compress.audit_onnx(path).int8_share == 1
        if not vnni:
            (got,) = onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})
            assert sqnr(model(x).detach(), torch.from_numpy(got)) > 30


@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid])
@pytest.mark.parametrize(
    "activation", [F.silu, F.hardswish, lambda x: x * torch.sigmoid(x), lambda x: x * F.relu6(x + 3) / 6]
)
@pytest.mark.parametrize("scale", [0.3, 1, 8])  # gates near a half, usual ones, and such as are 0 or 1
def test_gates_are_computed_in_integers_by_onnx_runtime(activation, gate, scale, tmp_path):
    def forward(net, x):
        x = activation(net.first(x))
        x = x * gate(net.gate(x.mean((2, 3), keepdim=True)))
        return net.last(x + activation(net.second(x))).mean((2, 3))

    layers = {"first": nn.Conv2d(3, 16, 3), "gate": nn.Conv2d(16, 16, 1), "second": nn.Conv2d(16, 16, 3, padding=1)}
    model, x = Net(forward, last=nn.Conv2d(16, 8, 1), **layers).eval(), scale * torch.randn(4, 3, 12, 12)
    spec = compress.QuantSpec(target="onnxruntime", weights=WEIGHTS)
    wanted, simulated = model(x).detach(), compress.quantize(model, x, [x], spec=spec)(x).detach()
    for path in both_ways(model, x, tmp_path, spec):
        kinds = [node.op_type for node in onnx.load(optimized(path)).graph.node]
        assert kinds.count("QLinearMul") == 3 and not {"Mul", "Div", "Clip", "HardSwish"}.intersection(kinds)
        assert kinds.count("Sigmoid") == 0 and kinds.count("HardSigmoid") <= 1  # of a number for each channel
        got = torch.from_numpy(compute(path, x.numpy()))
        assert sqnr(wanted, got) > min(28, sqnr(wanted, simulated) - 3)
        assert sqnr(got, torch.from_numpy(run(path, x))) > 35  # fused or not
        stripped = compress.dequantize_onnx(path, tmp_path / "again.onnx")
        assert sqnr(wanted, torch.from_numpy(run(stripped, x))) > 28


@pytest.mark.parametrize(
    "turned", [lambda x: x.mT, lambda x: torch.einsum("b i j->bji", x), lambda x: torch.einsum("...ij", x).mT]
)
def test_axes_in_another_order_keep_layers_in_integers(turned, tmp_path):
    # torch.onnx writes .mT as an Einsum, through which no engine takes a pair.
    def run(net, x):
        return turned(net.fc(turned(net.conv(x).relu().flatten(2)))).sum(1)

    model, x = Net(run, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 4)).eval(), torch.rand(2, 3, 8, 8)
    for path in both_ways(model, x, tmp_path, compress.QuantSpec(target="onnxruntime")):
        assert "Einsum" not in {node.op_type for node in onnx.load(path).graph.node}
        assert_integers(path, model, x, 30)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("rows", ["mask", "pairs"])
def test_layers_after_rows_by_several_indices_are_in_integers(rows, target, tmp_path):
    # A GatherND, through which neither engine takes a pair.
    def run(net, x):
        x = net.conv(x).relu().flatten(2).transpose(1, 2)
        x = x[x.mean(-1) > 0] if rows == "mask" else x[torch.arange(len(x))[:, None], torch.tensor([[0, 7]])]
        return net.fc(x)

    model, x = Net(run, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 4)).eval(), torch.rand(2, 3, 8, 8)
    qmodel, path = exported(tmp_path, model, x, target=target, weights=WEIGHTS)
    assert compress.audit_onnx(path).int8_share == 1
    with compress.build_engine(path, target, precision="f32", profile="yes") as engine:
        (got,) = engine.run({"input": x.numpy()}).values()
        ran = [
            one.precision
            for one in engine.runtime_layers()
            if one.kind in {"QGemm", "MatMulIntegerToFloat", "FullyConnected"}
        ]
    assert ran == ["u8"] and sqnr(qmodel(x).detach(), torch.from_numpy(got)) > 40


def test_averages_keep_their_divisor(tmp_path):
    def run(net, x):
        x = net.pool(net.conv(x))
        return F.avg_pool2d(x, 2, 1, 0, False, True, 3) + F.avg_pool2d(x, (2, 2), stride=1, divisor_override=7)

    pool, x = nn.AvgPool2d(3, 2, 1, divisor_override=5), torch.randn(2, 3, 8, 8)
    model = Net(run, conv=nn.Conv2d(3, 8, 3, padding=1), pool=pool).eval()
    path = compress.export_onnx(model, x, tmp_path / "averages.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)
    with pytest.raises(ExportError, match="divisor_override and ceil_mode"):
        compress.export_onnx(nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=5), x, tmp_path / "ceil.onnx")


# torch's table of ONNX functions from the cache, against the one that torch builds itself.


def test_the_table_is_torchs_own_and_no_export_changes_the_next():
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    before = registry.__dict__["from_torchlib"]
    with looked_up_once():
        registry().from_torchlib(opset_version=19).functions.clear()
        registry.from_torchlib(opset_version=19).functions["aten::relu"].clear()
        third = registry.from_torchlib(opset_version=19)
    assert registry.__dict__["from_torchlib"] is before
    own = registry.from_torchlib(opset_version=19)
    assert third.opset_version == own.opset_version == 19
    rows = [{k: [row.onnx_function for row in rows] for k, rows in t.functions.items()} for t in (third, own)]
    assert rows[0] == rows[1]
    with pytest.raises(ValueError, match="no"), looked_up_once():
        raise ValueError("no")
    assert registry.__dict__["from_torchlib"] is before


def test_composite_operators_are_those_that_torch_names_itself():
    utils = pytest.importorskip("torch._export.utils")
    before = utils._materialize_cpp_cia_ops
    own = set(utils._collect_all_valid_cia_ops())
    with looked_up_once():
        found = [set(utils._collect_all_valid_cia_ops()) for _ in range(2)]
    assert utils._materialize_cpp_cia_ops is before
    assert own == found[0] == found[1] and len(own) > 100
