import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import compress
from compress.errors import ExportError, QuantizationError, RecipeError
from compress.qat_fusion.chain import groups_together, merged_groups, product
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import quantizers
from compress.training import check_train_spec
from tests.networks import Net, TinyResNet, network, unchanged
from tests.qat_fusion.common import (
    TARGETS,
    assert_same,
    compiled_gradients,
    convolutions,
    fused_as_plain,
    gradients,
    mixed,
    quantized,
    saved_bytes,
)
from tests.training.toy import CLASSES, toy_data


@pytest.mark.parametrize("make", [network, mixed])
@pytest.mark.parametrize("target", TARGETS)
def test_gradients_are_those_of_the_plain_path(make, target):
    qmodel, x = quantized(make, target)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-12, atol=1e-12)
    assert sum(len(chain.nodes) for chain in fused.report.chains) >= 7


@pytest.mark.parametrize("batchnorm", ["fold", "keep"])
def test_gradients_in_float32_and_in_channels_last(batchnorm):
    qmodel, x = quantized(batchnorm=batchnorm)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.001)
    qmodel.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-3)


def test_autocast():
    # In bfloat16 the plain path rounds after the bias and after the add as well; a step of a quantizer is 0.8 %.
    qmodel, x = quantized()
    one = gradients(compress.fuse_for_training(qmodel), qmodel, x, autocast=True)
    other = gradients(qmodel, qmodel, x, autocast=True)
    assert one[0].dtype == other[0].dtype == torch.bfloat16
    for name, grad in other[2].items():
        assert F.cosine_similarity(one[2][name].flatten(), grad.flatten(), dim=0) > 0.97, name


def test_compiled():
    qmodel, x = quantized(lambda: nn.Sequential(*convolutions(2)).eval(), size=8)
    fused = compress.fuse_for_training(qmodel)
    assert_same(compiled_gradients(qmodel, x), gradients(fused, qmodel, x), rtol=1e-4, atol=1e-4)


def after(make):
    one, norm = nn.Linear(12, 8), nn.LayerNorm(8)
    two = nn.Linear(make(torch.zeros(1, 8), norm).shape[-1], 3)
    return Net(lambda net, x: net.two(make(net.one(x.flatten(1)), net.norm)), one=one, norm=norm, two=two)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda y, norm: F.gelu(y), set()),
        (lambda y, norm: norm(y), set()),
        (lambda y, norm: torch.cat([y, y.flip(1)], 1), {torch.uint8}),
    ],
)
def test_compiled_masks_are_kept_as_bits_or_computed_again(make, kept):
    # The tensors that the compiler's partition keeps for backward, as torch itself reports them.
    seen = set()

    def look(graph, example):
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        seen.update(o.meta["val"].dtype for o in outputs if isinstance(o, torch.fx.Node) and "val" in o.meta)
        return make_boxed_func(graph.forward)

    qmodel, x = quantized(lambda: after(make).eval(), size=2)
    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=look,
        bw_compiler=look,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(compress.fuse_for_training(qmodel), backend=backend)(x).sum().backward()
    assert seen & {torch.bool, torch.uint8} == kept


def test_gradient_checkpointing_and_deep_copies():
    qmodel, x = quantized()
    fused = compress.fuse_for_training(qmodel)
    expected = gradients(qmodel, qmodel, x)
    again = gradients(lambda x: checkpoint(fused, x, use_reentrant=False), qmodel, x)
    assert_same(again, expected, rtol=1e-4, atol=1e-3)
    twin = copy.deepcopy(fused)
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in fused.parameters())
    torch.testing.assert_close(twin(x), fused(x), rtol=0, atol=0)


