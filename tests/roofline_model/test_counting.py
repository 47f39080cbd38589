# macs and bytes against closed forms and against torch's own flop counter, which observes execution.

from operator import attrgetter

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compress import QuantSpec, quantize, trace
from compress.errors import ModelError, RooflineError
from compress.graph.layers import layers
from compress.roofline_model import convolution, workload
from compress.roofline_model.counting import count
from tests.further import further
from tests.networks import Net
from tests.roofline_model.networks import block_net, pre_activation, residual, squeeze_excite, with_opaque


def counted_by_torch(model, x):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return counter.get_total_flops() // 2


def test_residual_block_by_hand():
    work = workload(residual(), torch.randn(2, 4, 5, 6))
    n, hw, c = 2, 30, 4
    by_name = {op.name: op for op in work.operations}
    assert list(by_name) == ["conv1", "bn1", "relu", "conv2", "bn2", "add", "relu_1"]
    assert (by_name["conv1"].macs, by_name["conv2"].macs) == (n * hw * c * c * 9, n * hw * c * c)
    assert by_name["conv1"].weight_elements == c * c * 9
    moved = {name: by_name[name].activation_elements for name in ("conv1", "add", "relu")}
    assert moved == {"conv1": 2 * n * c * hw, "add": 3 * n * c * hw, "relu": 2 * n * c * hw}  # read once, written once
    assert (by_name["bn1"].macs, by_name["bn1"].weight_elements, by_name["bn1"].bias_elements) == (0, 0, 2 * c)


def test_residual_block_fused_by_hand():
    first, second = workload(residual(), torch.randn(2, 4, 5, 6), fused=True).operations
    n, hw, c = 2, 30, 4
    assert first.members == ("conv1", "bn1", "relu")
    assert second.members == ("conv2", "bn2", "add", "relu_1")
    assert first.activation_elements == 2 * n * c * hw
    assert second.activation_elements == 3 * n * c * hw  # its input, the residual, its output
    assert (first.bias_elements, second.bias_elements) == (c, c)  # the folded BatchNorm's shift
    assert (first.weight_elements, second.weight_elements) == (c * c * 9, c * c)


def test_a_layer_that_is_asked_for_its_shape_is_fused_as_any_other():
    def asks(net, x):  # as timm's BatchNormAct2d does
        x = net.conv(x)
        torch._assert(x.ndim == 4, f"{x.ndim} axes")
        y = nn.functional.batch_norm(x, net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias)
        return y.relu().view(x.shape[0], -1)

    parts, x = {"conv": nn.Conv2d(4, 8, 3), "norm": nn.BatchNorm2d(8)}, torch.randn(2, 4, 6, 6)
    plain = Net(lambda net, x: net.norm(net.conv(x)).relu().flatten(1), **parts).eval()
    asking = Net(asks, **parts).eval()
    torch.testing.assert_close(asking(x), plain(x))
    ((one,), (other,)) = (workload(net, x, fused=True).operations for net in (plain, asking))
    assert one.activation_elements == other.activation_elements == x.numel() + plain(x).numel()


def test_gate_is_not_fused_into_the_map():
    work = workload(squeeze_excite(), torch.randn(1, 3, 8, 8), fused=True)
    assert [op.members for op in work.operations] == [("conv",), ("pool",), ("fc", "sigmoid"), ("mul",)]
    assert work.operations[-1].activation_elements == 2 * 4 * 64 + 4


def test_pre_activation_is_one_pointwise_kernel():
    work = workload(pre_activation(), torch.randn(1, 4, 8, 8), fused=True)
    assert [op.kind for op in work.operations] == ["pointwise", "conv", "concat"]
    assert work.operations[0].members == ("norm", "relu")
    assert work.operations[0].bias_elements == 8


