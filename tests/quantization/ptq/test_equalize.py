import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import compress
from compress.errors import CalibrationError, CheckpointError, QuantizationError
from compress.graph.fold import fold_batchnorm
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.ptq.rescaling import (
    equalize,
    find_norms,
    find_pairs,
    input_ranges,
    output_ranges,
    replace_activations,
    scale_inputs,
    scale_outputs,
    smooth,
    smoothing_scale,
)
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity import sqnr
from tests.networks import Net, network, unchanged, with_statistics
from tests.onnx_ptq.files import export
from tests.onnx_ptq.test_improve import IMAGES, TOKENS, peaked, sink, wide

X = torch.randn(4, 6, 12, 12, generator=torch.Generator().manual_seed(0))
MAX = compress.ActivationSpec(calibrator="max")


def mobile(activation=nn.ReLU, spread=2.0):
    torch.manual_seed(1)
    model = with_statistics(
        nn.Sequential(
            nn.Conv2d(6, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            activation(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            activation(),
            nn.Conv2d(16, 8, 1),
            nn.Conv2d(8, 12, 3, groups=4),
            activation(),
            nn.ConvTranspose2d(12, 8, 2, 2, groups=2),
            nn.LeakyReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 5, 3),
            activation(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(20, 7),
            nn.Dropout(),
            nn.ReLU(),
            nn.Linear(7, 3),
        )
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            layer.weight.data.mul_(torch.exp(spread * torch.randn(len(layer.weight), 1, 1, 1)))
    return model


def folded(model, x=X):
    graph_module = compress.trace(model, x)
    fold_batchnorm(graph_module)
    return graph_module


def equalized(graph_module):
    # Equalize a graph, which computes the same afterwards.
    before = graph_module(X)
    report = equalize(graph_module)
    assert (graph_module(X) - before).abs().max() / before.abs().max() < 1e-5
    return report


def test_function_preserved_and_ranges_equal_in_every_pair():
    graph_module = folded(mobile())
    report = equalized(graph_module)
    assert len(report.pairs) == 7 and not report.refused
    for pair in report.pairs:
        outgoing = output_ranges(graph_module.get_submodule(pair.first))
        incoming = input_ranges(graph_module.get_submodule(pair.second)).view(-1, pair.repeat).amax(1)
        torch.testing.assert_close(outgoing, incoming, rtol=1e-3, atol=0)


LAYERS = [
    nn.Conv2d(6, 4, 3),
    nn.Conv2d(6, 6, 3, groups=6),
    nn.Conv2d(6, 9, 1, groups=3),
    nn.Linear(6, 5),
    nn.ConvTranspose2d(6, 4, 2),
    nn.ConvTranspose2d(6, 9, 2, groups=3),
]


@pytest.mark.parametrize(
    "layer",
    LAYERS,
    ids=lambda layer: type(layer).__name__ + str(getattr(layer, "groups", "")),
)
def test_scaling_a_side_of_a_layer_is_scaling_its_input_or_output(layer):
    generator = torch.Generator().manual_seed(2)
    linear = isinstance(layer, nn.Linear)
    x = torch.randn(2, 6, *([] if linear else [5, 5]), generator=generator)
    shape = (-1,) if linear else (-1, 1, 1)
    with torch.no_grad():
        y = layer(x)
        ins, outs = torch.rand(6, generator=generator) + 0.5, torch.rand(y.shape[1], generator=generator) + 0.5
        scaled = copy.deepcopy(layer)
        scale_inputs(scaled, ins)
        torch.testing.assert_close(scaled(x / ins.view(shape)), y)
        scale_outputs(scaled, outs)
        torch.testing.assert_close(scaled(x / ins.view(shape)), y * outs.view(shape))
        silent = layer(torch.zeros_like(x[:1]))
        for channel in range(6):  # an impulse in the middle returns every weight of its channel
            impulse = torch.zeros_like(x[:1])
            impulse[(0, channel) + (() if linear else (2, 2))] = 1
            torch.testing.assert_close(input_ranges(layer)[channel], (layer(impulse) - silent).abs().max())


def test_relu6_is_refused_with_the_way_out_and_replaced_on_request():
    model = mobile(nn.ReLU6)
    pairs, refused = find_pairs(folded(model))
    assert any("ReLU6" in reason and "relu6: relu" in reason for reason in refused.values())
    graph_module = folded(model)
    assert len(replace_activations(graph_module, "relu6")) == 4
    assert len(find_pairs(graph_module)[0]) == 7 > len(pairs)
    small = X / 1e4  # nothing reaches 6, where both are one function
    calm = compress.trace(mobile(nn.ReLU6, spread=0.0), small)
    before = calm(small)
    replace_activations(calm, "relu6")
    torch.testing.assert_close(calm(small), before)


def test_no_pair_is_an_error_that_says_why():
    def run(net, x):
        y = net.a(x)
        return torch.sigmoid(net.b(y)) + y

    with pytest.raises(QuantizationError, match="a: 2 operations consume it"):
        equalize(folded(Net(run, a=nn.Conv2d(6, 6, 1), b=nn.Conv2d(6, 6, 1))))


def test_shared_and_parametrized_layers_are_left():
    layer = nn.Conv2d(6, 6, 1)
    _, refused = find_pairs(folded(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(6, 2, 1))))
    assert "called 2 times" in refused["0"]
    masked = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    parametrize.register_parametrization(masked[0], "weight", nn.Identity())
    assert "parametrized" in find_pairs(folded(masked))[1]["0"]


def test_dead_channels_keep_still():
    model = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model[0].weight.data[1] = 0
    model[2].weight.data[:, 2] = 0
    scale = equalized(folded(model)).divided["0"]
    assert scale[1] == scale[2] == 1 and bool(scale.isfinite().all())


def test_equalization_rescues_per_tensor_weights():
    model = mobile(spread=3.0)
    per_tensor = compress.QuantSpec(weights=compress.WeightSpec(axis=None), activations=MAX)
    plain, better = (compress.quantize(model, X[:2], [X], spec=replace(per_tensor, equalize=e)) for e in (False, True))
    assert sqnr(model(X), better(X)) > sqnr(model(X), plain(X)) + 6
    assert "equalized 7 pairs" in better.report.notes()[0]


# --- SmoothQuant -------------------------------------------------------------------------------------------------


def block_with_outliers():
    # A norm read by two projections, one read by a linear layer, and one that is read by an add as well.
    torch.manual_seed(0)

    def run(net, x):
        y = net.norm1(x)
        x = x.reshape(y.shape) + torch.softmax(net.query(y) @ net.key(y).transpose(1, 2), -1) @ x
        x = x + net.down(torch.relu(net.up(net.dropout(net.norm2(x)))))
        y = net.norm3(x)
        return net.last(y) + y.mean(-1, keepdim=True)

    linear = {"query": (8, 8), "key": (8, 8), "up": (8, 16), "down": (16, 8), "last": (8, 3)}
    layers = {name: nn.Linear(*sizes) for name, sizes in linear.items()}
    norms = {f"norm{i}": nn.LayerNorm(8) for i in (1, 2, 3)}
    block = Net(run, **norms, **layers, dropout=nn.Dropout()).eval()
    for norm in (block.norm1, block.norm2):
        norm.weight.data[2] *= 60
        nn.init.normal_(norm.bias)
    return block, torch.randn(4, 5, 8)


def test_smoothing_preserves_the_function_and_follows_the_formula():
    block, x = block_with_outliers()
    graph_module = compress.trace(block, x)
    inputs = block.norm1(x).flatten(0, 1).abs().amax(0).detach()
    weights = torch.cat([block.query.weight, block.key.weight]).abs().amax(0).detach()
    before = graph_module(x)
    report = smooth(graph_module, [x], alpha=0.5)
    after = graph_module(x)
    assert (after - before).abs().max() / before.abs().max() < 1e-5
    assert [norm.path for norm in report.norms] == ["norm1", "norm2"]
    assert report.norms[0].consumers == ("query", "key")
    assert "consumes it too" in report.refused["norm3"]
    torch.testing.assert_close(report.divided["norm1"], (inputs / weights).sqrt())
    smoothed = graph_module.norm1(x).flatten(0, 1).abs().amax(0)
    now = torch.cat([graph_module.query.weight, graph_module.key.weight]).abs().amax(0)
    torch.testing.assert_close(smoothed, now)  # at 0.5 both sides share the difficulty evenly


class OwnNorm(nn.LayerNorm):
    # As timm's: a subclass outside torch, which fx traces into.
    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def test_smoothing_sees_norms_that_are_functions(monkeypatch):
    monkeypatch.setattr(OwnNorm, "__module__", "elsewhere")
    model, x = nn.Sequential(OwnNorm(8), nn.Linear(8, 4)).eval(), torch.randn(4, 5, 8)
    graph_module = compress.trace(model, x)
    report = smooth(graph_module, [x])
    torch.testing.assert_close(graph_module(x), model(x))
    assert report.norms[0].path == "0" and report.norms[0].parameters == ("0.weight", "0.bias")
    assert not torch.equal(graph_module.get_parameter("0.weight"), model[0].weight)


def test_smoothing_gains_where_there_are_outliers():
    block, x = block_with_outliers()
    plain, better = (
        compress.quantize(block, x[:2], iter([x]), spec=compress.QuantSpec(activations=MAX, smooth=alpha))
        for alpha in (None, 0.5)
    )
    assert sqnr(block(x), better(x)) > sqnr(block(x), plain(x)) + 3
    assert "smoothed 2 norms (1 left" in better.report.notes()[0]


@settings(max_examples=30)
@given(st.floats(1e-4, 1e4), st.floats(1e-4, 1e4), st.floats(0, 1))
def test_smoothing_scale_trades_one_for_the_other(activation, weight, alpha):
    s = smoothing_scale(torch.tensor([activation]), torch.tensor([weight]), alpha).double().item()
    assert (activation / s) / (weight * s) == pytest.approx((activation * weight) ** (1 - 2 * alpha), rel=1e-3)


def test_smoothing_refuses():
    graph_module = compress.trace(
        nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)), torch.randn(2, 8)
    )
    assert "no affine" in find_norms(graph_module)[1]["0"]
    with pytest.raises(QuantizationError, match="the model has none"):
        compress.quantize(
            network(), torch.randn(2, 3, 16, 16), [torch.randn(2, 3, 16, 16)], spec=compress.QuantSpec(smooth=0.5)
        )
    block, x = block_with_outliers()
    with pytest.raises(CalibrationError, match="no images"):
        smooth(compress.trace(block, x), [])
    with pytest.raises(QuantizationError, match="from 0 to 1"):
        smooth(compress.trace(block, x), [x], alpha=2.0)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_scale_passes_through_a_resize_and_a_negation(mode):
    # Both are linear in their input, channel by channel, and were refused.
    graph_module = folded(
        Net(
            lambda net, x: net.second(nn.functional.interpolate(-net.first(x), scale_factor=2, mode=mode)),
            first=nn.Conv2d(6, 5, 3),
            second=nn.Conv2d(5, 4, 3),
        )
    )
    assert [(pair.first, pair.second) for pair in equalized(graph_module).pairs] == [("first", "second")]


