# Methods beyond calibration on files give what they give on the torch model that the file was exported from.

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import compress
from analysis.random_networks import readers
from analysis.random_networks.check import TARGETS as RANDOM_TARGETS
from analysis.random_networks.network import TABLES, Step
from compress.onnx_ptq import calibrate
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization import TARGETS
from compress.quantization.numerics import scale_from_amax
from examples.yolo import Yolo
from tests.exact import compute
from tests.families import FAMILIES
from tests.further import further
from tests.networks import Net, TinyResNet, with_statistics
from tests.onnx_models import onnx_model
from tests.onnx_ptq.files import attention, batches, export, gated_net, model_of, run, shuffled, sqnr, weights

MAX = compress.ActivationSpec(calibrator="max")


def unequal():
    # Two convolutions whose channels have ranges from 0.01 to 100, which undo each other.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    factors = torch.logspace(-2, 2, 8)
    model[0].weight.data.mul_(factors[:, None, None, None])
    model[0].bias.data.mul_(factors)
    model[2].weight.data.div_(factors[:, None, None])
    return model.eval()


def plain():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 4, 1))
    return nn.Sequential(*layers).eval()


def outliers():
    # Two channels of each norm are 100 times as large as the others.
    torch.manual_seed(0)
    model = attention().eval()
    for norm, layer in ((model.norm1, model.qkv), (model.norm2, model.up)):
        norm.weight.data[:2] *= 100
        norm.bias.data[:2] *= 100
        layer.weight.data[:, :2] /= 100
    return model


