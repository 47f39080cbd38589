# What is done to a float network before its quantizers keeps what it computes: with quantizers off it is the same.
#
# The oracle is the caller's own model.

import copy
import functools
import re
import types

import pytest
import torch
import torch.nn.functional as F
import torchvision
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn.utils import prune

import compress
from compress import (
    ActivationSpec,
    AdaRoundSpec,
    CompressWarning,
    QuantSpec,
    Rule,
    calibrate,
    export_onnx,
    insert_quantizers,
    quantize,
)
from compress.errors import CalibrationError, ModelError, QuantizationError
from compress.graph.compare import relative_error
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity import sqnr
from tests.further import further
from tests.networks import Net, with_statistics

IMAGE = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(2))


def conv(inputs=8, outputs=8):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def faithful(model, x, **spec):
    # The quantized network, after a look that all but its quantizers computes what the model does.
    with_statistics(model).eval()
    qmodel = quantize(model, x, [x], spec=QuantSpec(**({"bias_correction": None} | spec)))
    assert sqnr(model(x), qmodel(x)) > 15
    plain = copy.deepcopy(qmodel)
    for _, quantizer in quantizers(plain):
        quantizer.enabled = False
    assert relative_error(model(x), plain(x)) < 1e-5
    return qmodel


def layers_with_hooks():
    parts = {"a": conv(), "n": nn.BatchNorm2d(8), "b": conv(), "fc": nn.Linear(8, 4)}
    return Net(lambda s, x: s.fc(F.relu(s.b(F.relu(s.n(s.a(x))))).mean((2, 3))), **parts)


@pytest.mark.parametrize("path", ["a", "n", "b", "fc"])
@pytest.mark.parametrize("kind", ["after", "before", "forward"])
def test_hooks_and_a_forward_of_its_own_are_kept(path, kind):
    model = layers_with_hooks()
    layer = getattr(model, path)
    if kind == "after":
        layer.register_forward_hook(lambda module, args, result: result * 3)
    elif kind == "before":
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.1,))
    else:
        layer.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 3, layer)
    qmodel = faithful(model, IMAGE)
    if path != "n":
        (row,) = [row for row in qmodel.placement.decisions if row.layer == path and row.decision == "float"]
        assert ("forward of its own" if kind == "forward" else "has hooks") in row.reason
    before = qmodel(IMAGE)
    nn.init.zeros_(layer.weight)
    assert torch.equal(qmodel(IMAGE), before)  # nothing is shared with the caller's model


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_forward_hook", lambda module, args, result: result * 3),
        ("register_forward_hook", lambda module, args, result: [None, result.mul_(3)][0]),
        ("register_forward_pre_hook", lambda module, args: (args[0] * 3,)),
        ("register_forward_pre_hook", lambda module, args: [None, args[0].mul_(3)][0]),
    ],
)
def test_hooks_on_a_block_that_change_values_are_in_the_graph(register, hook):
    block = Net(lambda s, x: s.b(s.a(x).relu()), a=conv(), b=conv())
    getattr(block, register)(hook)
    faithful(Net(lambda s, x: s.c(s.block(s.a(x)).relu()), a=conv(), block=block, c=conv()), IMAGE)


def test_a_hook_on_an_activation_makes_its_sign_unknown():
    model = Net(lambda s, x: s.b(s.r(s.a(x))), a=conv(), r=nn.ReLU(), b=conv())
    model.r.register_forward_hook(lambda module, args, result: -result)
    faithful(model, IMAGE, target="openvino")


def test_a_function_set_as_forward_is_refused():
    model = layers_with_hooks()
    own = model.b.forward
    model.b.forward = lambda x: own(x) * 3
    with pytest.raises(ModelError, match="b has a forward of its own"):
        quantize(model.eval(), IMAGE, [IMAGE])
    model.b = torch.compile(conv(), backend="eager")
    with pytest.raises(ModelError, match="b is compiled .* set its ._orig_mod"):
        quantize(model.eval(), IMAGE, [IMAGE])


