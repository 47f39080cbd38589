# Every row of the table of traits against what torch computes, for every spelling of its kind.

import inspect
import math

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
import torchvision
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from compress import trace
from compress.graph.layers import layers, total_macs
from compress.graph.modules import InTraining
from compress.graph.ops import MANY, ONNX_KINDS, SPELLINGS, TRAITS, module_kind, node_kind
from compress.roofline_model.counting import workload
from tests.networks import Net
from tests.onnx_models import onnx_model

# Functions that are tried on positive numbers only.
POSITIVE_ARGUMENT = {"sqrt", "rsqrt", "log", "pow", "functions"}

BY_KIND = {  # arguments after the data
    "split": (2, 1),
    "reshape": (2, -1),
    "getitem": ((slice(None), slice(1, 3)),),
    "repeat": (2, 1),
    "pixel_shuffle": (2,),
    "pixel_unshuffle": (2,),
    "channel_shuffle": (2,),
    "roll": (1, 2),
    "flip": ([1],),
    "unfold": (2,),
    "max_pool": (2,),
    "avg_pool": (2,),
    "adaptive_avg_pool": (2,),
    "adaptive_max_pool": (2,),
    "group_norm": (2,),
    "local_response_norm": (3,),
    "softmax": (1,),
    "log_softmax": (1,),
    "pad": ((1, 1),),
    "pow": (2.5,),
    "squeeze": (1,),
    "dropout": (0.5, False),
    "resize": (None, 2.0),
    "scan": (1,),
    "glu": (1,),
}
BY_SPELLING = {
    torch.index_select: (1, torch.tensor([1, 0])),
    "index_select": (1, torch.tensor([1, 0])),
    torch.flatten: (1,),
    torch.unflatten: (1, (2, -1)),
    "unflatten": (1, (2, -1)),
    "flatten": (1,),
    torch.reshape: ((2, -1),),
    "view_as": "alike",
    "reshape_as": "alike",
    "expand_as": "alike",
    "type_as": "alike",
    "type": (torch.float64,),
    "to": (torch.float64,),
    torch.transpose: (1, 2),
    torch.permute: ((0, 2, 1, 3),),
    torch.swapaxes: (1, 2),
    torch.swapdims: (1, 2),
    torch.moveaxis: (1, 2),
    torch.movedim: (1, 2),
    "transpose": (1, 2),
    "permute": (0, 2, 1, 3),
    "swapaxes": (1, 2),
    "swapdims": (1, 2),
    "moveaxis": (1, 2),
    "movedim": (1, 2),
    torch.unsqueeze: (1,),
    "unsqueeze": (1,),
    torch.unbind: (1,),
    "unbind": (1,),
    torch.tensor_split: (2, 1),
    "select": (1, 2),
    "narrow": (1, 1, 2),
    "expand": (3, 2, 8, 4, 4),
    "repeat": (2, 1, 1, 1),
    "broadcast_to": ((3, 2, 8, 4, 4),),
    "unfold": (2, 2, 1),
    F.prelu: "weight",
    torch.clamp: (-0.5, 0.5),
    torch.clip: (-0.5, 0.5),
    "clamp": (-0.5, 0.5),
    "clip": (-0.5, 0.5),
    torch.clamp_min: (-0.5,),
    torch.clamp_max: (0.5,),
    "clamp_min": (-0.5,),
    "clamp_max": (0.5,),
    F.threshold: (0.5, 0.25),
    torch.lerp: (0.25,),
    "lerp": (0.25,),
    torch.addcmul: "alike",
    "addcmul": "alike",
    "addcdiv": "alike",
    torch.tile: ((2, 1),),
    "tile": ((2, 1),),
    torch.broadcast_to: ((3, 2, 8, 4, 4),),
    torch.rot90: (1, (2, 3)),
    "rot90": (1, (2, 3)),
    **dict.fromkeys((torch.fliplr, torch.flipud, "fliplr", "flipud", "ravel"), ()),
    "new_zeros": ((2, 8, 4, 4),),
    F.batch_norm: "statistics",
    F.layer_norm: ((4,),),
    F.rms_norm: ((4,),),
}
MODULES = {
    nn.BatchNorm1d: (8,),
    nn.BatchNorm2d: (8,),
    nn.BatchNorm3d: (8,),
    nn.SyncBatchNorm: (8,),
    nn.Threshold: (0.5, 0.25),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad3d), (1, 0.0)),
    nn.LayerNorm: (4,),
    nn.RMSNorm: (4,),
    nn.GroupNorm: (2, 8),
    nn.InstanceNorm1d: (8,),
    nn.InstanceNorm2d: (8,),
    nn.InstanceNorm3d: (8,),
    nn.LocalResponseNorm: (3,),
    nn.Softmax: (1,),
    nn.LogSoftmax: (1,),
    nn.GLU: (1,),
    nn.PixelShuffle: (2,),
    nn.PixelUnshuffle: (2,),
    nn.ChannelShuffle: (2,),
    nn.Unfold: (2,),
    nn.Unflatten: (1, (2, -1)),
    nn.Upsample: (None, 2.0),
    nn.ConstantPad2d: (1, 0.0),
    InTraining: (nn.Dropout(),),
}
PARAMETRIC = {"conv", "conv_transpose", "linear", "matmul", "addmm", "einsum", "attention", "embedding", "where"}
# Kinds whose rows claim nothing that the tests below look at, or that have a test of their own.
UNTRIED = PARAMETRIC | {
    "contraction",
    "recurrent",
    "deform_conv",
    "sample",
    "logic",
    "gather",
    "count",
    "search",
    "reduce",
    "sort",
    "masked_fill",
    "scatter",
    "shape",
    "assert",
    "compare",
    "floordiv",
    "getattr",
    "other",
}


