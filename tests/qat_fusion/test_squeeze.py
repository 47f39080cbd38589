import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import SqueezeExcitation, StochasticDepth

import compress
from compress.kernels.triton.launch import Launch
from compress.qat_fusion.norm import FusedResponseModule
from compress.qat_fusion.squeeze import FusedExciteModule, FusedSqueezeModule
from compress.quantization.quantizer import quantizers
from tests.kernels.interpreter import interpreted
from tests.networks import Net
from tests.qat_fusion.common import assert_same, compiled_gradients, fused_as_plain, gradients, quantized, saved_bytes


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


def test_compiled():
    qmodel, x = made()
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_only_the_layers_result_is_kept(monkeypatch):
    # Bytes of an image in bf16, counted by hand; product, activation and masks would be 512, 512 and 64 more.
    pytest.importorskip("triton")
    qmodel, x = made()
    qmodel = qmodel.to(torch.bfloat16, memory_format=torch.channels_last).eval()
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax.float())
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)  # what they compute does not matter
    four, eight = (
        saved_bytes(fused, images.contiguous(memory_format=torch.channels_last))
        for images in (x[:, :, :8, :8].bfloat16(), torch.cat([x, x])[:, :, :8, :8].bfloat16())
    )
    size = 16 * 4 * 4  # elements of an image between the convolutions
    inputs = 2 * (3 * 8 * 8 + 2 * size)  # of the first two convolutions and of the last one
    masks = 2 * size / 8  # of the quantizers of the stem and of the sum
    assert (eight - four) / 4 == pytest.approx(inputs + 2 * size + masks, abs=128)  # the gate keeps a little


def test_triton_kernels_compute_the_same_in_the_interpreter():
    assert "21 blocks, 3 networks" in interpreted("tests.kernels.interpreted_squeeze")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_blocks_compute_what_torch_does(dtype):
    from tests.kernels.interpreted_squeeze import ACTIVATIONS, FORMATS, GPU_SHAPES, check_block, check_response

    for i, activation in enumerate(ACTIVATIONS):
        check_response(activation, GPU_SHAPES[i % 4], FORMATS[i % 2], i % 3 > 0, dtype, "cuda")
        check_block(activation, GPU_SHAPES[i % 4], FORMATS[i % 2], i % 3 > 0, i % 4 > 0, dtype, "cuda")