@pytest.mark.parametrize("features", [8, 6])
def test_batchnorm_on_tokens_is_not_folded_into_a_linear_layer(features):
    model = Net(lambda s, x: s.n(s.a(x)), a=nn.Linear(8, features), n=nn.BatchNorm1d(8))
    assert isinstance(faithful(model, TOKENS).n, nn.BatchNorm1d)


def test_batchnorm_after_a_convolution_without_a_batch_is_not_folded():
    model = Net(lambda s, x: s.n(s.a(x)), a=nn.Conv1d(8, 8, 3, padding=1), n=nn.BatchNorm1d(8))
    faithful(model, torch.randn(8, 8))


def scaled(layer):
    layer.weight.data *= torch.logspace(-2, 1, 8).view(-1, *[1] * (layer.weight.dim() - 1))
    return layer


def chain(**parts):
    return Net(lambda s, x: s.b(F.relu(s.a(x))), **parts)


def test_equalization_leaves_layers_whose_channels_are_on_another_axis():
    model = Net(
        lambda s, x: s.d(F.relu(s.c(s.b(F.relu(s.a(x)))))),
        a=scaled(nn.Linear(8, 8)),
        b=nn.Conv1d(8, 8, 1),
        c=scaled(nn.Conv1d(8, 8, 1)),
        d=nn.Conv1d(8, 8, 1),
    )
    done = faithful(model, TOKENS, equalize=True).report.prepared.equalization
    assert "another axis" in done.refused["a"]
    assert {(pair.first, pair.second) for pair in done.pairs} == {("b", "c"), ("c", "d")}


def test_equalization_leaves_shared_weights():
    model = chain(a=scaled(conv()), b=conv())
    model.b.weight = model.a.weight
    with pytest.raises(QuantizationError, match="shares its weight with"):
        quantize(model.eval(), IMAGE, [IMAGE], spec=QuantSpec(equalize=True))
    reads = Net(lambda s, x: F.conv2d(s.b(F.relu(s.a(x))), s.b.weight), a=scaled(conv()), b=conv())
    with pytest.raises(QuantizationError, match="also reads by itself"):
        quantize(reads.eval(), IMAGE, [IMAGE], spec=QuantSpec(equalize=True))


def test_smoothing_leaves_shared_weights():
    def forward(s, x):
        return s.b(s.a(s.n(x))) + s.c(x) + s.d(s.m(x))

    linear = {name: nn.Linear(8, 8) for name in "abcd"}
    model = Net(forward, n=nn.LayerNorm(8), m=nn.LayerNorm(8), **linear)
    model.c.weight = model.a.weight
    model.n.weight.data[2] = model.m.weight.data[2] = 30
    done = faithful(model, TOKENS, smooth=0.5).report.smoothing
    assert [norm.path for norm in done.norms] == ["m"] and "shares its weight" in done.refused["n"]


def test_an_einsum_that_takes_a_diagonal_stays():
    faithful(Net(lambda s, x: torch.einsum("ij,jj->ij", s.a(x), s.a(x)), a=nn.Linear(8, 8)), TOKENS[0])


class LoRA(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.A, self.B = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.A.t() @ self.B.t()


class Gained(nn.Conv2d):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias) * self.gain


class Doubled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias) * 2


@pytest.mark.parametrize(("layer", "x"), [(LoRA(8, 8), TOKENS), (Gained(8, 8, 3), IMAGE), (Doubled(8, 8, 3), IMAGE)])
def test_layers_of_ones_own_keep_all_their_parameters(layer, x):
    model = chain(a=copy.deepcopy(layer), b=copy.deepcopy(layer))
    kept = {re.sub(r"\w+_layer\.", "", name) for name in faithful(model, x).state_dict() if "quantizer" not in name}
    assert set(model.state_dict()) == kept


