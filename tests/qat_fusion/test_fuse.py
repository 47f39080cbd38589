import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torchvision.ops import SqueezeExcitation, StochasticDepth

import compress
from compress.errors import ExportError, QuantizationError, RecipeError
from compress.kernels.triton.launch import Launch
from compress.qat_fusion.chain import groups_together, merged_groups, product
from compress.qat_fusion.int8 import codes_by_torch
from compress.qat_fusion.norm import FusedResponseModule
from compress.qat_fusion.regions import Region, compile_regions, few_guards
from compress.qat_fusion.squeeze import FusedExciteModule, FusedSqueezeModule
from compress.quantization.numerics import QuantFormat, quantize_tensor
from compress.quantization.quantizer import quantizers
from compress.training import check_train_spec
from tests.families import FAMILIES
from tests.further import further
from tests.kernels.interpreter import interpreted
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
from tests.qat_fusion.interpreted_int8 import Block, close
from tests.qat_fusion.interpreted_int8 import gradients as int8_gradients
from tests.qat_fusion.interpreted_int8 import made as int8_made
from tests.qat_fusion.test_attention import quantized as quantized_attention
from tests.qat_fusion.test_attention import vit
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


def block(excite, activation, normalized):
    def run(net, x):
        x = net.stem(x)
        return net.head(net.depth(net.project(net.excite(net.between(net.one(x))))) + x).mean((2, 3))

    between = [nn.BatchNorm2d(16)] if normalized else []
    return Net(
        run,
        stem=nn.Conv2d(3, 16, 3, 2, 1),
        one=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        between=nn.Sequential(*between, *([] if activation is None else [activation()])),
        excite=excite,
        project=nn.Conv2d(16, 16, 1),
        depth=StochasticDepth(0.5, "row"),
        head=nn.Conv2d(16, 5, 1),
    )


def gate(net, pooled):
    return torch.sigmoid(net.up(F.relu(net.down(pooled))))


def made(make=lambda: SqueezeExcitation(16, 8), activation=nn.SiLU, normalized=False, **spec):
    torch.manual_seed(1)
    return quantized(lambda: block(make(), activation, normalized).eval(), **spec)


def squeezes(module):
    return [found for found in module.modules() if isinstance(found, FusedSqueezeModule)]


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish, nn.ReLU, nn.ReLU6, nn.GELU, None])
def test_a_block_begins_at_its_layer(activation):
    qmodel, x = made(activation=activation)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10)
    (found,) = squeezes(fused)
    assert found.layer is qmodel.one and found.quantize is not None
    assert sum(isinstance(module, FusedExciteModule) for module in fused.modules()) == 1
    assert {id(p) for p in fused.parameters()} == {id(p) for p in qmodel.parameters()}


def test_the_report_names_what_became_one_module():
    qmodel, _ = made()
    chains = {chain.quantizer: chain for chain in compress.fuse_for_training(qmodel).report.chains}
    assert chains["quantizers.between_0"].nodes == ("one", "between_0", "excite_avgpool")
    assert chains["quantizers.mul"].nodes == ("mul",)


def test_an_activation_that_has_no_kernel_stays_outside():
    qmodel, x = made(activation=nn.Mish)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.0001)
    (found,) = squeezes(fused)
    assert found.layer is None and found.activation == ""


def test_a_batch_norm_that_is_kept_stays_outside():
    qmodel, x = made(normalized=True, batchnorm="keep")
    qmodel, x = qmodel.double().train(), x.double()
    fused = compress.fuse_for_training(qmodel)
    (found,) = squeezes(fused)
    assert found.layer is None and found.activation == "silu"
    torch.manual_seed(5)  # of the paths that are left out
    ours = gradients(fused, qmodel, x)
    torch.manual_seed(5)
    assert_same(ours, gradients(qmodel, qmodel, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (lambda self, a: gate(self, a.mean((2, 3), keepdim=True)) * a, 1),
        (lambda self, a: a * gate(self, torch.mean(a, [-1, -2], True)), 1),
        (lambda self, a: a * gate(self, F.adaptive_avg_pool2d(a, (1, 1))), 1),
        (lambda self, a: a.mul_(gate(self, F.adaptive_avg_pool2d(a, 1))), 1),
        (lambda self, a: a * gate(self, F.adaptive_avg_pool2d(a, 1)).add(1), 1),
        (lambda self, a: a * gate(self, F.adaptive_max_pool2d(a, 1)), 0),
        (lambda self, a: a * gate(self, a.mean((0, 2, 3), keepdim=True)), 0),  # one gate for all images
        (lambda self, a: a * gate(self, a.mean((1, 3), keepdim=True).expand(-1, 16, -1, -1)), 0),
        (lambda self, a: a * gate(self, F.adaptive_avg_pool2d(a, 1)) + a, 0),  # a third consumer
        (lambda self, a: a * gate(self, a), 0),
        (lambda self, a: a * gate(self, F.adaptive_avg_pool2d(a, 2)[:, :, :1, :1]), 0),
    ],
)
def test_which_blocks_are_two_operations(run, count):
    qmodel, x = made(lambda: Net(run, down=nn.Conv2d(16, 8, 1), up=nn.Conv2d(8, 16, 1)))
    assert len(squeezes(fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10))) == count


