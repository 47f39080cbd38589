# Which tensors a layer asks for, and through which operations a request goes back, on networks of a few nodes.

import operator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress.errors import QuantizationError, RecipeError
from compress.graph.inputs import flat_tensors
from compress.quantization import TARGETS
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.place import place
from compress.recipe.tree import parse_recipe
from tests.networks import Net, TinyResNet
from tests.quantization.placement.test_place import placement, quantized


def conv(inputs=4, outputs=4, **options):
    return nn.Conv2d(inputs, outputs, 1, **options)


def placed(function, target="tensorrt", shape=(2, 4, 6, 6), spec=None, **layers):
    return placement(Net(function, **layers), spec or compress.QuantSpec(target=target), shape)


def rules(result, tensor):
    return [row.rule for row in result.decisions if row.tensor == tensor]


ZEROS, OTHER = "relu", "pad"
PADS = {  # whether a quantizer is placed before a pad, which then commutes with it, or after it
    "zeros": (lambda y: F.pad(y, (1, 1, 1, 1)), {}, ZEROS),
    "zeros at one end": (lambda y: F.pad(y, (0, 1)), {}, ZEROS),
    "zeros by keyword": (lambda y: F.pad(y, pad=(1, 1, 1, 1), mode="constant", value=0.0), {}, ZEROS),
    "a number": (lambda y: F.pad(y, (1, 1, 1, 1), "constant", 0.5), {}, OTHER),
    "a number by keyword": (lambda y: F.pad(y, (1, 1, 1, 1), value=-1), {}, OTHER),
    "a reflection": (lambda y: F.pad(y, (1, 1, 1, 1), "reflect"), {}, OTHER),
    "a copy by keyword": (lambda y: F.pad(y, (1, 1, 1, 1), mode="replicate"), {}, OTHER),
    "a cut": (lambda y: F.pad(y, (-1, 1, 1, 1)), {}, OTHER),
    "channels": (lambda y: F.pad(y, (0, 0, 0, 0, 1, 1)), {"last": conv(6)}, OTHER),
    "module": (None, {"pad": nn.ZeroPad2d(1)}, ZEROS),
    "module of a constant zero": (None, {"pad": nn.ConstantPad2d(1, 0.0)}, ZEROS),
    "module of a constant": (None, {"pad": nn.ConstantPad2d(1, 0.5)}, OTHER),
    "module of a reflection": (None, {"pad": nn.ReflectionPad2d(1)}, OTHER),
    "before padding by name": (lambda y: F.pad(y, (1, 1)), {"last": conv(padding="same")}, OTHER),
    "before a reflection": (lambda y: F.pad(y, (1, 1)), {"last": conv(padding=0, padding_mode="reflect")}, OTHER),
    "before a linear layer": (lambda y: F.pad(y, (1, 1)), {"last": nn.Linear(8, 2)}, OTHER),
}


@pytest.mark.parametrize("name", PADS)
def test_a_quantizer_passes_only_pads_of_zeros_that_a_convolution_could_do_itself(name):
    pad, layers, expected = PADS[name]
    layers = {"first": conv(), "last": conv()} | layers

    def function(m, x):
        y = F.relu(m.first(x))
        return m.last(m.pad(y) if pad is None else pad(y))

    assert quantized(placed(function, **layers)) == {"x", expected}


def test_a_pad_that_another_operation_reads_too_is_no_part_of_a_convolution():
    def function(m, x):
        y = F.pad(F.relu(m.first(x)), (1, 1))
        return m.last(y), y.exp()

    assert quantized(placed(function, first=conv(), last=conv())) == {"x", "pad"}


def joined(m, x):
    # A concat that is shuffled and taken apart again, as in ShuffleNetV2.
    y = torch.cat([F.relu(m.a(x)), m.act(m.b(x))], 1)
    p, q = F.channel_shuffle(y, 2).chunk(2, 1)
    return m.c(p) * m.d(q)