# `smooth: auto` of torch models: what it gains, that it changes no module, and that its choice can be repeated.

TARGETS = ("tensorrt", "openvino", "onnxruntime")


def norm_alone():
    def run(net, x):
        x = net.drop(net.norm(x))
        return net.left(x) * 2 + net.right(x)

    net = Net(run, norm=nn.LayerNorm(16), left=nn.Linear(16, 8), right=nn.Linear(16, 8), drop=nn.Dropout())
    net.norm.weight.data[3] = 90.0
    net.left.weight.data[:, 3] /= 90
    net.right.weight.data[:, 3] /= 90
    return net


def peaked_gelu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    net[0].weight.data[3] *= 90.0
    net[2].weight.data[:, 3] /= 90
    return net


def quantized(model, x, target, **keys):
    return compress.quantize(model, x[:2], [x], spec=compress.QuantSpec(target=target, **keys))


def outliers():
    makers = {
        "norm": (norm_alone, TOKENS, TARGETS),
        "vit": (peaked, TOKENS, TARGETS),
        "conv": (lambda: wide(nn.ReLU()), IMAGES, TARGETS),
        "gelu": (peaked_gelu, TOKENS, TARGETS[1:]),  # not for TensorRT: fused training takes no multiplication there
    }
    return [
        pytest.param(make, x, target, id=f"{name}-{target}")
        for name, (make, x, targets) in makers.items()
        for target in targets
    ]