def test_data_parallel(tmp_path):
    # One process of a group: gradients are reduced in buckets, and the ranges are not parameters.
    qmodel, x = quantized()
    expected = gradients(qmodel, qmodel, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(compress.fuse_for_training(qmodel))
        assert_same(gradients(parallel, qmodel, x), expected, rtol=1e-4, atol=1e-3)
    finally:
        torch.distributed.destroy_process_group()


def test_masked_weights_keep_their_zeros_out_of_the_gradient():
    mask = Net(lambda net, x: x * (torch.arange(x[0].numel()) % 2).view(x.shape[1:]))
    qmodel, x = quantized()
    parametrize.register_parametrization(qmodel.block1.conv1, "weight", mask)
    fused_as_plain(qmodel, x, rtol=0.0001, atol=0.001)


def test_the_model_itself_is_untouched(tmp_path):
    qmodel, x = quantized()
    code = qmodel.code
    first = compress.export_onnx(qmodel, x, tmp_path / "before.onnx").read_bytes()
    fused = compress.fuse_for_training(qmodel)
    with unchanged(qmodel):
        gradients(fused, qmodel, x)
    assert compress.export_onnx(qmodel, x, tmp_path / "after.onnx").read_bytes() == first
    with pytest.raises(ExportError, match="fuse_for_training returned"):
        compress.export_onnx(compress.fuse_for_training(qmodel), x, tmp_path / "fused.onnx")
    assert qmodel.code == code
    assert {id(p) for p in fused.parameters()} == {id(p) for p in qmodel.parameters()}


def test_an_activation_costs_its_quantized_tensor_and_one_bit():
    model = nn.Sequential(*convolutions(4, inputs=8))
    x = torch.randn(2, 8, 16, 16)
    qmodel = compress.quantize(model, x, [x])
    elements = x.numel()
    plain, fused = saved_bytes(qmodel, x), saved_bytes(compress.fuse_for_training(qmodel), x)
    weights = sum(p.numel() * (4 + 1) for n, p in qmodel.named_parameters() if n.endswith("weight"))
    small = 200  # ranges and scales
    # the network's input passes no gradient and keeps no mask; each ReLU's result: 4 bytes, and 4 + 1 or an eighth more
    assert plain == pytest.approx(4 * elements + 4 * elements * (4 + 4 + 1) + weights, abs=small)
    assert fused == pytest.approx(4 * elements + 4 * elements * (4 + 1 / 8) + weights, abs=small)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_training(precision):
    # 20 steps with momentum: the same losses, ranges and weights, but for rounding.
    start, _ = quantized(lambda: TinyResNet(CLASSES).eval(), clip=1.0)
    runs = []
    for fused in ("on", "off"):
        qmodel = copy.deepcopy(start)
        spec = compress.QATSpec(epochs=4, lr=0.05, distill=False, fused=fused, precision=precision)
        report = compress.fit(qmodel, toy_data(train=80, size=12, noise=0.3), spec, batch_size=16, folder=None)
        assert report.steps == 20
        runs.append((qmodel, [row.train_loss for row in report.history]))
    (one, losses), (other, expected) = runs
    tolerance = {"fp32": 1e-3, "bf16": 3e-2}[precision]
    assert expected[-1] < 0.95 * expected[0]
    assert losses == pytest.approx(expected, rel=tolerance)
    torch.testing.assert_close(dict(one.named_buffers()), dict(other.named_buffers()), rtol=0, atol=0)
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=tolerance)


def test_what_is_not_fused_says_why():
    class Learned(compress.Quantizer):
        pass

    qmodel, x = quantized()
    qmodel.quantizers.block1_relu.__class__ = Learned
    amax = qmodel.quantizers.block2_relu.amax
    qmodel.quantizers.block2_relu = compress.Quantizer(QuantFormat(kind="e4m3"))
    qmodel.quantizers.block2_relu.set_amax(amax)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.001)
    chains = {chain.quantizer.removeprefix("quantizers."): chain for chain in fused.report.chains}
    assert chains["block1_relu"].nodes == () and "Learned" in chains["block1_relu"].reason
    assert chains["block2_relu"].nodes == () and "FP8" in chains["block2_relu"].reason
    assert chains["relu"].nodes == ("conv1", "relu", "maxpool") and chains["relu"].reason == ""
    assert chains["block1_relu_1"].nodes == ("block1_conv2", "add", "block1_relu_1")
    assert "input" in chains["x"].reason