@pytest.mark.parametrize("name", ["SqueezeExcite", "SEModule", "EffectiveSEModule"])
def test_modules_of_timm(name):
    layers = pytest.importorskip("timm.layers")
    qmodel, x = made(lambda: getattr(layers, name)(16))
    assert len(squeezes(fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10))) == 1


def test_a_global_response_norm_and_its_layer_are_one_operation():
    from tests.kernels.interpreted_squeeze import response_net

    pytest.importorskip("timm")
    qmodel, x = quantized(response_net)
    fused = compress.fuse_for_training(qmodel)
    assert sum(isinstance(module, FusedResponseModule) for module in fused.modules()) == 1
    (chain,) = [chain for chain in fused.report.chains if "addcmul" in chain.nodes]
    assert chain.nodes[:3] == ("one", "gelu", "drop")
    expected = gradients(qmodel, qmodel, x)
    assert_same(gradients(fused, qmodel, x), expected, rtol=1e-4, atol=1e-4)
    assert_same(compiled_gradients(qmodel, x), expected, rtol=1e-4, atol=1e-4)
    kept = compress.fuse_for_training(qmodel, kernels="torch")
    assert not any(isinstance(module, FusedResponseModule) for module in kept.modules())


@pytest.mark.parametrize(("target", "smooth", "blocks"), [("openvino", None, 1), ("onnxruntime", "auto", 0)])
def test_other_targets(target, smooth, blocks):
    # A result of SiLU that is quantized for both of its consumers has a zero point, which no kernel computes.
    qmodel, x = made(target=target, smooth=smooth)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10)
    assert any("zero point" in chain.reason for chain in fused.report.chains)
    assert len(squeezes(fused)) == blocks


def test_learned_ranges_int8_and_torchs_operations_keep_what_is_there():
    qmodel, x = made()
    assert not squeezes(compress.fuse_for_training(qmodel, forward="int8"))
    assert not squeezes(compress.fuse_for_training(qmodel, kernels="torch"))
    compress.learn_scales(qmodel)
    assert not squeezes(fused_as_plain(qmodel, x, rtol=0.001, atol=0.001))


def test_quantizers_that_do_not_round():
    qmodel, x = made()
    fused = compress.fuse_for_training(qmodel)
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_compiled_blocks():
    qmodel, x = made()
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_only_the_layers_result_is_kept(monkeypatch):
    # Bytes of an image in bf16, computed from the shapes; product, activation and masks would be 512, 512 and 64 more.
    pytest.importorskip("triton")
    qmodel, x = made()
    qmodel = qmodel.to(torch.bfloat16, memory_format=torch.channels_last).eval()
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax.float())
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)  # memory is counted, not results
    four, eight = (
        saved_bytes(fused, images.contiguous(memory_format=torch.channels_last))
        for images in (x[:, :, :8, :8].bfloat16(), torch.cat([x, x])[:, :, :8, :8].bfloat16())
    )
    size = 16 * 4 * 4  # elements of an image between the convolutions
    inputs = 2 * (3 * 8 * 8 + 2 * size)  # of the first two convolutions and of the last one
    masks = 2 * size / 8  # of the quantizers of the stem and of the sum
    assert (eight - four) / 4 == pytest.approx(inputs + 2 * size + masks, abs=128)  # the gate keeps a little