def shape_for(spelling: object) -> tuple[int, ...]:
    name = getattr(spelling, "__name__", "")
    if spelling == "t":
        return (8, 4)
    return (2, 8, 8) if "1d" in name else (2, 8, 4, 4, 4) if "3d" in name else (2, 8, 4, 4)


def function_of(spelling, kind):
    if isinstance(spelling, type):
        size = (1,) if "Pad" in spelling.__name__ else (2,) if "Pool" in spelling.__name__ else ()
        return spelling(*MODULES.get(spelling, size)).double().eval()
    arguments = BY_SPELLING.get(spelling, BY_KIND.get(kind, ()))

    def call(*data):
        others = arguments
        if others == "alike":
            others = (data[0],)
        elif others == "weight":
            others = (torch.tensor([0.25], dtype=data[0].dtype),)
        elif others == "statistics":
            others = (torch.zeros(8).double(), torch.ones(8).double())
        if kind in {"concat", "stack"}:
            return spelling(list(data), 1)
        first, *rest = data[0].clone(), *data[1:]  # it may work in place
        if isinstance(spelling, str):
            return getattr(first, spelling)(*rest, *others)
        return spelling(first, *rest, *others)

    return call


def tensors(result):
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if t.is_floating_point()]


def data_for(spelling, kind, count, *, positive=False, seed=0):
    torch.manual_seed(seed)
    data = [torch.randint(-40, 41, shape_for(spelling)).double() / 16 for _ in range(count)]  # exact in float16
    return [x.abs() + 1 / 16 for x in data] if positive or kind in POSITIVE_ARGUMENT else data


def inputs_of(kind):
    number = TRAITS[kind].data_inputs
    return 2 if number == MANY else 1 if kind == "pow" else number


CASES = [
    pytest.param(spelling, kind, id=f"{kind}-{getattr(spelling, '__name__', spelling)}")
    for kind, row in SPELLINGS.items()
    if kind not in UNTRIED
    for spelling in row
]