def test_a_result_with_two_readers_is_not_swallowed():
    def run(net, x):
        y = net.first(x)
        return net.second(torch.relu(y)) + y.sigmoid()

    qmodel, x = quantized(lambda: Net(run, first=nn.Conv2d(3, 8, 1), second=nn.Conv2d(8, 8, 1)))
    fused = compress.fuse_for_training(qmodel)
    torch.testing.assert_close(fused(x), qmodel(x), rtol=0, atol=0)
    assert all("first" not in chain.nodes for chain in fused.report.chains)


def test_quantizers_that_do_not_round_leave_the_chain_plain():
    qmodel, x = quantized()
    fused = compress.fuse_for_training(qmodel)
    qmodel.quantizers.block1_relu.enabled = False
    qmodel.block2.conv1.weight_quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-3)


def test_refusals():
    with pytest.raises(QuantizationError, match=r"compress\.quantize"):
        compress.fuse_for_training(nn.Conv2d(3, 3, 1))
    with pytest.raises(RecipeError, match=r"qat\.fused is 'always'.*auto, on, int8, off"):
        check_train_spec(compress.QATSpec(fused="always"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("kernels", "compiled"), [(None, False), (None, True), ("triton", True)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernels_compute_what_torch_does(dtype, kernels, compiled):
    qmodel, x = quantized(mixed)
    qmodel = qmodel.cuda().to(memory_format=torch.channels_last)
    x = x.cuda().contiguous(memory_format=torch.channels_last)
    results = []
    for which in ("torch", kernels):
        run = compress.fuse_for_training(qmodel, kernels=which)
        run = torch.compile(run) if compiled and which == kernels else run
        qmodel.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = run(x).float().square().sum()
        loss.backward()
        results.append({name: p.grad.clone() for name, p in qmodel.named_parameters()})
    for name, grad in results[0].items():
        assert F.cosine_similarity(results[1][name].flatten(), grad.flatten(), dim=0) > 0.98, name


def test_a_tied_weight_is_fused_and_the_model_stays_whole():
    # A weight that is a layer's, and transposed another's: a module of the graph is part of another's path.
    x = torch.randn(4, 8)
    model = Net(
        lambda net, x: net.head(torch.relu(F.linear(torch.relu(net.encode(x)), net.encode.weight.t()))),
        encode=nn.Linear(8, 6),
        head=nn.Linear(8, CLASSES),
    )
    qmodel = compress.quantize(model.eval(), x, [x])
    expected, names = gradients(qmodel, qmodel, x), set(qmodel.state_dict())
    assert_same(gradients(compress.fuse_for_training(qmodel), qmodel, x), expected)
    assert_same(gradients(qmodel, qmodel, x), expected)
    assert set(qmodel.state_dict()) == names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_training_is_fused_and_learns(compile):
    qmodel, _ = quantized(lambda: TinyResNet(CLASSES).eval(), clip=1.0)
    spec = compress.QATSpec(epochs=4, lr=0.05, distill=False, precision="bf16", compile=compile)
    report = compress.fit(
        qmodel, toy_data(train=80, size=12, noise=0.3), spec, batch_size=16, folder=None, device="cuda"
    )
    assert report.history[-1].train_loss < report.history[0].train_loss


@pytest.mark.parametrize("batchnorm", ["fold", "keep"])
@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_learned_ranges_are_fused_with_the_gradients_of_the_plain_path(batchnorm, target):
    qmodel, x = quantized(network, target, batchnorm=batchnorm)
    compress.learn_scales(qmodel)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-09, atol=1e-09)
    found = [chain for chain in fused.report.chains if chain.nodes]
    assert len(found) >= 4 and max(len(chain.nodes) for chain in found) >= 2


def test_a_learned_range_before_which_a_smooth_activation_stays_on_the_plain_path():
    qmodel, _ = quantized(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.SiLU(), nn.Conv2d(8, 8, 1)).eval())
    compress.learn_scales(qmodel)
    reasons = {chain.reason for chain in compress.fuse_for_training(qmodel).report.chains}
    assert "silu before a learned range" in reasons


# Max pools that end a fused chain: the plain path's function and gradients.


def pools():
    # Pools that end a chain, as module and as function, and pools that cannot.
    def run(net, x):
        x = net.pool(torch.relu(net.layers[0](x)))
        x = F.max_pool2d(F.relu6(net.layers[1](x)), 2, ceil_mode=True)
        x = F.max_pool2d(net.layers[2](x), 3, 1, dilation=2, padding=1)
        x = torch.relu(net.layers[3](x))
        return net.head(torch.relu(net.layers[4](F.max_pool2d(x, 2, ceil_mode=True) + x[:, :, ::2, ::2])).mean((2, 3)))

    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(5)])
    return Net(run, layers=layers, pool=nn.MaxPool2d(3, 2, 1), head=nn.Linear(16, CLASSES)).eval()