@pytest.mark.parametrize(
    ("target", "act", "expected"),
    [
        ("onnxruntime", nn.ReLU(), {"x", "relu", "act"}),  # both without a sign: one range, nothing after the concat
        ("onnxruntime", nn.Identity(), {"x", "relu", "b", "cat"}),
        ("tensorrt", nn.ReLU(), {"x", "getitem", "getitem_1"}),
    ],
)
def test_parts_of_a_concat_have_its_range_where_the_target_wants_that(target, act, expected):
    result = placed(joined, target, a=conv(), b=conv(), c=conv(), d=conv(), act=act)
    assert quantized(result) - {"c", "d"} == expected
    names = {row.tensor: row.quantizer for row in result.decisions if row.tensor in expected}
    assert len(set(names.values())) == (2 if "act" in expected else len(expected))
    assert not any("query, key and value" in row.reason for row in result.decisions)


def test_constants_and_integers_are_no_activations():
    token, fc = nn.Parameter(torch.randn(2, 1, 8)), nn.Linear(8, 4)
    model = Net(lambda net, x: net.fc(torch.cat([net.token, x], 1)), token=token, fc=fc)
    assert quantized(placement(model, shape=(2, 3, 8))) == {"cat"}
    graph = compress.trace(Net(lambda m, x: m.fc(x.float()), fc=nn.Linear(3, 2)), torch.zeros(2, 3, dtype=torch.int64))
    assert {site.edges[0][0] for site in place(read_fx(graph), compress.QuantSpec()).activations} == {
        "float_1"
    }  # not the integers


def test_layers_of_constants_alone_stay_float():
    layers = {"first": nn.Linear(2, 4), "last": nn.Linear(4, 8), "fc": nn.Linear(8, 4)}
    places = nn.Parameter(torch.rand(3, 2))
    model = Net(lambda net, x: net.fc(x + net.last(net.first(net.places).relu())), places=places, **layers)
    result = placement(model, shape=(2, 3, 8))
    assert [site.path for site in result.weights] == ["fc"] and quantized(result) == {"add"}
    assert [row.layer for row in result.decisions if row.rule == "constant"] == ["first", "last"]


def test_only_inputs_of_a_concat_share_a_scale():
    result = placed(lambda m, x: m.c(torch.cat([x.exp(), x.sigmoid(), x], 1)), c=conv(12))
    assert all(row.reason.endswith("; shares one scale with 2 more inputs of a concat") for row in result.decisions[:3])
    result = placed(lambda m, x: m.c(torch.cat([x.exp(), x], 1)), c=conv(8))
    assert all(row.reason.endswith("; shares one scale with 1 more inputs of a concat") for row in result.decisions[:2])
    assert not any("shares" in row.reason for row in placement(TinyResNet()).decisions)


def two_consumers(m, x):
    y = F.relu(m.first(x))
    return m.a(y) + m.b(y)


TWO = {"first": conv(), "a": conv(), "b": conv()}
FP8 = {
    "weights": compress.WeightSpec(kind="e4m3"),
    "activations": compress.ActivationSpec(kind="e4m3", calibrator="max"),
}


@pytest.mark.parametrize(("match", "bits"), [("a", 8), ("b", 8), ("[ab]", 4)])
def test_the_widest_of_the_widths_that_consumers_ask_for_is_used(match, bits):
    spec = compress.QuantSpec(rules=(compress.Rule(match=match, activations=compress.ActivationSpec(num_bits=4)),))
    result = placed(two_consumers, spec=spec, **TWO)
    widths = {site.edges[0][0]: site.format.num_bits for site in result.activations}
    assert widths["relu"] == bits and widths["x"] == 8
    assert {row.num_bits for row in result.decisions if row.tensor == "relu"} == {bits}


def test_integers_and_fp8_cannot_share_a_quantizer():
    spec = compress.QuantSpec(rules=(compress.Rule(match="b", **FP8),))
    with pytest.raises(QuantizationError, match=r"relu is read as integers and as FP8.*: a \(int\), b \(e4m3\)"):
        placed(two_consumers, spec=spec, **TWO)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime", "any"])