@pytest.mark.parametrize(
    ("forward", "weights", "x"),
    [
        (lambda s, x: F.linear(F.relu(F.linear(x, s.weight, s.b1)), s.w2, s.bias), 2, TOKENS),
        (lambda s, x: F.linear(F.linear(x, s.w1).sigmoid() * F.linear(x, s.weight), s.w2), 3, TOKENS),
        (lambda s, x: F.linear(x, s.weight) * 2 + s.bias, 1, TOKENS),
        (lambda s, x: F.linear(x, s.w1) * s.b1 + s.bias, 1, TOKENS),
        (lambda s, x: F.leaky_relu(F.linear(x, s.weight * 0.7, s.bias * 0.5)) + s.bias, 1, TOKENS),
        (lambda s, x: functools.reduce(lambda y, w: F.conv2d(y, w, padding=1).relu(), s.filters, x), 3, IMAGE),
        (lambda s, x: F.conv2d(x, s.filters[0] * 0.7)[:, :8] + s.bias[:, None, None], 1, IMAGE),
    ],
)
def test_several_weights_and_vectors_of_one_module(forward, weights, x):
    vectors = {name: nn.Parameter(torch.rand(8)) for name in ("bias", "b1")}
    part = Net(forward, **vectors, **{n: nn.Parameter(torch.randn(8, 8) / 3) for n in ("weight", "w1", "w2")})
    part.filters = nn.ParameterList(torch.randn(8, 8, 3, 3) / 8 for _ in range(3))
    qmodel = faithful(Net(lambda s, x: s.part(x), part=part), x)
    assert sum(name.endswith("weight_quantizer") for name, _ in qmodel.named_modules()) == weights


def test_functional_layers_keep_the_names_of_their_parameters():
    values = [{"w1": nn.Parameter(torch.randn(8, 8)), "b1": nn.Parameter(torch.randn(8))} for _ in "ab"]
    a, b = (Net(lambda net, x: F.linear(x, net.w1, net.b1), **named) for named in values)
    model = chain(a=a, b=b)
    qmodel = faithful(model, TOKENS)
    assert set(model.state_dict()) == {name for name in qmodel.state_dict() if "quantizer" not in name}


@pytest.mark.parametrize("spec", [{}, {"adaround": AdaRoundSpec(steps=2)}, {"bias_correction": "empirical"}])
def test_arguments_by_name_and_sizes_of_results(spec):
    def forward(s, x):
        return s.t(input=F.relu(s.n(input=s.a(input=x))), output_size=list(x.shape[2:]))

    model = Net(
        forward,
        a=nn.Conv2d(8, 8, 3, stride=2, padding=1),
        n=nn.BatchNorm2d(8),
        t=nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1),
    )
    with_statistics(model).eval()
    qmodel = quantize(model, IMAGE, [IMAGE], spec=QuantSpec(**spec))
    assert sqnr(model(IMAGE), qmodel(IMAGE)) > 15 and not any("n." in name for name in qmodel.state_dict())


def test_a_shape_that_is_added_up_of_lists():  # as MONAI's squeeze-and-excite has it
    def forward(s, x):
        y = s.a(x)
        return s.b(y * s.fc(y.mean((2, 3))).sigmoid().view([*y.shape[:2]] + [1] * (y.ndim - 2)))

    qmodel = quantize(
        Net(forward, a=conv(), b=conv(), fc=nn.Linear(8, 8)).eval(), IMAGE, [IMAGE], spec=QuantSpec(target="openvino")
    )
    assert qmodel(IMAGE[:1]).shape == qmodel(IMAGE)[:1].shape


def test_adaround_rounds_the_projections_of_attention():
    model = torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=4).eval()
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(4, 3, 16, 16)
    qmodel = quantize(model, x, [x], spec=QuantSpec(adaround=AdaRoundSpec(steps=2)))
    assert any("in_proj" in name for name in qmodel.state_dict())
    assert sqnr(model(x), qmodel(x)) > 15


