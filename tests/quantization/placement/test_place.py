# The placement rules of DESIGN section 4, on networks whose right answer is known.

from collections import OrderedDict
from itertools import product

import onnx
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, quantize, trace
from compress.errors import QuantizationError
from compress.graph.fold import fold_batchnorm
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.place import place
from tests.exact import compute
from tests.further import further
from tests.networks import Net, Residual, TinyResNet, network
from tests.onnx_ptq.files import quantized_file


def placement(model, spec=None, shape=(2, 3, 32, 32)):
    graph = trace(model, torch.randn(shape))
    fold_batchnorm(graph)
    return place(read_fx(graph), spec or QuantSpec())


def quantized(result):
    return {d.tensor for d in result.decisions if d.decision == "quantize" and not d.tensor.endswith(".weight")}


def test_tensorrt_on_a_residual_network():
    result = placement(TinyResNet())
    assert quantized(result) == {
        "x",  # input of conv1
        "relu",  # before the bare max pool: input of block1.conv1 and the identity of its add
        "block1_relu",
        "block1_relu_1",  # input of block2.conv1 and of its downsample
        "block2_relu",
        "block2_downsample_0",  # the identity branch; the main branch (the longer path) fuses with the add
        "block2_relu_1",  # input of the average pool
        "avgpool",  # its output, through flatten and dropout the input of fc
    }
    assert not any(d.tensor in {"block1_conv2", "block2_conv2", "maxpool", "fc"} for d in result.decisions)
    assert all(a.format.signed for a in result.activations)
    assert all(w.format.axis == 0 and w.format.narrow for w in result.weights)


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
def test_cpu_targets_are_unsigned_after_relu_and_quantize_both_branches(target):
    result = placement(TinyResNet(), QuantSpec(target=target))
    signed = {d.tensor: d.signed for d in result.decisions if d.tensor in quantized(result)}
    assert signed["x"] and signed["block1_conv2"] and signed["block2_conv2"] and signed["block2_downsample_0"]
    assert not signed["relu"] and not signed["block1_relu"] and not signed["block2_relu_1"]
    assert "add" not in signed and "fc" not in signed


def test_one_quantizer_a_tensor():
    result = placement(torchvision.models.resnet50())
    tensors = [tensor for site in result.activations for tensor in {t for t, _ in site.edges}]
    assert len(tensors) == len(set(tensors))
    assert len(result.weights) == 54
    assert len([d for d in result.decisions if "residual" in d.rule]) == 16


def test_concat_shares_one_scale():
    layers = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(3, 5, 1), "c": nn.Conv2d(9, 2, 1)}
    model = Net(lambda net, x: net.c(torch.cat([net.a(x).relu(), torch.max_pool2d(net.b(x), 1)], 1)), **layers)
    result = placement(model)
    (shared,) = [site for site in result.activations if len({t for t, _ in site.edges}) > 1]
    assert {tensor for tensor, _ in shared.edges} == {"relu", "b"}
    assert "shares one scale" in next(d.reason for d in result.decisions if d.tensor == "relu")


def test_rules_last_match_wins():
    spec = QuantSpec(
        rules=(
            Rule(match="block*", enable=False),
            Rule(match="block2.*", weights=WeightSpec(num_bits=4)),
            Rule(match="fc", activations=ActivationSpec(num_bits=6)),
        )
    )
    result = placement(TinyResNet(), spec)
    bits = {w.path: w.format.num_bits for w in result.weights}
    assert bits == {"conv1": 8, "block2.conv1": 4, "block2.conv2": 4, "block2.downsample.0": 4, "fc": 8}
    left = next(d for d in result.decisions if d.layer == "block1.conv1")
    assert (left.decision, left.rule) == ("float", "rule: block*")
    add = next(d for d in result.decisions if d.layer == "add" and d.decision == "float")
    assert "block1.conv2" in add.reason


@pytest.mark.parametrize(("match", "hint"), [("layr1", "'layer1"), ("block1", r"block1\.\*"), ("conv7", "conv1")])
def test_a_rule_that_matches_nothing_names_near_misses(match, hint):
    parts = {"layer1": nn.Conv2d(3, 3, 1), "conv1": nn.Conv2d(3, 4, 1), "block1": Residual(4, 4)}
    model = nn.Sequential(OrderedDict(parts))
    with pytest.raises(QuantizationError, match=f"matches no layer.*{hint}"):
        placement(model, QuantSpec(rules=(Rule(match=match),)))