def test_fp8_has_a_sign_on_every_target_and_no_offset(target):
    result = placed(two_consumers, spec=compress.QuantSpec(target=target, **FP8), **TWO)
    formats = [site.format for site in result.activations]
    assert {(f.kind, f.signed, f.offset) for f in formats} == {("e4m3", True, False)}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tensorrt", {"x": (True, False), "relu": (True, False), "a": (True, False)}),
        ("openvino", {"x": (True, True), "relu": (False, False), "a": (True, False)}),
        ("onnxruntime", {"x": (True, True), "relu": (False, False), "a": (True, True)}),
        ("any", {"x": (True, False), "relu": (False, False), "a": (True, False)}),
    ],
)
def test_signs_and_offsets_of_each_target(target, expected):
    # As the table says: no sign where nothing is negative; an offset for convolutions, on ONNX Runtime for all.
    result = placed(lambda m, x: m.fc(m.a(F.relu(m.first(x)))), target, first=conv(), a=conv(), fc=nn.Linear(6, 2))
    formats = {site.edges[0][0]: (site.format.signed, site.format.offset) for site in result.activations}
    assert formats == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tensorrt", {"silu": 0.0, "gelu": 0.0, "cat": 0.0}),
        ("any", {"silu": 0.0, "gelu": 0.0, "cat": 0.0}),
        ("openvino", {"silu": -0.2785, "gelu": -0.1701, "cat": 0.0}),
        ("onnxruntime", {"silu": -0.2785, "gelu": -0.1701, "cat": 0.0}),
    ],
)
def test_zero_points_of_each_target(target, expected):
    # CPU engines take a zero point where the lowest value is known; of `cat`, only one input has one.
    def function(m, x):
        y = m.a(F.silu(m.first(x)))
        y = m.b(torch.cat([F.silu(y), y], 1))
        return m.out(F.gelu(m.fc(y.mean((2, 3)))))

    layers = {"first": conv(), "a": conv(), "b": nn.Conv2d(8, 3, 1), "fc": nn.Linear(3, 4), "out": nn.Linear(4, 2)}
    result = placed(function, target, **layers)
    formats = {consumer: site.format for site in result.activations for _, consumer in site.edges}
    joined = formats["cat"] if "cat" in formats else formats["b"]
    assert {"silu": formats["a"].lowest, "gelu": formats["out"].lowest, "cat": joined.lowest} == expected
    assert all(form.offset for form in formats.values() if form.lowest)


def test_matrix_products_keep_the_whole_range_by_default():
    layers = {"first": conv(), "a": conv(), "fc": nn.Linear(6, 2)}

    def found(**keys):
        result = placed(lambda m, x: m.fc(m.a(F.relu(m.first(x)))), spec=compress.QuantSpec(**keys), **layers)
        return {site.edges[0][0]: site.spec.calibrator for site in result.activations}

    assert found() == {"x": "max", "relu": "mse", "a": "max"}
    assert found(smooth=None) == {"x": "max", "relu": "mse", "a": "mse"}
    assert found(activations=compress.ActivationSpec(num_bits=4))["a"] == "mse"
    assert found(activations=compress.ActivationSpec(calibrator="mse"))["a"] == "mse"


def test_the_range_of_an_input_is_measured_whole():
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="entropy"))
    result = placed(lambda m, x: m.c(F.relu(m.b(m.a(x)))), spec=spec, a=conv(), b=conv(), c=conv())
    calibrators = {site.edges[0][0]: site.spec.calibrator for site in result.activations}
    assert calibrators == {"x": "max", "a": "entropy", "relu": "entropy"}


@pytest.mark.parametrize(
    ("target", "bits", "axis", "words", "narrow"),
    [
        ("tensorrt", 8, 0, "per output channel, symmetric", True),
        ("tensorrt", 4, 0, "per output channel, symmetric", True),
        ("tensorrt", 8, None, "per tensor, symmetric", True),
        ("any", 4, 0, "per output channel, -8 to 7", False),
        ("any", 8, 0, "per output channel, symmetric", True),
    ],
)
def test_rows_of_weights(target, bits, axis, words, narrow):
    spec = compress.QuantSpec(target=target, weights=compress.WeightSpec(num_bits=bits, axis=axis))
    result = placed(lambda m, x: m.first(x), spec=spec, first=conv())
    (row,) = [row for row in result.decisions if row.rule == "weight"]
    assert (row.tensor, row.layer, row.quantizer) == ("first.weight", "first", "first.weight_quantizer")
    assert (row.num_bits, row.axis, row.signed, row.reason) == (bits, axis, True, words)
    (site,) = result.weights
    assert (site.format.narrow, site.format.axis, site.format.num_bits) == (narrow, axis, bits)