@pytest.mark.parametrize(("spelling", "kind"), CASES)
def test_the_claims_of_a_row_hold(spelling, kind):
    traits, f, count = TRAITS[kind], function_of(spelling, kind), inputs_of(kind)
    x = data_for(spelling, kind, count)
    y = tensors(f(*x))
    assert y
    if traits.scales_linearly:
        assert all(torch.allclose(3 * a, b) for a, b in zip(y, tensors(f(*[3 * v for v in x])), strict=True))
    zeros = [torch.zeros_like(v) for v in x]
    if traits.keeps_zero:
        assert not any(t.any() for t in tensors(f(*zeros)))
    if traits.multiplies:
        assert not any(t.any() for t in (*tensors(f(zeros[0], *x[1:])), *tensors(f(*x[:-1], zeros[-1]))))
    if traits.non_negative == "always":
        assert all((t >= 0).all() for t in y)
    if traits.non_negative == "if inputs are":
        assert all((t >= 0).all() for t in tensors(f(*data_for(spelling, kind, count, positive=True))))
    if traits.moves_elements:
        known = torch.cat([*(v.flatten() for v in x), torch.zeros(1)])
        assert all(torch.isin(t.double(), known.to(t.dtype).double()).all() for t in y)
    if traits.commutes_with_quantization:
        grid = [(v / 0.25).round().clamp(-4, 3) * 0.25 for v in x]
        assert all(
            torch.equal((a / 0.25).round().clamp(-4, 3) * 0.25, b) for a, b in zip(y, tensors(f(*grid)), strict=True)
        )
    if traits.idempotent:
        same = torch.full_like(x[0], 0.7)
        assert all(torch.allclose(t, torch.full_like(t, 0.7)) for t in tensors(f(same)))


@pytest.mark.parametrize(("spelling", "kind"), [c for c in CASES if TRAITS[c.values[1]].elementwise])
def test_an_elementwise_result_depends_on_its_own_place(spelling, kind):
    f = function_of(spelling, kind)
    x = data_for(spelling, kind, inputs_of(kind))
    changed = [v.clone() for v in x]
    for v in changed:
        v[1, 2] += 0.5
    different = (f(*x) != f(*changed)) & ~(f(*x).isnan() & f(*changed).isnan())
    different[1, 2] = False
    assert not different.any()


@pytest.mark.parametrize(("spelling", "kind"), [c for c in CASES if TRAITS[c.values[1]].passes_channels])
def test_channels_are_apart(spelling, kind):
    f = function_of(spelling, kind)
    (x,) = data_for(spelling, kind, 1)
    changed = x.clone()
    changed[:, 2] = torch.rand_like(changed[:, 2])
    one, other = tensors(f(x))[0], tensors(f(changed))[0]
    assert torch.equal(one[:, :2], other[:, :2]) and torch.equal(one[:, 3:], other[:, 3:])


