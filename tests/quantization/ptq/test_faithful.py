# What is done to a float network before its quantizers keeps what it computes: with quantizers off it is the same.
#
# The oracle is the caller's own model.

import copy
import types

import pytest
import torch
import torch.nn.functional as F
import torchvision
from onnx.reference import ReferenceEvaluator
from torch import nn

from compress import AdaRoundSpec, QuantSpec, export_onnx, quantize
from compress.errors import ModelError, QuantizationError
from compress.graph.compare import relative_error
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity.compare import sqnr
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
    with torch.no_grad():
        getattr(model, path).weight.zero_()
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
    with torch.no_grad():
        model.n.weight[2] = model.m.weight[2] = 30
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
    qmodel = faithful(model, x)
    assert set(model.state_dict()) == {name for name in qmodel.state_dict() if "quantizer" not in name}


def test_functional_layers_keep_the_names_of_their_parameters():
    def inner():
        return Net(
            lambda net, x: F.linear(x, net.w1, net.b1),
            w1=nn.Parameter(torch.randn(8, 8)),
            b1=nn.Parameter(torch.randn(8)),
        )

    model = chain(a=inner(), b=inner())
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