def test_the_first_and_the_last_layer_have_bits_of_their_own_unless_a_rule_says_otherwise():
    few = {"weights": compress.WeightSpec(num_bits=4), "activations": compress.ActivationSpec(num_bits=4)}
    result = placement(TinyResNet(), compress.QuantSpec(first_last_bits=6, **few))
    bits = {site.path: site.format.num_bits for site in result.weights}
    assert (bits.pop("conv1"), bits.pop("fc")) == (6, 6) and set(bits.values()) == {4}
    widths = {row.tensor: row.num_bits for row in result.decisions}
    assert (widths["x"], widths["avgpool"], widths["relu"]) == (6, 6, 4)
    result = placement(TinyResNet(), compress.QuantSpec(first_last_bits=6, rules=(compress.Rule(match="fc"),), **few))
    assert {site.path: site.format.num_bits for site in result.weights}["fc"] == 4


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, result: 2 * result)
    return layer


FLOAT = compress.QuantSpec(rules=(compress.Rule(match="*", enable=False),))
BLOCK = compress.QuantSpec(rules=(compress.Rule(match="block2"),))
ATTENTION = Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2))


@pytest.mark.parametrize(
    ("model", "spec", "shape", "words"),
    [
        (
            nn.Sequential(nn.AvgPool2d(2), nn.ReLU()),
            None,
            (2, 4, 6, 6),
            "no layer that can be quantized.*inspect model",
        ),
        (TinyResNet(), FLOAT, (2, 3, 32, 32), "no layer that can be quantized"),
        (ATTENTION, None, (5, 4), "attention: one opaque attention"),  # over rows without a batch
        (TinyResNet(), BLOCK, (2, 3, 32, 32), r"did you mean 'block2\.\*' \(4 layers\)"),
    ],
)
def test_what_cannot_gain_is_refused_with_the_first_reasons(model, spec, shape, words):
    with pytest.raises(QuantizationError, match=words):
        placement(model, spec, shape)


def test_no_more_than_three_reasons_are_given():
    four = nn.Sequential(*(hooked(nn.ConvTranspose1d(2, 2, 1)) for _ in range(4)))
    with pytest.raises(QuantizationError, match="no layer that can be quantized") as error:
        placement(four, shape=(2, 2, 5))
    assert str(error.value).count("has hooks") == 3


def test_a_quantized_network_is_refused():
    made = compress.insert_quantizers(nn.Sequential(conv(), conv()), torch.randn(2, 4, 6, 6))
    with pytest.raises(QuantizationError, match="quantized already"):
        place(read_fx(made), compress.QuantSpec())


def test_a_product_without_weights_is_quantized():
    result = placed(lambda m, x: F.relu(x) @ x.exp(), shape=(2, 4, 4))
    assert quantized(result) == {"relu", "exp"} and result.weights == ()


def test_layers_that_cannot_be_quantized_say_why():
    result = placed(lambda m, x: F.conv1d(m.first(x), m.first.weight.abs()), shape=(2, 4, 6), first=nn.Conv1d(4, 4, 1))
    reasons = {row.layer: row.reason for row in result.decisions if row.rule == "cannot quantize"}
    assert reasons["conv1d"].startswith("conv1d is a function that cannot become a layer")
    assert [site.path for site in result.weights] == ["first"]


def test_what_is_kept_whole_says_so():
    part = Net(lambda net, x: net.inner(x) if x.sum() > 0 else x, inner=conv())
    model, inner = nn.Sequential(conv(), part), compress.Rule(match="1.inner")
    (row,) = [row for row in placement(model, shape=(2, 4, 6, 6)).decisions if row.layer == "1"]
    assert row.rule == "unknown stays float" and "Net is kept whole" in row.reason
    with pytest.raises(QuantizationError, match=r"1\.inner.* \(1 is kept whole and stays float"):
        placement(model, compress.QuantSpec(rules=(inner,)), (2, 4, 6, 6))


def test_a_result_is_quantized_after_a_batchnorm_that_is_kept():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()).eval()
    result = place(read_fx(compress.trace(model, torch.randn(2, 4, 6, 6))), compress.QuantSpec(target="onnxruntime"))
    assert quantized(result) == {"input_1", "_2"}


def test_results_of_the_model_and_sizes_do_not_read_quantized_tensors():
    def function(m, x):
        y = m.first(x)
        return y, m.last(y).flatten(1), y.reshape(y.shape[0], -1)

    result = placed(function, "onnxruntime", first=nn.AvgPool2d(2), last=conv())
    (site,) = [site for site in result.activations if site.edges[0][0] == "first"]
    assert {consumer for _, consumer in site.edges} == {"last", "reshape"}
    assert rules(result, "last") == ["output stays float"]