def test_a_buffer_expanded_to_the_batch_is_traced():
    model = Net(
        lambda s, x: s.b(torch.cat([s.token.expand(x.shape[0], -1, -1), s.a(x)], 1)),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
    )
    model.register_buffer("token", torch.randn(1, 1, 8))
    assert faithful(model, TOKENS)(TOKENS[:1]).shape == (1, 9, 8)


def test_batchnorm_without_parameters_is_kept():
    model = Net(lambda s, x: s.b(F.relu(s.n(s.a(x)))), a=conv(), n=nn.BatchNorm2d(8, affine=False), b=conv())
    model.n.running_mean.normal_()
    qmodel = quantize(model.eval(), IMAGE, [IMAGE], spec=QuantSpec(batchnorm="keep"))
    assert sqnr(model(IMAGE), qmodel(IMAGE)) > 15
    qmodel.train()(IMAGE).sum().backward()
    assert qmodel.n.running_mean.ne(model.n.running_mean).all() and qmodel.a.weight.grad is not None


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_linear_layer_without_bias_on_tokens_and_a_parameter_of_no_dimension(target, tmp_path):
    model = Net(lambda s, x: s.b(s.a(x) * s.gain), a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False))
    model.gain = nn.Parameter(torch.tensor(-2.0))
    qmodel = faithful(model, TOKENS, target=target)
    path = export_onnx(qmodel, TOKENS, tmp_path / "m.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": TOKENS.numpy()})
    assert sqnr(qmodel(TOKENS), torch.from_numpy(got)) > 40


# Models and data that are not what quantization expects: a clear refusal, or the right thing done.


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAX = QuantSpec(activations=ActivationSpec(calibrator="max"))


def layers():
    torch.manual_seed(0)
    return {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3), "fc": nn.Linear(8, 5)}


def network():
    return Net(lambda net, x: net.fc(net.b(net.a(x).relu()).relu().mean((2, 3))), **layers())


def noise(model, qmodel, x=X):
    return sqnr(model.eval()(x), qmodel(x))


def test_zero_channels_and_zero_weights_stay_zero():
    model = network()
    model.a.weight.data[2] = 0
    nn.init.zeros_(model.b.weight)
    qmodel = quantize(model, X[:2], [X], spec=MAX)
    assert (qmodel.a.quantized_weight[2] == 0).all() and (qmodel.b.quantized_weight == 0).all()
    assert noise(model, qmodel) > 30


def test_a_module_used_twice_has_one_weight_quantizer_and_one_range_for_each_input():
    c = nn.Conv2d(8, 8, 3, padding=1)
    model = Net(lambda net, x: net.fc(net.c(net.c(net.a(x).relu()).relu() * 3).mean((2, 3))), c=c, **layers())
    qmodel = quantize(model, X[:2], [X], spec=MAX)
    assert [site.path for site in qmodel.placement.weights] == ["a", "c", "fc"]
    readers = [node.args[0] for node in qmodel.graph.nodes if node.target == "c"]
    assert len(readers) == 2 and readers[0] is not readers[1]
    assert all(node.op == "call_module" and node.target.startswith("quantizers.") for node in readers)
    assert noise(model, qmodel) > 25


def test_tensors_named_as_what_modules_have():
    class Named(Net):
        def forward(self, train):
            return self.run(self, train)

    model = Named(lambda net, x: net.fc(net.b(net.a(x).cpu()).double().float().mean((2, 3))), **layers())
    qmodel = quantize(model, X[:2], [X], spec=MAX)
    assert "quantizers.train_" in dict(qmodel.named_modules()) and noise(model, qmodel) > 25