def test_squeeze_kernels_compute_the_same_in_the_interpreter():
    interpreted("tests.kernels.interpreted_squeeze")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_blocks_compute_what_torch_does(dtype):
    from tests.kernels.interpreted_squeeze import ACTIVATIONS, FORMATS, GPU_SHAPES, check_block, check_response

    for i, activation in enumerate(ACTIVATIONS):
        check_response(activation, GPU_SHAPES[i % 4], FORMATS[i % 2], i % 3 > 0, dtype, "cuda")
        check_block(activation, GPU_SHAPES[i % 4], FORMATS[i % 2], i % 3 > 0, i % 4 > 0, dtype, "cuda")


def deep(blocks=4):
    torch.manual_seed(3)
    stem = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(
        *stem,
        *(
            Net(
                lambda net, x: torch.relu(x + net.two(torch.relu(net.one(x)))),
                one=nn.Conv2d(8, 8, 3, padding=1),
                two=nn.Conv2d(8, 8, 3, padding=1),
            )
            for _ in range(blocks)
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    ).eval()


def counting(functions):
    def compiler(run):
        functions.append(run)
        return run

    return compiler


def regions(module):
    return [child for child in module.modules() if isinstance(child, Region)]


def test_blocks_that_are_alike_share_a_function():
    qmodel, x = quantized(deep)
    fused = compress.fuse_for_training(qmodel)
    functions = []
    parts = compile_regions(fused, counting(functions))
    alike = [region.run for region in regions(parts)]
    assert max(alike.count(run) for run in functions) >= 3
    assert len(functions) <= 4 < len(alike)
    assert_same(gradients(parts, qmodel, x), gradients(fused, qmodel, x), rtol=1e-5, atol=1e-6)


def dropping():
    torch.manual_seed(3)
    blocks = [
        Net(
            lambda net, x: torch.relu(x + net.depth(net.block(x))),
            block=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
            depth=StochasticDepth(rate, "row"),
        )
        for rate in (0.1, 0.2, 0.3, 0.4)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    ).eval()


def test_blocks_whose_rate_of_stochastic_depth_differs_share_a_function():
    qmodel, x = quantized(dropping)
    fused = compress.fuse_for_training(qmodel).train()
    functions = []
    parts = compile_regions(fused, counting(functions)).train()
    assert len(functions) < len(regions(parts))
    found = []
    for run in (fused, parts):
        torch.manual_seed(5)
        found.append(gradients(run, qmodel, x))
    assert_same(*found, rtol=1e-5, atol=1e-6)


def test_blocks_of_other_settings_share_nothing():
    bits = compress.Rule(match="3.*", weights=compress.WeightSpec(num_bits=4))
    qmodel, x = quantized(deep, rules=(bits,))
    for graph in (qmodel, compress.fuse_for_training(qmodel)):
        parts = compile_regions(graph, counting([]))
        kinds = {}
        for region in regions(parts):
            kinds.setdefault(region.run, set()).add(
                tuple(repr(m.format) for m in region.modules() if isinstance(m, compress.Quantizer))
            )
        assert all(len(formats) == 1 for formats in kinds.values())
        assert_same(gradients(parts, qmodel, x), gradients(graph, qmodel, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [mixed, None])
def test_any_graph_computes_the_same(make):
    qmodel, x = quantized_attention(vit()) if make is None else quantized(make)
    fused = compress.fuse_for_training(qmodel)
    parts = compile_regions(fused, counting([]))
    assert_same(gradients(parts, qmodel, x), gradients(fused, qmodel, x), rtol=1e-5, atol=1e-6)
    assert {id(p) for p in parts.parameters()} <= {id(p) for p in qmodel.parameters()}


def test_the_compiler_meets_each_kind_once():
    qmodel, x = quantized(deep)
    expected = gradients(qmodel, qmodel, x)
    functions, graphs = [], []

    def backend(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def compiler(run):
        functions.append(run)
        return torch.compile(
            run, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": few_guards}
        )

    torch.compiler.reset()
    parts = compile_regions(compress.fuse_for_training(qmodel), compiler)
    assert_same(gradients(parts, qmodel, x), expected, rtol=1e-5, atol=1e-6)
    first = len(graphs)
    gradients(parts, qmodel, x)
    assert len(graphs) == first == len(functions) < len(regions(parts))

    path, quantizer = next((name, one) for name, one in quantizers(qmodel) if name.startswith("3.two"))
    quantizer.enabled = False  # of one block; the others go on as they were
    changed = gradients(parts, qmodel, x)
    assert_same(changed, gradients(qmodel, qmodel, x), rtol=1e-5, atol=1e-6)
    assert len(graphs) == first + 1
    assert not torch.allclose(changed[0], expected[0]), path


# Training through the fused graph, eager or compiled, is training on the plain one, for every measured family.

ALL = {**FAMILIES, "MobileNetV2": lambda: zoo.MobileNetV2(4, 0.25, [[1, 8, 1, 1], [4, 8, 2, 2]], dropout=0.0)}

# Compiled too: other tests compile convolutions, BatchNorm and ConvNeXt's kernels.
COMPILED = ("ViT", "Swin", "MobileNetV3")


@pytest.mark.parametrize("family", further(ALL, set(ALL) - {"Swin", "MobileNetV3"}))
def test_losses_ranges_and_weights_are_those_of_the_plain_path(family):
    # Scales of exported activations are the ranges, those of weights follow from the weights.
    #
    # Trained in float64, where no value is so near to a tie that a sum in another order rounds to the other side.
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 4
    x += y[:, None, None, None] * torch.linspace(-0.5, 0.5, 16)
    model = ALL[family]()
    for parameter in model.parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.02)  # a head of zeros has no range
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # its statistics become those of one batch
    with torch.no_grad():
        model.train()(x)
    start = compress.quantize(model.eval(), x[:2], [x]).double()
    x = x.double()
    runs = []
    for fused in (False, True):
        qmodel = copy.deepcopy(start).train()
        run, losses = compress.fuse_for_training(qmodel) if fused else qmodel, []
        optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01, eps=1e-3)
        for _ in range(8):
            loss = F.cross_entropy(run(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, dict(qmodel.named_parameters()), dict(qmodel.named_buffers())))
    (expected, weights, ranges), (losses, *ours) = runs
    learned = expected[0] - expected[-1]
    assert learned > 5e-3
    assert losses == pytest.approx(expected, rel=0, abs=1e-6 * learned)
    torch.testing.assert_close(ours[0], weights, rtol=0, atol=1e-06)
    torch.testing.assert_close(ours[1], ranges, rtol=0, atol=0)
    if family not in COMPILED:
        return
    torch.compiler.reset()
    F.cross_entropy(run(x), y).backward()
    eager = {name: p.grad.clone() for name, p in qmodel.named_parameters()}
    optimizer.zero_grad()
    F.cross_entropy(torch.compile(run, backend="aot_eager", fullgraph=True)(x), y).backward()
    for name, parameter in qmodel.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], msg=f"{name}, in one compiled graph")