class Pair(NamedTuple):
    scores: torch.Tensor
    features: torch.Tensor


@dataclass
class Result:
    scores: torch.Tensor
    features: torch.Tensor


@pytest.mark.parametrize("target", TARGETS)
def test_results_in_a_class_get_the_quantizers_of_results_in_a_tuple(target):
    def placed(form):
        def run(net, x):
            features = net.b(net.a(x).relu()).relu()
            return form(net.fc(features), features)

        qmodel = compress.quantize(Net(run, **layers).eval(), x, [x], spec=compress.QuantSpec(target=target))
        return qmodel.placement.decisions, flat_tensors(qmodel(x))

    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3), "fc": nn.Conv2d(8, 4, 1)}
    x = torch.randn(2, 3, 8, 8)
    expected, results = placed(lambda a, b: (a, b))
    for form in (Pair, Result):
        decisions, found = placed(form)
        assert decisions == expected and all(map(torch.equal, results, found))


def test_rows_are_in_the_order_of_the_graph():
    graph = compress.trace(TinyResNet(), torch.randn(2, 3, 16, 16))
    order = {node.name: i for i, node in enumerate(graph.graph.nodes)}
    layers = {str(node.target): i for i, node in enumerate(graph.graph.nodes) if node.op == "call_module"}
    places = [
        layers[row.layer] if row.rule == "weight" else order[row.tensor]
        for row in place(read_fx(graph), compress.QuantSpec(target="onnxruntime")).decisions
    ]
    assert places == sorted(places)


def test_one_node_of_a_quantizer_serves_all_consumers_and_knows_its_shape():
    qmodel = compress.insert_quantizers(Net(two_consumers, **TWO), torch.randn(2, 4, 6, 6))
    nodes = [node for node in qmodel.graph.nodes if str(node.target).startswith("quantizers.")]
    assert len(nodes) == len(qmodel.placement.activations)
    (shared,) = [node for node in nodes if len(node.users) == 2]
    assert shared.meta["shape"] == (2, 4, 6, 6) and shared.meta["dtype"] == torch.float32


@pytest.mark.parametrize("correction", [None, "analytic"])
def test_layers_have_a_bias_to_correct_only_where_it_is_corrected(correction):
    model = nn.Sequential(conv(bias=False), nn.BatchNorm2d(4), nn.ReLU(), conv(bias=False))
    spec = compress.QuantSpec(bias_correction=correction)
    qmodel = compress.insert_quantizers(model, torch.randn(2, 4, 6, 6), spec)
    assert (qmodel.get_submodule("3").bias is not None) == (correction is not None)


# Sums: which of them fuse with a layer, and which of their branches and results have a quantizer.

RESIDUAL = {  # tensors with a quantizer beside the input: the identity branch of a sum that a convolution fuses with
    "the longer branch fuses": (lambda m, x: m.a(x) + m.c(F.relu(m.b(x))), {"relu", "a"}),
    "in the other order": (lambda m, x: m.c(F.relu(m.b(x))) + m.a(x), {"relu", "a"}),
    "what a layer reads is its identity": (lambda m, x: m.a(y := m.b(x)) + y, {"b"}),
    "a result that is read twice fuses with nothing": (lambda m, x: (m.same(y := m.b(x)) + x, y.exp()), set()),
    "an identity between": (lambda m, x: (m.same(m.b(x)) + x.exp(), x), {"exp"}),
    "a sum that broadcasts": (lambda m, x: m.a(x) + m.b(x.amax((2, 3), keepdim=True)), {"amax"}),
    "a number": (lambda m, x: m.a(x) + 1, set()),
}


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_sums(name):
    function, expected = RESIDUAL[name]
    result = placed(function, a=conv(), b=conv(), c=conv(), same=nn.Identity())
    assert quantized(result) - {"x"} == expected
    asked = [row for row in result.decisions if "residual add" in row.rule]
    refused = [row for row in result.decisions if row.rule == "add stays float"]
    assert (len(asked), len(refused)) == {
        "what a layer reads is its identity": (1, 0),  # the other branch, a, does
        "a result that is read twice fuses with nothing": (0, 1),
        "a sum that broadcasts": (0, 0),
        "a number": (0, 0),
    }.get(name, (1, 0))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (lambda m, y: y, False),
        (lambda m, y: F.pixel_shuffle(F.relu(y), 2), False),
        (lambda m, y: m.c(m.norm(F.relu(y))), False),
        (lambda m, y: m.c(F.silu(y)), True),
        (lambda m, y: (y, m.c(y)), True),
    ],
)
@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
def test_a_sum_whose_result_nothing_takes_in_8_bits_stays_float(target, after, expected):
    layers = {"a": conv(), "c": nn.Conv2d(4, 4, 1), "norm": nn.GroupNorm(2, 4)}
    result = placed(lambda m, x: after(m, m.a(x) + x.exp()), target, **layers)
    assert ("exp" in quantized(result)) == expected
    assert ("add stays float" in rules(result, "add")) != expected
    assert expected or "add output" not in rules(result, "add")