def test_what_stays_float_says_why():
    result = placement(torchvision.models.efficientnet_b0(), shape=(2, 3, 64, 64))
    reasons = {d.rule for d in result.decisions if d.decision == "float"}
    assert "mul stays float" in reasons
    attention = placement(torchvision.models.vit_b_32(image_size=64), shape=(2, 3, 64, 64))
    assert any(d.rule == "attention stays float" for d in attention.decisions)


# How the parts of one product become query, key and value.
WAYS = {
    "chunk": lambda y: y.chunk(3, -1),
    "slice": lambda y: (y[..., :8], y[..., 8:16], y[..., 16:]),
    "unbind": lambda y: y.reshape(len(y), -1, 3, 8).permute(2, 0, 1, 3).unbind(0),
    "index": lambda y: [y.reshape(len(y), -1, 3, 8).permute(2, 0, 1, 3)[i] for i in range(3)],
}


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
@pytest.mark.parametrize("way", WAYS)
def test_query_key_and_value_have_scales_of_their_own(way, target):
    def run(net, x):
        q, k, v = (part.reshape(x.shape[0], -1, 2, 4).transpose(1, 2) for part in WAYS[way](net.qkv(x)))
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    model, x = Net(run, qkv=nn.Linear(8, 24)), torch.randn(2, 5, 8)
    with torch.no_grad():
        model.qkv.weight[:8] *= 8  # what a shared scale would show
    qmodel = quantize(model, x, [x], spec=QuantSpec(target=target, activations=ActivationSpec(calibrator="max")))
    rows = [d for d in qmodel.placement.decisions if "query, key and value" in d.reason]
    assert len({d.quantizer for d in rows}) == 3
    q, k, v = (y.detach().abs().max() for y in model.qkv(x).chunk(3, -1))
    kept = sorted(float(qmodel.get_submodule(d.quantizer).amax) for d in rows)
    assert kept == pytest.approx(sorted([float(q), float(k), float(v)]))


@pytest.mark.parametrize("rules", [(), (Rule(match="matmul*"),)])
def test_products_that_the_model_casts_to_float32_stay_float_unless_asked_for(rules):
    def run(net, x):  # as EfficientViT's attention does
        q, k, v = (part.float() for part in net.qkv(x).chunk(3, -1))
        return (q @ (k.transpose(-1, -2) @ v)).to(x.dtype)

    result = placement(Net(run, qkv=nn.Linear(8, 24)), QuantSpec(rules=rules), (2, 5, 8))
    left = {d.layer for d in result.decisions if d.rule == "float32 product"}
    assert left == (set() if rules else {"matmul", "matmul_1"})
    assert len(result.activations) == (5 if rules else 1)


def test_grouped_transposed_convolutions_have_one_weight_scale():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1))
    axes = {w.path: w.format.axis for w in placement(model, shape=(2, 4, 8, 8)).weights}
    assert axes == {"0": None, "1": 0}


@pytest.mark.parametrize("features", ["avx2", "avx2 avx_vnni"])
def test_weights_for_openvino_have_the_bits_whose_sums_this_processor_holds(features, monkeypatch):
    # VPMADDUBSW adds two products of a byte without a sign and one with a sign in 16 bits: 2 * 255 * 64 fits.
    monkeypatch.setattr("compress.support.process.instruction_sets", lambda: frozenset(features.split()))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    most = {}
    for target, bits in product(["openvino", "onnxruntime", "tensorrt"], ["auto", 8]):
        qmodel = quantize(network(), x, [x], spec=QuantSpec(target=target, weights=WeightSpec(num_bits=bits)))
        rows = [row for row in qmodel.placement.decisions if row.rule == "weight"]
        most[target, bits] = {2 ** (row.num_bits - 1) - 1 for row in rows}
        assert all(("no VNNI" in row.reason) == (row.num_bits == 7) for row in rows)
    assert most.pop(("openvino", "auto")) == ({63} if features == "avx2" else {127})
    assert set(map(tuple, most.values())) == {(127,)}


def test_csv_holds_every_decision():
    import csv

    result = placement(TinyResNet())
    rows = list(csv.DictReader(result.to_csv().splitlines()))
    assert [r["tensor"] for r in rows] == [d.tensor for d in result.decisions]
    assert all(r["reason"] for r in rows)