@pytest.mark.parametrize(("make", "x", "target"), outliers())
def test_outlier_channels_cost_less(make, x, target):
    model = make().eval()
    with unchanged(model):
        found = {smooth: quantized(model, x, target, smooth=smooth) for smooth in ("auto", None)}
    db = {smooth: sqnr(model(x), qmodel(x)) for smooth, qmodel in found.items()}
    assert db["auto"] > db[None] + 3, db
    assert any("smooth: auto" in note for note in found["auto"].report.notes())


@pytest.mark.parametrize("make", [norm_alone, peaked_gelu])
def test_the_float_network_stays_what_it_was(make):
    # Without quantizers the scaled network computes what the caller's does.
    model = make().eval()
    qmodel = quantized(model, TOKENS, "openvino", bias_correction=None)
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    torch.testing.assert_close(qmodel(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "why"), [(sink, "dB on calibration images"), (peaked_gelu, "a factor for each channel")]
)
def test_a_poor_product_stays_float_and_the_choice_can_be_repeated(make, why, tmp_path):
    model = make().eval()
    qmodel = quantized(model, TOKENS, "openvino")
    (rule,) = qmodel.placement.measured_rules
    assert why in rule.reason
    path = compress.save(qmodel, tmp_path / "q.safetensors")
    spec = compress.QuantSpec(target="openvino")
    with pytest.raises(CheckpointError, match="measured_rules"):
        compress.load(path, into=compress.insert_quantizers(model, TOKENS[:2], spec))
    spec = compress.QuantSpec(target="openvino", rules=qmodel.placement.measured_rules)
    again = compress.load(path, into=compress.insert_quantizers(model, TOKENS[:2], spec))
    assert torch.equal(again(TOKENS), qmodel(TOKENS))