def test_sums_of_volumes_fuse_and_sums_of_tokens_do_not():
    volumes = placed(lambda m, x: m.a(x) + x.exp(), shape=(2, 4, 3, 3, 3), a=nn.Conv3d(4, 4, 1))
    assert quantized(volumes) == {"x", "exp"}
    tokens = placed(lambda m, x: m.a(x) + x.exp(), shape=(2, 4, 4), a=nn.Linear(4, 4))
    assert quantized(tokens) == {"x"} and rules(tokens, "add") == []


def test_a_sum_whose_layer_is_float_stays_float():
    result = placed(
        lambda m, x: F.relu(m.up(m.first(x)) + x),
        shape=(2, 4, 6),
        spec=compress.QuantSpec(rules=(compress.Rule(match="up", enable=False),)),
        first=nn.Conv1d(4, 4, 1),
        up=nn.ConvTranspose1d(4, 4, 1),
    )
    assert quantized(result) == {"x"}  # a sum of three dimensions is none of images
    result = placed(
        lambda m, x: m.last(F.relu(m.a(x) + x)),
        spec=compress.QuantSpec(rules=(compress.Rule(match="a", enable=False),)),
        a=conv(),
        last=conv(),
    )
    assert rules(result, "add") == ["add stays float"] and quantized(result) == {"relu"}


def test_a_sum_that_broadcasts_has_no_result_in_integers_of_its_own():
    result = placed(lambda m, x: F.gelu(m.a(x) + m.b(x.amax((2, 3), keepdim=True))), "onnxruntime", a=conv(), b=conv())
    assert not any("add" in row.rule for row in result.decisions)


def test_the_result_of_a_sum_is_asked_for_by_the_sum_and_not_by_its_layer():
    spec = compress.QuantSpec(target="onnxruntime", residual="identity")
    result = placed(lambda m, x: m.c(F.relu(m.a(x) + x.exp())).mean((2, 3)), spec=spec, a=conv(), c=conv())
    assert rules(result, "relu") == ["add output, conv input"]


# `quantization.residual`: which branches of a sum have a quantizer, read off the graph itself.


def block():
    def run(net, x):
        y = torch.relu(net.first(x))
        return net.last(torch.relu(net.second(y) + y))

    return Net(run, first=nn.Conv2d(4, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3, padding=1), last=nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize(
    ("residual", "expected"),
    [(None, [False, True]), ("identity", [False, True]), ("both", [True, True]), ("none", [False, False])],
)
def test_branches(residual, expected):
    x = torch.randn(2, 4, 6, 6)
    qmodel = compress.insert_quantizers(block(), x, compress.QuantSpec(residual=residual))
    (add,) = [node for node in qmodel.graph.nodes if node.target in {operator.add, torch.add}]
    assert [str(branch.target).startswith("quantizers.") for branch in add.args] == expected
    refused = [row for row in qmodel.placement.decisions if row.rule == "add stays float"]
    assert bool(refused) == (residual == "none")


def test_another_word_is_refused():
    with pytest.raises(QuantizationError, match="identity, both, none"):
        compress.insert_quantizers(block(), torch.zeros(1, 4, 6, 6), compress.QuantSpec(residual="left"))
    with pytest.raises(RecipeError, match="quantization.residual"):
        parse_recipe({"quantization": {"residual": "left"}})
    assert parse_recipe({"quantization": {"residual": "both"}}).quantization.residual == "both"