def test_a_pool_ends_a_chain_where_it_alone_reads_it():
    qmodel, x = quantized(pools, size=33)
    fused = fused_as_plain(qmodel, x, rtol=1e-05, atol=1e-06)
    ends = [chain.nodes[-1] for chain in fused.report.chains if chain.nodes]
    assert ends == [
        "pool",
        "max_pool2d",
        "layers_2",
        "add",
        "relu_2",
    ]  # the third pool has gaps, the fourth no quantizer
    quantizer = next(q for name, q in quantizers(qmodel) if "relu" in name)
    quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_pools_and_convolutions_do_the_same_whichever_gpu_is_current(device, compiled):
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("one GPU")
    qmodel, x = quantized(pools, size=33)
    qmodel = qmodel.to(device).to(memory_format=torch.channels_last)
    x = x.to(device).contiguous(memory_format=torch.channels_last)
    fused = compress.fuse_for_training(qmodel)
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert_same(gradients(run, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-3, atol=1e-3)


# Grouped convolutions whose groups are merged: torch's own grouped convolution in float64 is the oracle.


@pytest.mark.parametrize(
    ("groups", "width", "expected"),
    [
        (24, 24, 4),  # a multiple of 32 channels
        (9, 24, 9),  # all of them
        (3, 24, 3),
        (63, 24, 3),  # the widest up to 96
        (32, 4, 1),  # not timed
        (8, 64, 1),  # a multiple of 32 already
        (5, 72, 1),  # nothing fits
    ],
)
def test_how_many_groups_become_one(groups, width, expected):
    assert groups_together(groups, width) == expected


@pytest.mark.parametrize(("groups", "count"), [(6, 2), (6, 3), (6, 6), (6, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_merged_groups_are_the_same_convolution(groups, count, stride):
    x = torch.randn(2, 6 * 5, 7, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6 * 4, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    one = F.conv2d(x, weight, None, stride, 1, 1, groups)
    other = F.conv2d(x, merged_groups(weight, groups, count), None, stride, 1, 1, groups // count)
    torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    grad = torch.randn_like(one)
    expected = torch.autograd.grad(one, (x, weight), grad)
    torch.testing.assert_close(torch.autograd.grad(other, (x, weight), grad), expected, rtol=0, atol=1e-12)


def test_a_layer_with_narrow_groups_computes_what_float64_does(monkeypatch):
    layer = nn.Conv2d(72, 72, 3, padding=1, groups=3)
    weight = layer.weight.detach().bfloat16()
    x = torch.randn(2, 72, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    groups = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: groups.append(args[6]) or convolve(*args))
    found = product(layer, x, weight, layer.bias.detach().bfloat16(), "triton")
    product(layer, x, weight, layer.bias.detach().bfloat16(), "torch")
    assert groups == [1, 3]
    expected = convolve(x.double(), weight.double(), layer.bias.detach().bfloat16().double(), 1, 1, 1, 3)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