def test_a_rule_of_ones_own_counts_before_what_images_say():
    rules = quantized(sink().eval(), TOKENS, "openvino").placement.measured_rules
    own = compress.QuantSpec(target="openvino", rules=tuple(compress.Rule(match=rule.match) for rule in rules))
    assert rules
    assert not compress.quantize(sink().eval(), TOKENS[:2], [TOKENS], spec=own).placement.measured_rules


@pytest.mark.parametrize("reader", ["torch", "file"])
@pytest.mark.parametrize("matters", [False, True])
def test_largest_inputs_are_clipped_where_the_result_gains(tmp_path, reader, matters):
    # One row of an image is four times as large in all channels, or has 40 in one, which weights take up most.
    x = torch.cat([torch.randn(8, 1024, 64), 4 * torch.randn(8, 1, 64)], 1)
    model = Net(lambda net, x: net.last(nn.functional.leaky_relu(x, 0.99)), last=nn.Linear(64, 8)).eval()
    if matters:
        x[:, 0, 3] = 40.0
        model.last.weight.data[:, 3] = 2.0
    spec = compress.QuantSpec(target="openvino", bias_correction=None)
    if reader == "torch":
        placement = compress.quantize(model, x[:2], list(x.split(1)), spec=spec).placement
    else:
        file = export(model, tmp_path / "float.onnx", x=x[:2])
        placement = quantize_onnx_file(file, list(x.split(1)), spec=spec, out=tmp_path / "q.onnx").placement
    (site,) = placement.activations
    assert site.spec.calibrator == ("max" if matters else "mse")
    assert matters != any("clipping its largest inputs" in row.reason for row in placement.decisions)


def test_a_generator_and_ordinary_ranges():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    read = []

    def batches():
        for start in range(0, 12, 4):
            read.append(start)
            yield IMAGES[start : start + 4]

    once = compress.quantize(model, IMAGES[:2], batches())
    assert read == [0, 4, 8] and once.report.notes() == ["corrected 3 biases"]
    plain = compress.quantize(
        model, IMAGES[:2], list(IMAGES.split(4)), spec=compress.QuantSpec(target="tensorrt", smooth=None)
    )
    assert torch.equal(once(IMAGES), plain(IMAGES)), "nothing is scaled where 8 bits cost little"