def test_outputs_in_dicts_and_tuples():
    def run(net, x):
        y = net.a(x).relu()
        return {"map": y, "rest": (net.fc(y.mean((2, 3))),)}

    model = Net(run, **layers()).eval()
    result, expected = quantize(model, X[:2], [X], spec=MAX)(X), model(X)
    assert sqnr(expected["map"], result["map"]) > 25 and sqnr(expected["rest"][0], result["rest"][0]) > 25


def test_a_constant_that_is_added_is_no_activation():
    model = Net(lambda net, x: net.fc(net.b((net.a(x) + net.table).relu()).mean((2, 3))), **layers())
    model.register_buffer("table", torch.ones(1, 8, 16, 16))
    qmodel = quantize(model, X[:2], [X], spec=MAX)
    assert not any("table" in tensor for site in qmodel.placement.activations for tensor, _ in site.edges)
    assert noise(model, qmodel) > 25


def test_other_image_sizes_than_the_traced_one():
    model = network()
    qmodel = quantize(model, X[:2], [X, torch.randn(2, 3, 24, 20)], spec=MAX)
    assert noise(model, qmodel, torch.randn(3, 3, 20, 32)) > 20


def test_one_batch_of_one_image_is_enough_and_none_is_not():
    model = network()
    assert noise(model, quantize(model, X[:2], [X[:1]], spec=MAX), X[:1]) > 25
    with pytest.raises(CalibrationError, match="no images"):
        quantize(model, X[:2], [], spec=MAX)


def test_a_tensor_that_was_constant_zero_is_named():
    dead = Net(lambda net, x: net.fc(net.b(net.a(x).relu() * 0).mean((2, 3))), **layers())
    with pytest.warns(CompressWarning, match=r"quantizers\.mul.*b, which consume"):
        quantize(dead, X[:2], [X], spec=MAX)
    with pytest.raises(CalibrationError, match="all collected values are zero"):
        quantize(network(), X[:2], [torch.zeros_like(X)], spec=MAX)


def test_a_quantizer_that_nothing_reached_is_named():
    qmodel = insert_quantizers(Net(lambda net, x: net.a(x), a=nn.Conv2d(3, 4, 1)), X[:2], MAX)
    with pytest.raises(CalibrationError, match="no images"):
        calibrate(qmodel, [X[:0]])
    with pytest.raises(CalibrationError, match=r"quantizers\.x has no ranges"):
        qmodel(X)


DTYPES = (torch.float16, torch.bfloat16, torch.float64)
NO_BATCHES = (None, 3, X)
WRONG_BATCHES = (X[:, :1], X.double(), X.to(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "batches", "spec", "error", "words"),
    [
        *((dtype, [X.to(dtype)], MAX, QuantizationError, rf"{dtype} .*model\.float\(\)") for dtype in DTYPES),
        (torch.float32, [X], "openvino", QuantizationError, "'openvino'.*QuantSpec"),
        *((torch.float32, none, MAX, CalibrationError, "give an iterable of batches") for none in NO_BATCHES),
        *(
            (torch.float32, [X, wrong], MAX, CalibrationError, r"fails on a calibration batch of \(4, [13], 16, 16\)")
            for wrong in WRONG_BATCHES
        ),
    ],
)
def test_other_types_batches_and_specs_are_refused(dtype, batches, spec, error, words):
    with pytest.raises(error, match=words):
        quantize(network().to(dtype), X[:2].to(dtype), batches, spec=spec)