def test_add_of_two_convolutions_goes_with_the_later_one():
    model = Net(lambda net, x: net.a(x) + net.b(x), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    work = workload(model, torch.randn(1, 3, 4, 4), fused=True)
    assert [op.members for op in work.operations] == [("a",), ("b", "add")]
    assert work.operations[1].activation_elements == 3 * 16 + 2 * 4 * 16


def test_transformer_block_by_hand():
    tokens, width = 7, 16
    work = workload(block_net(width), torch.randn(2, tokens, width))
    attention = next(op for op in work.operations if op.kind == "attention")
    n = 2 * tokens
    assert attention.macs == n * 4 * width**2 + 2 * 2 * tokens**2 * width
    assert attention.sparse_macs == n * 4 * width**2  # projections may be 2:4, the products of activations may not
    assert attention.weight_elements == 4 * width**2
    # One input, one output, and between its three kernels query, key, value and context, written and read.
    assert attention.activation_elements == n * width * (2 + 8)
    norm = next(op for op in work.operations if op.kind == "layer_norm")
    assert norm.float_elements == n * width  # its input is floating point, its result is consumed by products alone


def test_views_cost_nothing_and_are_looked_through():
    model = Net(lambda net, x: net.fc(torch.flatten(x.transpose(1, 2), 1)[:, :8]), fc=nn.Linear(8, 4))
    (only,) = workload(model, torch.randn(2, 4, 4)).operations
    assert only.name == "fc"
    assert only.activation_elements == 2 * 8 + 2 * 4  # the slice, not the tensor from which it was cut


def zeroed(name):
    # Return a torchvision network without random weights, which take seconds and do not affect costs.
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    return model.eval()


def resnet50_by_hand():
    # Compare with the sum over the paper's table (He et al., arXiv 1512.03385), with the stride in the 3x3.
    total = 112**2 * 64 * 3 * 49
    width_in, size = 64, 56
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            before, size = size, size // (stride if block == 0 else 1)
            total += before**2 * width_in * planes + size**2 * planes * planes * 9 + size**2 * planes * 4 * planes
            total += size**2 * width_in * 4 * planes if block == 0 else 0
            width_in = 4 * planes
    return total + 2048 * 1000


def vgg16_by_hand():
    # Compare with the sum over table 1, column D, of arXiv 1409.1556.
    total, channels, size = 0, 3, 224
    for width, layers_ in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers_):
            total, channels = total + size**2 * channels * width * 9, width
        size //= 2
    return total + 512 * 49 * 4096 + 4096 * 4096 + 4096 * 1000


BY_HAND = [("resnet50", resnet50_by_hand), ("vgg16", vgg16_by_hand)]


@pytest.mark.parametrize(("name", "by_hand"), further(BY_HAND, BY_HAND[:1]))
def test_networks_by_hand(name, by_hand):
    model, x = zeroed(name), torch.randn(1, 3, 224, 224)
    graph_module = trace(model, x)
    plain, fused = count(graph_module, x), count(graph_module, x, fused=True)
    assert sum(op.macs for op in plain.operations) == sum(op.macs for op in fused.operations) == by_hand()
    assert sum(op.activation_elements for op in fused.operations) < sum(
        op.activation_elements for op in plain.operations
    )
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert sum(op.weight_elements for op in plain.operations) == weights


NETWORKS = {
    "mobilenet_v2": 64,
    "efficientnet_b0": 64,
    "regnet_y_400mf": 64,
    "shufflenet_v2_x0_5": 64,
    "densenet121": 64,
    "googlenet": 64,
    "convnext_tiny": 64,
    "swin_t": 70,
    "alexnet": 64,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_agree_with_torchs_counter(name):
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    model = getattr(torchvision.models, name)(**options).eval()
    x = torch.randn(1, 3, NETWORKS[name], NETWORKS[name])
    assert_counted(model, x)


def assert_counted(model, x):
    # The macs of a network are those that torch counts as it runs, and those of every operation are known.
    assert sum(op.macs for op in workload(model, x).operations) == counted_by_torch(model, x)


def test_vision_transformer_agrees_with_torchs_counter():
    options = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    model = torchvision.models.VisionTransformer(32, 8, **options, num_classes=10).eval()
    assert_counted(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("model", "shape"), [(residual(), (4, 6, 6)), (squeeze_excite(), (3, 6, 6)), (block_net(), (5, 16))]
)
def test_another_batch_is_what_tracing_it_gives(model, shape, fused):
    scaled = workload(model, torch.randn(2, *shape), fused=fused).with_batch(6)
    assert scaled == workload(model, torch.randn(6, *shape), fused=fused)


def test_unknown_is_not_zero():
    (conv, odd) = workload(with_opaque(), torch.randn(1, 3, 8, 8)).operations
    assert (conv.macs, odd.name, odd.macs) == (36 * 4 * 27, "odd", None)


def test_orders_sums_and_gates_are_counted_and_have_no_macs():
    def run(net, x):
        y = nn.functional.glu(net.conv(x), 1).cumsum(2).flatten(2)
        values, _ = y.topk(5, 2)
        z = y.gather(2, y.argsort(2)[..., :5]) * ~values.isnan()
        return torch.zeros_like(z).scatter_add(2, z.argmax(1, keepdim=True), values).logsumexp(2)

    model, x = Net(run, conv=nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 8, 8)
    assert_counted(model, x)
    operations = workload(model, x).operations
    kinds = ("glu", "scan", "sort", "gather", "reduce", "scatter")
    assert {op.kind for op in operations}.issuperset(kinds) and all(op.activation_elements for op in operations)


@pytest.mark.parametrize("kernel,groups", [(1, 1), (3, 1), (5, 1), (3, 8)])
def test_convolution_from_numbers_is_the_traced_one(kernel, groups):
    model = nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=groups, bias=False)
    (traced,) = workload(nn.Sequential(model), torch.randn(3, 8, 10, 10)).operations
    made = convolution(channels=8, size=10, kernel=kernel, groups=groups, batch_size=3)
    numbers = ("macs", "sparse_macs", "weight_elements", "sparse_weight_elements", "activation_elements", "detail")
    assert attrgetter(*numbers)(made) == attrgetter(*numbers)(traced)