def test_an_identity_between_a_layer_and_its_activation_does_not_part_them():
    # timm's networks have one there; ONNX Runtime fuses convolution and ReLU only without a quantizer between.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Flatten())
    assert quantized(placement(model, QuantSpec(target="onnxruntime"))) == {"input_1", "_2"}


def test_what_addmm_adds_stays_float():
    layers = {name: nn.Linear(4, 4) for name in ("one", "two", "three")}
    model = Net(lambda net, x: torch.baddbmm(net.one(x), net.two(x), net.three(x)), **layers)
    assert quantized(placement(model, shape=(2, 4, 4))) == {"x", "two", "three"}


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LocalResponseNorm(3)])
def test_every_normalization_that_stays_float_has_a_row(norm):
    result = placement(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 1)))
    (row,) = [row for row in result.decisions if row.layer == "1"]
    assert row.decision == "float" and "normalization" in row.reason


@pytest.mark.parametrize(
    ("axes", "keepdim", "pooled"), [((2, 3), False, True), ((-1, -2), True, True), ((1, 3), False, False)]
)
def test_a_mean_over_the_places_of_an_image_is_a_pool_and_no_other_is(axes, keepdim, pooled):
    layers = {"conv": nn.Conv2d(3, 4, 3), "last": nn.Conv2d(4, 4, 1) if keepdim else nn.Linear(4, 4)}
    model = Net(lambda net, x: net.last(net.conv(x).relu().mean(axes, keepdim=keepdim)), **layers)
    found = quantized(placement(model, shape=(2, 3, 6, 6)))
    assert ("relu" in found) == pooled and "mean" in found


def test_the_kind_of_number_is_told_of_fp8_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    for kind, told in (("int", False), ("e4m3", True)):
        spec = QuantSpec(weights=WeightSpec(kind=kind), activations=ActivationSpec(kind=kind))
        reasons = [d.reason for d in placement(model, spec).decisions if d.rule == "weight"]
        assert len(reasons) == 2 and all(("FP8" in reason) == told for reason in reasons)


def test_a_result_is_quantized_behind_its_activation_and_before_a_pad():
    def layer():
        return nn.Conv2d(3, 3, 3)

    def head():
        return nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(3, 2)

    spec, inputs = QuantSpec(target="onnxruntime"), {"input_1", "_1"}
    found = placement(nn.Sequential(layer(), nn.ReLU(), nn.GELU(), layer(), *head()), spec)
    assert quantized(found) == inputs | {"_2", "_3"}
    for target in ("tensorrt", "onnxruntime"):
        network = nn.Sequential(layer(), nn.ReLU(), nn.ZeroPad2d(1), layer(), *head())
        assert quantized(placement(network, QuantSpec(target=target))) == inputs | {"_3"}


def test_a_branch_of_a_residual_add_is_asked_for_by_its_layer_too():
    rules = {d.tensor: d.rule for d in placement(TinyResNet(), QuantSpec(target="onnxruntime")).decisions}
    assert rules["block1_conv2"] == rules["block2_conv2"] == "conv output, residual add"


FUSED = {("Conv", "Relu"), ("Conv", "Clip"), ("Add", "Relu"), ("BatchNormalization", "Relu")}


def without_scale(path):
    # Operators that read, or outputs that hold, an activation that no pair is on: what DLA and HTP cannot run in INT8.
    graph = onnx.load(path).graph
    made = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if constants.issuperset(node.input):
            constants.update(node.output)
    read = [(name, n.op_type) for n in graph.node for name in n.input if name and name not in constants]
    read = [(name, op) for name, op in read if op not in ("QuantizeLinear", "DequantizeLinear")]
    found = [(made[name].op_type if name in made else "input", op) for name, op in read]
    found += [(made[value.name].op_type, "output") for value in graph.output]
    return [(source, op) for source, op in found if source != "DequantizeLinear" and (source, op) not in FUSED]


def gated(net, x):
    x = torch.cat([F.silu(net.one(x)), F.avg_pool2d(net.two(x), 3, 1, 1)], 1)
    return net.last(net.norm(x).relu() * net.gate(x).sigmoid() + x).mean((2, 3))