@pytest.mark.parametrize("batches", [[], [WRONG_BATCHES[0]], [WRONG_BATCHES[2]]])
def test_batches_of_a_network_with_a_concat_are_refused_alike(batches):
    model = Net(lambda net, x: net.b(torch.cat([net.a(x), x], 1)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(7, 4, 1))
    with pytest.raises(CalibrationError, match="`batches` was empty|fails on a calibration batch"):
        quantize(model, X[:2], batches, spec=MAX)


def root():
    return Net(
        lambda net, x: net.fc(F.conv2d(x, net.kernel).relu().mean((2, 3))),
        kernel=nn.Parameter(torch.randn(8, 3, 3, 3)),
        fc=nn.Linear(8, 5),
    )


class PackedWeight(torch.Tensor):
    """A tensor of another class, such as torchao keeps packed weights in."""


def packed():
    model = network()
    model.fc.weight = nn.Parameter(torch.randn(5, 8).as_subclass(PackedWeight))
    return model


def prepared_by_accelerate():
    # What `Accelerator(mixed_precision="bf16").prepare` sets on a module.
    model = network()
    model._original_forward = model.forward
    cast = torch.autocast("cpu", torch.bfloat16)(type(model).forward)
    model.forward = types.MethodType(cast, model)
    return model


def with_fc(layer):
    return Net(lambda net, x: net.fc(net.a(x).mean((2, 3))), **{**layers(), "fc": layer})


REFUSED = [
    (lambda: quantize(network(), X[:2], [X], spec=MAX), QuantizationError, "quantized already"),
    (lambda: with_fc(torch.ao.nn.quantized.dynamic.Linear(8, 5)), QuantizationError, "fc is a .*quantized already"),
    (packed, QuantizationError, r"fc\.weight is a .*PackedWeight"),
    (lambda: with_fc(nn.LazyLinear(5)), ModelError, r"fc\.weight has no shape yet"),
    (lambda: nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), QuantizationError, "no layer that can be quantized"),
    (lambda: nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), QuantizationError, "no layer that can be quantized"),
    (lambda: network().forward, ModelError, "must be a torch.nn.Module"),
    (lambda: nn.DataParallel(network()), ModelError, r"its \.module"),
    (lambda: nn.Sequential(nn.DataParallel(network())), ModelError, "0 is a DataParallel.*put its .module in its"),
    (lambda: torch.compile(network()), ModelError, r"its \._orig_mod"),
    (prepared_by_accelerate, ModelError, r"give accelerator\.unwrap_model"),
    (lambda: torch.jit.trace(network(), X), ModelError, "scripted or traced from"),
    (lambda: with_fc(torch.jit.trace(nn.Linear(8, 5), torch.ones(1, 8))), ModelError, "fc is a .*from in its place"),
    (
        lambda: torch.export.export(network().eval(), (X[:2],)).module(),
        ModelError,
        "the module that torch.export exported",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_models_that_cannot_be_quantized_say_what_to_give(make, error, words):
    with pytest.raises(error, match=words):
        quantize(make(), X[:2], [X], spec=MAX)


@pytest.mark.parametrize(
    "layer", [None, lambda: nn.Linear(16, 5), lambda: nn.Conv2d(3, 8, 3), lambda: nn.Conv1d(16, 4, 1)]
)
def test_a_weight_of_the_model_itself_is_quantized_in_a_layer_beside_it(layer):
    model = layer() if layer else root()
    x = X[:, 0] if isinstance(model, nn.Conv1d) else X
    qmodel = quantize(model, x[:2], [x], spec=MAX)
    names = [name for name, p in model.named_parameters() if p.dim() > 1]
    assert len(qmodel.placement.weights) == len(names) and noise(model, qmodel, x) > 30
    assert sum(p.numel() for p in qmodel.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", further(["resnet18", "shufflenet_v2_x0_5"], ["resnet18"]))
def test_a_float_model_that_is_ready_for_torchs_quantization_is_the_plain_one(name):
    # torchvision's own pairs: one with FloatFunctional and stubs, one without, equal weights.
    plain = torchvision.models.get_model(name, num_classes=5).eval()
    ready = torchvision.models.get_model(f"quantized_{name}", num_classes=5).eval()
    ready.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    expected, found = (quantize(model, x, [x], spec=MAX) for model in (plain, ready))
    assert torch.equal(found(x), expected(x)) and not torch.equal(found(x), plain(x))
    ready.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    with pytest.raises(QuantizationError, match="quantized already"):  # its ranges would be lost
        quantize(torch.ao.quantization.prepare(ready), x, [x], spec=MAX)


def test_models_with_another_librarys_quantizers():
    prepared = network().train()
    prepared.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(prepared, inplace=True)
    with pytest.raises(QuantizationError, match="torch.ao.*quantized already"):
        quantize(prepared.eval(), X[:2], [X], spec=MAX)
    pytest.importorskip("pytorch_quantization", reason="the peer is not installed")
    from pytorch_quantization.nn import QuantConv2d

    theirs = network()
    theirs.a = QuantConv2d(3, 8, 3, padding=1)
    with pytest.raises(QuantizationError, match="from_pytorch_quantization takes it over"):
        quantize(theirs, X[:2], [X], spec=MAX)


@pytest.mark.parametrize("made", ["weight_norm", "spectral_norm"])
def test_weights_that_hooks_compute_say_what_to_do(made):
    model = network()
    getattr(nn.utils, made)(model.b)
    with pytest.raises(ModelError, match=rf"weight of b .*torch.nn.utils.remove_{made}"):
        quantize(model, X[:2], [X])
    getattr(nn.utils, f"remove_{made}")(model.b)
    assert noise(model, quantize(model, X[:2], [X])) > 30


def test_weights_pruned_by_a_hook_are_refused():
    model = network()
    prune.l1_unstructured(model.b, "weight", 0.5)
    with pytest.raises(ModelError, match=r"b has parameters pruned by a hook .*torch.nn.utils.prune.remove"):
        quantize(model, X[:2], [X], spec=MAX)
    prune.remove(model.b, "weight")
    layer = quantize(model, X[:2], [X], spec=MAX).get_submodule("b")
    assert (layer.weight_quantizer(layer.weight)[model.b.weight == 0] == 0).all()


def test_a_module_that_cannot_be_traced_stays_float_and_says_why():
    part = Net(lambda net, x: net.inner(x) if x.sum() > 1e9 else x, inner=nn.Conv2d(8, 8, 1))
    model = Net(lambda net, x: net.fc(net.part(net.a(x)).mean((2, 3))), part=part, **layers())
    (row,) = [row for row in insert_quantizers(model, X[:2], MAX).placement.decisions if row.layer == "part"]
    assert row.decision == "float" and "Net is kept whole" in row.reason
    spec = QuantSpec(rules=(Rule(match="part.inner", enable=False),))
    with pytest.raises(QuantizationError, match="part is kept whole and stays float"):
        insert_quantizers(model, X[:2], spec)


def test_a_loader_of_a_stream_has_no_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randn(4, 3, 8, 8))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    assert quantize(model, torch.randn(2, 3, 8, 8), loader).placement.weights


@pytest.mark.parametrize("way", ["torch", "file"])
def test_experts_that_some_images_do_not_reach_have_numbers(way, tmp_path):
    # The mean of no tokens was NaN in their biases.
    def route(net, x):
        y, chosen = torch.zeros(len(x), 16), x[:, 0] > 0
        for expert, place in ((net.a, chosen), (net.b, ~chosen)):
            rows = place.nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        return net.c(y.relu())

    torch.manual_seed(0)
    model = Net(route, a=nn.Linear(8, 16), b=nn.Linear(8, 16), c=nn.Linear(16, 4)).eval()
    x = torch.randn(16, 8)
    images = [x[x[:, 0] > 0][:3], x]  # the first batch is for one expert alone
    spec = QuantSpec(target="onnxruntime")
    if way == "torch":
        found = quantize(model, x, images, spec=spec)(x)
    else:
        path = compress.quantize_onnx(export_onnx(model, x, tmp_path / "m.onnx"), images, spec=spec)
        with compress.build_engine(path, "onnxruntime") as engine:
            found = torch.from_numpy(engine.run({"input": x.numpy()})["logits"])
    assert sqnr(model(x), found) > 30