def test_layers_tell_weight_macs_of_functions():
    def run(net, x):
        y = nn.functional.linear(x, net.weight)
        return y @ y.transpose(1, 2)

    model, x = Net(run, weight=nn.Parameter(torch.randn(6, 4))), torch.randn(2, 3, 4)
    linear, matmul = (row for row in layers(trace(model, x)) if row.macs)
    assert (linear.macs, linear.weight_macs) == (2 * 3 * 4 * 6, 2 * 3 * 4 * 6)
    assert (matmul.macs, matmul.weight_macs) == (2 * 3 * 3 * 6, 0)
    operations = workload(model, x).operations
    assert operations[0].weight_elements == operations[0].sparse_weight_elements == 24


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (1, 3, 7, 3), (5, 3, 2, 9)])
def test_odd_and_tiny_inputs(shape):
    work = workload(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU()), torch.randn(shape), fused=True)
    (only,) = work.operations
    pixels = shape[0] * shape[2] * shape[3]
    assert (only.macs, only.activation_elements) == (pixels * 15 * 9, pixels * 8)


def test_bad_inputs_are_refused():
    with pytest.raises(ModelError):
        workload(nn.Linear(3, 3), torch.randn(2, 4))
    with pytest.raises(RooflineError, match="batch dimension"):
        workload(nn.Sequential(nn.ReLU()), torch.tensor(1.0))
    with pytest.raises(RooflineError, match="batch_size must be 1 or more, got 0"):
        workload(residual(), torch.randn(1, 4, 3, 3)).with_batch(0)


def test_quantized_network_costs_what_the_float_one_does():
    model, x = residual(), torch.randn(2, 4, 6, 6)
    quantized = quantize(model, x, [x], spec=QuantSpec(target="tensorrt"))
    float_work, quantized_work = (workload(m, x, fused=True) for m in (model, quantized))
    for a, b in zip(float_work.operations, quantized_work.operations, strict=True):
        assert (a.macs, a.activation_elements, a.weight_elements) == (b.macs, b.activation_elements, b.weight_elements)


def test_a_channel_shuffle_costs_the_same_in_every_spelling():
    # In torchvision it is a view, a transpose and a view, which cost nothing.
    spelled = Net(lambda net, x: x.view(2, 2, 4, 5, 5).transpose(1, 2).reshape(2, 8, 5, 5))
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(spelled(x), nn.ChannelShuffle(2)(x))
    spelled, module = (workload(nn.Sequential(nn.ReLU(), shuffle), x) for shuffle in (spelled, nn.ChannelShuffle(2)))
    assert [op.activation_elements for op in spelled.operations] == [op.activation_elements for op in module.operations]


def test_a_lookup_reads_the_rows_that_it_is_asked_for():
    ids = torch.randint(0, 1000, (2, 5))
    (lookup,) = workload(nn.Sequential(nn.Embedding(1000, 8)), ids).operations
    assert lookup.activation_elements == ids.numel() * (1 + 8 + 8)  # indices, rows of the table, and the result
    assert (lookup.weight_elements, lookup.bias_elements) == (0, 0)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: net.attention(x[0], x[0], x[0])[0],  # without a batch
        lambda net, x: net.attention(x, x, x)[0],
        lambda net, x: torch.einsum("bij,bkl->bjl", x, x),  # i and k are summed first, b and j are no sums of products
        lambda net, x: torch.einsum("bij,bik->bj", x, x),
    ],
)
def test_products_of_activations_agree_with_torchs_counter(run):
    model = Net(run, attention=nn.MultiheadAttention(16, 4, batch_first=True))
    assert_counted(model, torch.randn(2, 5, 16))