def test_products_that_multiply_are_zero_where_a_factor_is():
    x, zero = torch.randn(3, 3), torch.zeros(3, 3)
    for kind, f in (("matmul", torch.matmul), ("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b))):
        assert TRAITS[kind].multiplies and not f(x, zero).any() and not f(zero, x).any()
    assert not TRAITS["addmm"].multiplies and torch.addmm(x, zero, x).any() and not torch.addmm(zero, zero, x).any()


def test_clipping_cuts_off_at_two_bounds():
    x = torch.linspace(-9, 9, 1001)
    for kind, low, high in (("relu", 0, float("inf")), ("relu6", 0, 6), ("clamp", -1, 1)):
        f = next(s for s in SPELLINGS[kind] if isinstance(s, type))()
        assert TRAITS[kind].clips and torch.equal(f(x), x.clamp(low, high))


def test_every_spelling_belongs_to_one_kind_and_every_kind_has_a_row():
    spelled = [s for row in SPELLINGS.values() for s in row]
    assert len(spelled) == len(set(spelled))
    assert set(SPELLINGS) <= set(TRAITS)
    for kind, row in SPELLINGS.items():
        for spelling in row:
            if inspect.isclass(spelling) and spelling in MODULES:
                assert module_kind(spelling(*MODULES[spelling])) == kind


def test_kinds_that_shared_a_name_have_one_each():
    # `log_softmax`, `log`, `min` and `sqrt` were the same kind as operations of another sign.
    def run(net, x):
        y = F.log_softmax(x.softmax(1), 1) + x.exp().log() + x.max() - x.min()
        return y + x.sqrt() + x.T.t().mT + x.square()

    graph = trace(Net(run), torch.rand(3, 3)).graph
    found = [node_kind(n) for n in graph.nodes if n.op not in {"placeholder", "output"}]
    assert found == [
        *("softmax", "log_softmax", "exp", "log", "add", "max", "add", "min", "sub", "sqrt", "add"),
        *("transpose", "transpose", "transpose", "add", "square", "add"),
    ]


def test_functions_that_are_not_entered_have_kinds_by_name():
    graph = fx.Graph()

    def _patch_merging_pad(x):
        return x

    node = graph.call_function(_patch_merging_pad, (graph.placeholder("x"),))
    assert node_kind(node) == "patch_merging" and node_kind(graph.call_function(print, ())) == "unknown"


# ONNX operators against ONNX's own reference evaluator.

ATTRIBUTES = {"DepthToSpace": {"blocksize": 2}, "SpaceToDepth": {"blocksize": 2}, "LRN": {"size": 3}}
ATTRIBUTES |= {"MaxPool": {"kernel_shape": [2, 2]}, "AveragePool": {"kernel_shape": [2, 2]}, "Cast": {"to": 1}}
NEED_MORE = {"Split", "Resize", "Concat", "Shape", "Clip", "Einsum"}
# Operators that need one tensor and nothing else.
ALONE = [name for name in ONNX_KINDS if onnx.defs.get_schema(name).min_input == 1 and name not in NEED_MORE]


def run(name, x):
    node = helper.make_node(name, ["x"], ["y"], **ATTRIBUTES.get(name, {}))
    model = onnx_model([node], {"x": x.shape}, {"y": None}, opset=22, ir_version=10)
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


def test_every_operator_exists_and_has_a_row():
    assert all(onnx.defs.has(name) and kind in TRAITS for name, kind in ONNX_KINDS.items())


@pytest.mark.parametrize("name", ALONE)
def test_the_claims_of_the_row_hold(name):
    traits = TRAITS[ONNX_KINDS[name]]
    x = np.random.default_rng(0).integers(-40, 41, (2, 4, 4, 4)).astype(np.float32) / 16
    x = np.abs(x) + 1 / 16 if name in {"Sqrt", "Log"} else x
    y = run(name, x)
    if traits.scales_linearly:
        np.testing.assert_allclose(run(name, 3 * x), 3 * y, rtol=1e-5)
    if traits.keeps_zero:
        assert not run(name, np.zeros_like(x)).any()
    if traits.non_negative == "always":
        assert (y >= 0).all()
    if traits.non_negative == "if inputs are":
        assert (run(name, np.abs(x) + 1 / 16) >= 0).all()
    if traits.moves_elements:
        assert np.isin(y, x).all()
    if traits.commutes_with_quantization:
        np.testing.assert_array_equal(run(name, np.round(x * 4) / 4), np.round(y * 4) / 4)


def counted_by_torch(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert counter.get_total_flops() > 0
    return counter.get_total_flops() // 2


NAMES = ("resnet18", "shufflenet_v2_x0_5", "efficientnet_b0", "vit_b_32")


@pytest.mark.parametrize("name", NAMES)
def test_macs_agree_with_torchs_counter(name, monkeypatch):
    model, x = torchvision.models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # torch counts nothing inside it
    assert total_macs(layers(trace(model, x))) == (counted_by_torch(model, x), ())


def test_hand_count():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    conv, relu, up = layers(trace(model, torch.randn(2, 3, 8, 8)))
    assert (conv.macs, relu.macs, up.macs) == (2 * 8 * 4 * 4 * 3 * 9, 0, 2 * 8 * 4 * 4 * 4 * 4)
    assert (conv.weight_elements, conv.bias_elements, conv.kernel) == (216, 8, (3, 3))
    assert (conv.input_shapes, conv.output_shape) == (((2, 3, 8, 8),), (2, 8, 4, 4))


PRODUCTS = {
    "bghid,bghjd->bghij": lambda f, x: f(x, x + 1),
    "ellipsis": lambda f, x: torch.einsum("...ij,...kj", x, x.relu()),
    "no sum": lambda f, x: f(x, x) + torch.einsum("bghij,j->bghij", f(x, x), x[0, 0, 0, 0, :3]),
    "spaces, to a number": lambda f, x: torch.einsum("b g h i d, b g h i d -> b", x, x.relu()),
    "one tensor, twice": lambda f, x: f(x, x),
    "matmul of one tensor": lambda f, x: x[..., :3] @ x[..., :3],
    "attention to itself": lambda f, x: F.scaled_dot_product_attention(x[0], x[0], x[0]),
    "tensordot": lambda f, x: torch.tensordot(x, x.relu(), dims=([1, 4], [1, 4])),
    "inner": lambda f, x: torch.inner(x, x[0, 0].relu()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_tensors_are_counted_as_torch_does(name):
    function, x = PRODUCTS[name], torch.randn(2, 3, 2, 3, 5)
    net = Net(lambda net, x: function(lambda a, b: torch.einsum("bghid,bghjd->bghij", a, b), x))
    assert total_macs(layers(trace(net, x))) == (counted_by_torch(net, x), ())


def changed_in_place(x):
    y = F.elu_(torch.sigmoid_(x * 2)).exp_().clip_(0.1, 2).sqrt_()
    y[:, :, 1:] = 0
    y[y < 0.5] += 1
    return y.unsqueeze_(0).squeeze_(0).transpose_(2, 3)


WITHOUT_PRODUCTS = {
    "in place": changed_in_place,
    "functions of methods": lambda x: torch.narrow(x, 1, 0, 2) + torch.select(torch.clone(x), 1, 0).unsqueeze(1),
    "fold": lambda x: F.fold(F.unfold(x, 2, stride=2), x.shape[-2:], 2, stride=2),
    "similarity": lambda x: F.cosine_similarity(x, x.flip(3)) + F.pairwise_distance(x.mT, x).sum(),
    "pools": lambda x: F.lp_pool2d(x, 2, 2) + torchvision.ops.roi_pool(x, torch.zeros(1, 5), 4).sum(),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "table": lambda x: F.embedding(x.long().abs().clamp(max=3), torch.ones(4, 2)) + F.one_hot(x.long() * 0, 2),
    "places": lambda x: torch.stack(torch.meshgrid(x[0, 0, 0], x[0, 0, 0], indexing="ij")) + torch.triu(x[0, 0]),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(3, (4, 2))) * 1j),
}


@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_what_multiplies_no_matrices_has_no_macs(name):
    net, x = Net(lambda net, x: WITHOUT_PRODUCTS[name](net.a(x)), a=nn.Conv2d(3, 4, 1)), torch.randn(1, 3, 8, 8)
    assert total_macs(layers(trace(net, x))) == (counted_by_torch(net, x), ())


def test_recurrent_layers_are_counted_by_their_steps():
    recurrent = [nn.GRU(6, 8, 2, bidirectional=True), nn.RNN(6, 8, batch_first=True), nn.GRUCell(6, 8), nn.LSTM(6, 8)]
    for layer in (*recurrent, nn.LSTM(6, 8, proj_size=3), nn.LSTMCell(6, 8)):
        x = torch.randn(5, 6) if isinstance(layer, nn.RNNCellBase) else torch.randn(5, 2, 6)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        steps = x.numel() // 6  # torch counts no products of nn.LSTM: of each gate, by the input and by the result
        macs = steps * 4 * 8 * (6 + 3) + steps * 8 * 3 if getattr(layer, "proj_size", 0) else steps * 4 * 8 * (6 + 8)
        expected = 2 * macs if isinstance(layer, nn.LSTM) else counter.get_total_flops()
        assert total_macs(layers(trace(Net(lambda net, x: net.a(x)[0], a=layer), x))) == (expected // 2, ())


def test_deformable_convolutions_are_counted_as_others():
    parts = {"a": torchvision.ops.DeformConv2d(4, 8, 3, groups=2), "b": nn.Conv2d(4, 18, 3)}
    network = trace(Net(lambda net, x: net.a(x, net.b(x)), **parts), torch.randn(2, 4, 6, 6))
    assert total_macs(layers(network)) == (2 * 16 * 9 * (8 * 2 + 18 * 4), ())


def test_unknown_is_not_zero():
    macs, unknown = total_macs(layers(trace(Net(lambda net, x: torch.fft.fft2(x).real), torch.randn(1, 3, 8, 8))))
    assert macs == 0 and [name for name in unknown if "fft" in name]


def test_numbers_computed_from_sizes_are_no_operations():
    # timm's MobileViT rounds sizes up with math.ceil, which stays in the graph of a traced network.
    model = Net(lambda net, x: nn.functional.interpolate(x, size=(math.ceil(x.shape[2] / 2) * 2,) * 2))
    graph = trace(model, torch.randn(1, 3, 7, 7))
    assert graph.graph.find_nodes(op="call_function", target=math.ceil)
    assert [layer.kind for layer in layers(graph)] == ["resize"] and total_macs(layers(graph)) == (0, ())
    assert workload(model, torch.randn(1, 3, 7, 7)).operations[-1].activation_elements == 3 * (49 + 64)