CASES = {
    "equalize": (unequal, compress.QuantSpec(equalize=True, weights=compress.WeightSpec(axis=None), activations=MAX)),
    "smooth": (outliers, compress.QuantSpec(smooth=0.5, activations=MAX, bias_correction=None)),
    "adaround": (
        plain,
        compress.QuantSpec(
            adaround=compress.AdaRoundSpec(steps=100, images=8),
            weights=compress.WeightSpec(num_bits=3),
            activations=MAX,
        ),
    ),
    "bias": (
        plain,
        compress.QuantSpec(bias_correction="empirical", weights=compress.WeightSpec(num_bits=3), activations=MAX),
    ),
    "relu6": (unequal, compress.QuantSpec(relu6="relu", insist=True, smooth=None, activations=MAX)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_gains_what_its_model_does(tmp_path, name):
    make, spec = CASES[name]
    model, data = make(), batches()
    file = export(model, tmp_path / "float.onnx")
    done = quantize_onnx_file(file, data, spec=spec)
    x = batches(seed=1)[0]
    expected = model(x).detach().numpy()
    ours = sqnr(expected, compress.quantize(model, data[0], data, spec=spec)(x).detach().numpy())
    theirs = sqnr(expected, run(done.path, x.numpy()))
    assert theirs == pytest.approx(ours, abs=1.0)
    if name == "relu6":
        assert "Clip" not in {node.op_type for node in onnx.load(done.path).graph.node}
    else:
        without = compress.QuantSpec(weights=spec.weights, activations=MAX, bias_correction=None)
        simple = compress.quantize_onnx(file, data, spec=without, out=tmp_path / "simple.onnx")
        assert theirs > sqnr(expected, run(simple, x.numpy())) + 0.5
    assert any(word in " ".join(done.notes) for word in ("equalized", "smoothed", "AdaRound", "biases", "ReLU6"))


def test_what_makes_a_file_worse_is_taken_back(tmp_path):
    # Most values before this ReLU6 exceed 6.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval()
    model[0].weight.data.mul_(8)
    file, data = export(model, tmp_path / "float.onnx"), batches()
    done = quantize_onnx_file(file, data, spec=compress.QuantSpec(relu6="relu", activations=MAX))
    assert "quantization.relu6 taken back" in " ".join(done.notes)
    simple = compress.quantize_onnx(file, data, spec=compress.QuantSpec(activations=MAX), out=tmp_path / "simple.onnx")
    x = data[0].numpy()
    np.testing.assert_array_equal(run(done.path, x), run(simple, x))


def test_a_product_without_bias_gets_one(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    constants = {"a": weights(16, 32).T.copy().T, "b": weights(32, 8, seed=1)}
    onnx.save(model_of(nodes, constants, shape=("n", 16), rank=2), tmp_path / "m.onnx")
    data = [np.random.default_rng(i).standard_normal((64, 16)).astype(np.float32) + 1 for i in range(2)]
    means = [run(tmp_path / "m.onnx", data[0]).mean(0)]
    for way in ("empirical", None):
        few = compress.WeightSpec(num_bits=3)
        spec = compress.QuantSpec(bias_correction=way, weights=few, activations=MAX, insist=way is not None)
        path = compress.quantize_onnx(tmp_path / "m.onnx", data, spec=spec, out=tmp_path / f"{way}.onnx")
        means.append(run(path, data[0]).mean(0))
    assert np.abs(means[1] - means[0]).mean() < 0.5 * np.abs(means[2] - means[0]).mean()


# The default keeps layers whose inputs have outlier channels, and products after a peaked softmax, accurate.

TOKENS = torch.randn(12, 20, 16, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(12, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def peaked():
    def run(net, x):
        q, k, v = net.qkv(net.norm(x)).chunk(3, -1)
        x = x + net.out((q @ k.transpose(1, 2) * 3).softmax(-1) @ v)
        return x + net.down(nn.functional.gelu(net.up(x)))

    sizes = {"qkv": (16, 48), "out": (16, 16), "up": (16, 32), "down": (32, 16)}
    net = Net(run, norm=nn.LayerNorm(16), **{name: nn.Linear(*size) for name, size in sizes.items()})
    net.norm.weight.data[3], net.up.bias.data[5] = 80.0, 90.0
    net.qkv.weight.data[:, 3], net.down.weight.data[:, 5] = 1e-3, 1e-3
    return net


def sink():
    # Attention that goes to the first token, which has no value: the result is made of the small weights.
    bias = nn.Buffer(torch.tensor([8.0] + 19 * [0.0]))
    mask = nn.Buffer(torch.tensor([0.0] + 19 * [1.0])[:, None])
    attended = lambda net, x: (x @ x.transpose(1, 2) / 16 + net.bias).softmax(-1) @ (x * net.mask)  # noqa: E731
    return Net(lambda net, x: net.out(attended(net, x)), out=nn.Linear(16, 16), bias=bias, mask=mask)


def wide(activation):
    layers = nn.Conv2d(3, 16, 3), activation, nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)
    layers[0].weight.data[2] *= 60
    layers[2].weight.data[2] /= 60
    return nn.Sequential(*layers)


def decibel(path, wanted, x):
    found = compute(path, x.numpy())
    return 10 * np.log10((wanted**2).sum() / ((found - wanted) ** 2).sum())


@pytest.mark.parametrize("target", ["openvino", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    ("model", "x", "gain"),
    [(peaked, TOKENS, 4), (lambda: wide(nn.ReLU()), IMAGES, 8), (lambda: wide(nn.Hardswish()), IMAGES, 8)],
)
def test_outlier_channels_cost_less_by_default(tmp_path, target, model, x, gain):
    model = model().eval()
    wanted = model(x).detach().numpy()
    file, found = export(model, tmp_path / "float.onnx", x=x), {}
    for smooth in ("auto", None):
        spec = compress.QuantSpec(target=target, smooth=smooth)
        done = quantize_onnx_file(file, [x], spec=spec, out=tmp_path / f"{smooth}.onnx")
        found[smooth] = decibel(done.path, wanted, x)
    if target == "onnxruntime" and "Hardswish" in str(model):
        assert found["auto"] > found[None] - 1  # no scale: a Mul of its own would not be in 8 bits there
    else:
        assert found["auto"] > found[None] + gain


def test_a_poor_product_stays_float_with_its_reason_unless_a_rule_says_otherwise(tmp_path):
    file = export(sink().eval(), tmp_path / "float.onnx", x=TOKENS)
    for rules in ((), (compress.Rule(match="*MatMul*"),)):
        spec = compress.QuantSpec(target="openvino", rules=rules)
        done = quantize_onnx_file(file, [TOKENS], spec=spec, out=tmp_path / "int8.onnx")
        reasons = [row.reason for row in done.placement.decisions if "dB on calibration images" in row.reason]
        assert len(reasons) == (0 if rules else 1)


def test_ordinary_ranges_add_nothing(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    file = export(model, tmp_path / "float.onnx", x=IMAGES)
    for smooth in ("auto", None):
        spec = compress.QuantSpec(target="openvino", smooth=smooth)
        compress.quantize_onnx(file, [IMAGES], spec=spec, out=tmp_path / f"{smooth}.onnx")
    kinds = [[n.op_type for n in onnx.load(tmp_path / f"{s}.onnx").graph.node] for s in ("auto", None)]
    assert kinds[0] == kinds[1] and "Mul" not in kinds[0]


# A torch model and the ONNX file of the same model get the same quantizers.

SIZE = 32
OWN = {"resnet": TinyResNet, "gated": gated_net, "attention": attention, "shuffled": shuffled}
NETWORKS = {
    **OWN,
    "YOLO": lambda: Yolo(3, width=4, decoded=(SIZE, SIZE)),
    **{name: FAMILIES[name] for name in ("MobileNetV3", "ConvNeXt", "Swin", "ViT", "DenseNet")},
}
LEFT_OUT = {(name, "any") for name in NETWORKS.keys() - OWN.keys()}
SAME_CASES = [(name, t) for name in NETWORKS for t in TARGETS if (name, t) not in LEFT_OUT and t != "xnnpack"]
# Networks whose file holds BatchNorm as it is.
UNFOLDED = {"resnet", "DenseNet"}


def data_of(name):
    return batches(size=SIZE if name == "YOLO" else 16)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    @functools.cache
    def made(name):
        torch.manual_seed(0)
        model = with_statistics(NETWORKS[name]())
        for parameter in model.parameters():
            if not bool(parameter.any()):
                torch.nn.init.normal_(parameter, std=0.02)
        path = tmp_path_factory.mktemp("same") / "float.onnx"
        return model, export(model, path, folded=name not in UNFOLDED, x=data_of(name)[0][:2])

    return made


def quantizers(placement, amax):
    activations = sorted(
        (str(site.format), float(scale_from_amax(amax[site.name], site.format))) for site in placement.activations
    )
    weights = [
        (site.format, scale_from_amax(amax[f"{site.path}.weight_quantizer"], site.format)) for site in placement.weights
    ]
    return activations, weights


def assert_same(qmodel, result):
    (ours, our_weights), (theirs, their_weights) = (
        quantizers(one.placement, report.amax)
        for one, report in ((qmodel, qmodel.report.calibration), (result, result.calibration))
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    torch.testing.assert_close(
        torch.tensor([s for _, s in theirs]), torch.tensor([s for _, s in ours]), rtol=1e-6, atol=1e-6
    )
    assert [f for f, _ in our_weights] == [f for f, _ in their_weights]
    for (_, a), (_, b) in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "target"), further(SAME_CASES, SAME_CASES[::2]))
def test_quantizers_of_a_file_are_those_of_its_model(exported, tmp_path, name, target):
    (model, file), data = exported(name), data_of(name)
    spec = compress.QuantSpec(target=target, activations=compress.ActivationSpec(calibrator="max"), smooth=None)
    result = quantize_onnx_file(file, data, spec=spec, out=tmp_path / "int8.onnx")
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


@pytest.mark.parametrize("name", OWN)
def test_ranges_of_the_default_calibrator_are_the_same(exported, tmp_path, monkeypatch, name):
    monkeypatch.setattr(calibrate, "_PIECE", 1)  # batches in pieces, as those of larger networks are
    (model, file), data = exported(name), data_of(name)
    spec = compress.QuantSpec(smooth=None)  # a file gets products with scales, a network of torch does not
    result = quantize_onnx_file(file, data, spec=spec, out=tmp_path / "int8.onnx")
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


def test_quantizers_of_our_own_float_export(exported, tmp_path):
    (model, _), data = exported("resnet"), data_of("resnet")
    compress.export_onnx(model, data[0], tmp_path / "float.onnx")
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="percentile"), smooth=None)
    result = quantize_onnx_file(tmp_path / "float.onnx", data, spec=spec)
    assert_same(compress.quantize(model, data[0], data, spec=spec), result)


LAYERS_ALIKE = [name for name in TABLES[0] if name not in readers.OTHERWISE_WRITTEN]


@pytest.mark.parametrize("first", further(range(0, len(LAYERS_ALIKE), 9), [0, 18]))
def test_random_networks_are_the_same_through_both_readers(tmp_path, first):
    # Quantizers, results and INT8 layers of a module and of its file: each layer between two convolutions.
    differ = {}
    for i, name in enumerate(LAYERS_ALIKE[first : first + 9], first):
        steps, target = (Step("conv bn relu", 1), Step(name, 2), Step("conv", 3)), RANDOM_TARGETS[i % 3]
        depth = "quantizers" if i > first else "results" if target == "tensorrt" else "engine"
        differ[name] = readers.of_network(steps, target, tmp_path, depth=depth)
    assert not any(differ.values()), differ


@pytest.mark.parametrize("seed", [8, 36])  # 36: a written LayerNorm times one number
def test_random_graphs_are_the_same_through_both_readers(tmp_path, seed):
    assert not readers.of_graph(seed, RANDOM_TARGETS[seed % 3], tmp_path, depth="quantizers")


# What files and torch models get where images show that it helps: zero points, scales in gates, biases.


def affine(depthwise: bool = False):
    # Factors and shifts around a hard-swish, as PP-OCR's recognizers have them.
    groups = 16 if depthwise else 1

    def run(net, x):
        x = nn.functional.hardswish(4 * net.first(x) - 4)
        return net.last(0.1 * x + 0.05)

    return Net(
        run,
        first=nn.Conv2d(3, 16, 3, padding=1),
        last=nn.Conv2d(16, 16, 5, stride=2, padding=(2, 1), dilation=(1, 2), groups=groups),
    )


def excited():
    def run(net, x):
        x = nn.functional.hardswish(net.first(x)) * net.wide
        return net.last(x * net.squeezed(x.mean((2, 3), keepdim=True)).sigmoid())

    layers = {"first": nn.Conv2d(3, 16, 3), "squeezed": nn.Conv2d(16, 16, 1), "last": nn.Conv2d(16, 8, 1)}
    layers["last"].weight.data[:, :2] /= 40
    return Net(run, wide=nn.Buffer(torch.tensor(2 * [40.0] + 14 * [1.0])[:, None, None]), **layers)


def quantized(model, tmp_path, x, reader="file", **options):
    file = export(model.eval(), tmp_path / "float.onnx", x=x[:2])
    spec, path = compress.QuantSpec(**options), tmp_path / "int8.onnx"
    if reader == "file":
        compress.quantize_onnx(file, list(x.split(4)), spec=spec, out=path)
    else:
        qmodel = compress.quantize(model, x[:2], list(x.split(4)), spec=spec)
        compress.export_onnx(qmodel, x[:2], path, dynamic_batch=True)
        saved = compress.save(qmodel, tmp_path / "int8.safetensors")
        again = compress.load(saved, into=compress.insert_quantizers(model, x[:2], spec))
        assert torch.equal(again(x), qmodel(x))
    return run(file, x.numpy()), run(path, x.numpy()), path


@pytest.mark.parametrize(
    ("target", "reader"), [("openvino", "file"), ("onnxruntime", "file"), ("onnxruntime", "torch")]
)
def test_no_integers_for_values_that_images_do_not_have(tmp_path, target, reader):
    model, x = affine(), torch.cat(batches(4))
    wanted, plain, _ = quantized(model, tmp_path, x, reader, target=target, smooth=None, bias_correction=None)
    _, found, path = quantized(model, tmp_path, x, reader, target=target, bias_correction=None)
    assert sqnr(wanted, found) > sqnr(wanted, plain) + 0.5
    file = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    points = [constants[node.input[2]] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    assert min(int(point) for point in points if point.dtype == np.uint8) < 100


def test_a_target_with_signed_integers_has_no_zero_points(tmp_path):
    _, _, path = quantized(affine(), tmp_path, torch.cat(batches(2)), target="tensorrt")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert not any(value.any() for name, value in constants.items() if name.endswith("zero_point"))


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize(
    ("target", "reader"), [("tensorrt", "file"), ("openvino", "file"), ("onnxruntime", "file"), ("openvino", "torch")]
)
def test_biases_make_up_for_the_mean_error(tmp_path, target, depthwise, reader):
    # With padding, a stride and a dilation, each channel's mean over more images than were looked at comes closer.
    model, x = affine(depthwise), torch.cat(batches(16))
    error = {}
    for chosen in ("auto", None):
        wanted, found, _ = quantized(model, tmp_path, x, reader, target=target, bias_correction=chosen)
        error[chosen] = np.abs((found - wanted).mean((0, 2, 3))).mean()
    assert error["auto"] < 0.5 * error[None]


@pytest.mark.parametrize("reader", ["file", "torch"])
def test_images_that_depend_on_their_batch_are_looked_at_in_it(tmp_path, reader):
    def of_set(net, x):  # rows that are one set, to which its mean is added
        x = net.first(x).relu()
        return net.last(net.middle(x + 9 * x.mean(0)).relu())

    sizes = {"first": (32, 16), "middle": (16, 16), "last": (16, 8)}
    model, x = Net(of_set, **{name: nn.Linear(*size) for name, size in sizes.items()}), torch.randn(4, 32)
    *results, _ = quantized(model, tmp_path, x, reader, target="tensorrt")
    assert sqnr(*results) > 30  # 42 without bias_correction


def test_a_gate_takes_the_scale_of_its_channels(tmp_path):
    # ONNX Runtime's kernels take no factor between the product and the convolution; the gate has one value each.
    model, x = excited(), torch.cat(batches(8))
    options = {"target": "onnxruntime", "bias_correction": None}
    wanted, plain, _ = quantized(model, tmp_path, x, smooth=None, **options)
    _, found, _ = quantized(model, tmp_path, x, **options)
    assert sqnr(wanted, found) > sqnr(wanted, plain) + 6


@pytest.mark.parametrize(("transposed", "shape"), [(0, (4, 4)), (0, (4, 1)), (1, (4,))])
def test_a_bias_of_each_row_and_a_transposed_input_stay(tmp_path, transposed, shape):
    # Means over images are not of one row; numpy's product is the oracle.
    draw = np.random.default_rng(0).standard_normal
    x, weight, bias = (draw(size).astype(np.float32) for size in ((4, 4), (4, 4), shape))
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transA=transposed)
    ends = {"x": [4, 4]}, {"y": [4, 4]}
    onnx.save(onnx_model([node], *ends, {"w": weight, "b": bias}, ir_version=10), tmp_path / "float.onnx")
    made = compress.quantize_onnx(tmp_path / "float.onnx", [x], spec=compress.QuantSpec(target="openvino"))
    assert sqnr((x.T if transposed else x) @ weight + bias, run(made, x)) > 30