@pytest.mark.release
def test_in_the_interpreter_it_trains_as_the_plain_path_does():
    interpreted("tests.qat_fusion.interpreted_int8")


@pytest.mark.release
def test_training_on_codes_compiled():
    # Where no GPU is, the graph is that of floats.
    qmodel, x = int8_made(
        lambda: nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), Block(16, 32, 2), nn.Conv2d(32, 5, 1))
    )
    found = compiled_gradients(qmodel, x, kernels="torch", forward="int8")
    close(found, gradients(qmodel, qmodel, x))


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_where_triton_does_not_run_the_chains_are_the_fused_ones(target):
    qmodel, x = int8_made(target=target)
    fused = compress.fuse_for_training(qmodel, forward="int8")
    assert any(chain.int8 for chain in fused.report.chains) == (target == "tensorrt")  # unsigned codes are not computed
    close(int8_gradients(fused, qmodel, x), int8_gradients(qmodel, qmodel, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_read_off_values_of_any_type(dtype):
    # Every integer comes back, although 8 bits of a fraction hold 127 steps only just.
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for amax in (0.013, 1.0, 5.3, 40.7):
        values = (codes * (torch.tensor(amax) / 127)).to(dtype)
        assert torch.equal(codes_by_torch(values, torch.tensor(amax), QuantFormat()), codes)


def test_codes_of_weights_are_those_of_the_engine():
    weight = torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    amax = 0.7 * weight.abs().amax((1, 2, 3))
    quant_format = QuantFormat(axis=0, narrow=True)
    codes = codes_by_torch(weight, amax, quant_format)
    assert torch.equal(codes, quantize_tensor(weight, amax / 127, quant_format))
    assert codes.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_trains_as_the_plain_path_does(compiled):
    qmodel, x = int8_made()
    qmodel, x = qmodel.cuda(), x.cuda()
    fused = compress.fuse_for_training(qmodel, forward="int8")
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    with torch.backends.cudnn.flags(allow_tf32=False):
        close(int8_gradients(run, qmodel, x), int8_gradients(qmodel, qmodel, x))