@pytest.mark.parametrize(
    ("target", "source", "make"),
    further(
        product(("dla", "qnn"), ("torch", "file"), (network, gated)),
        [("dla", "torch", gated), ("dla", "file", network), ("qnn", "torch", network), ("qnn", "file", gated)],
    ),
)
def test_every_tensor_has_a_scale_for_dla_and_qnn(target, source, make, tmp_path):
    torch.manual_seed(0)
    if make is gated:
        layers = {"one": nn.Conv2d(3, 4, 3, padding=1), "two": nn.Conv2d(3, 4, 1), "norm": nn.BatchNorm2d(8)}
        model = Net(gated, **layers, gate=nn.Conv2d(8, 8, 1), last=nn.Conv2d(8, 4, 1)).eval()
    else:
        model = make()
    x = torch.randn(4, 3, 16, 16)
    quantized_file(source, model, x, QuantSpec(target=target), tmp_path / "int8.onnx")
    assert not without_scale(tmp_path / "int8.onnx")
    wanted = model(x)
    assert (torch.from_numpy(compute(tmp_path / "int8.onnx", x.numpy())) - wanted).pow(2).mean() < 2e-3 * wanted.var()


def test_a_gelu_is_between_pairs_for_qnn_and_has_none_inside(tmp_path):
    # ONNX Runtime's provider makes one operator of its nodes only so (onnxruntime-qnn, pull request 309).
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 1)).eval(), torch.randn(2, 3, 8, 8)
    quantized_file("torch", model, x, QuantSpec(target="qnn"), tmp_path / "int8.onnx")
    inside = [("Div", "Erf"), ("Erf", "Add"), ("Mul", "Mul"), ("Add", "Mul")]
    assert sorted(without_scale(tmp_path / "int8.onnx")) == sorted(inside)


def test_what_dla_does_not_take_is_named_and_its_averages_keep_their_scale():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.GELU(), nn.AvgPool2d(2))
    model += nn.Sequential(nn.Conv2d(4, 4, 33, padding=16), nn.MaxPool2d(9, 1, 4), nn.AvgPool2d(8, 8, 4))
    result = placement(model, QuantSpec(target="dla"), (2, 3, 8, 8))
    floats = {d.layer: d.reason for d in result.decisions if d.decision == "float"}
    assert floats.keys() == {"1", "3", "5", "6"} and all("GPU" in reason for reason in floats.values())
    assert "window of 33 is larger than 32" in floats["5"] and "window of 9 is larger than 8" in floats["6"]
    assert {d.quantizer for d in result.decisions if d.tensor in ("_3", "_4")} == {"", "quantizers._3"}


def test_softmax_is_quantized_for_qnn_with_16_bits_alone_and_xnnpack_is_another_word():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    for bits, expected in ((8, ["softmax stays float"]), (16, [])):
        found = placement(model, QuantSpec(target="qnn", activations=ActivationSpec(num_bits=bits)), (2, 4))
        assert [d.rule for d in found.decisions if d.decision == "float"] == expected
    assert QuantSpec(target=["xnnpack", "qnn"]).targets == ("litert", "qnn")


def test_operations_without_a_quantized_form_say_why():
    def run(net, x):
        y = net.a(x)
        y = F.grid_sample(y, torch.tanh(net.grid(x)).permute(0, 2, 3, 1), align_corners=False)
        return torch.inner(net.rnn(y.flatten(2).mT)[0][:, -1], net.c)

    parts = {"a": nn.Conv2d(3, 8, 1), "grid": nn.Conv2d(3, 2, 1), "rnn": nn.GRU(8, 8, batch_first=True)}
    model, x = Net(run, **parts, c=nn.Parameter(torch.randn(5, 8))), torch.randn(2, 3, 4, 4)
    quantized = quantize(model.eval(), x, [x], spec=QuantSpec(target="onnxruntime"))
    reasons = {row.rule: row.reason for row in quantized.placement.decisions}
    assert "takes its own rounded results again" in reasons["recurrent stays float"]
    assert "matmul" in reasons["contraction stays float"] and "places" in reasons["sample stays float"]
    with pytest.raises(QuantizationError, match=r"rnn: a recurrent layer takes its own"):
        quantize(Net(lambda net, x: net.rnn(x)[0], rnn=nn.GRU(4, 4)), x[0], [x[0]])
