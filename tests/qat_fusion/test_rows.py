"""Smooth activations and layer norms in one operation with their quantizer: the plain path's function and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress.qat_fusion.norm import FusedNormModule
from compress.quantization.quantizer import quantizers
from tests.kernels.interpreter import interpreted
from tests.qat_fusion.common import assert_same, compiled_gradients, gradients
from tests.qat_fusion.test_attention import TARGETS, quantized, vit


class Between(nn.Module):
    """Two layers on (N, tokens, 8), and what `make` puts between them; or that, and what goes around the second."""

    def __init__(self, make):
        super().__init__()
        self.one, self.norm, self.two, self.make = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 5), make

    def forward(self, x):
        made = self.make(self, self.one(x.flatten(2).transpose(1, 2)))
        if isinstance(made, tuple):
            return self.two(made[0]).mean(1) + made[1].mean()
        return self.two(made).mean(1)


def quantized_rows(model, channels=8, **spec):
    """A calibrated network whose ranges are too small, so that values saturate."""
    torch.manual_seed(2)
    x = 2 * torch.randn(3, channels, 6, 6)
    qmodel = compress.quantize(model.eval(), x, [x], spec=compress.QuantSpec(**spec))
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax * 0.6)
    return qmodel, x


def between(make):
    torch.manual_seed(1)
    return quantized_rows(Between(make))


def chain_of(fused, name):
    """The chain that ends in the quantizer of that name."""
    (found,) = [chain for chain in fused.report.chains if chain.quantizer.removeprefix("quantizers.").startswith(name)]
    return found


def norms(module):
    return [found for found in module.modules() if isinstance(found, FusedNormModule)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda self, y: F.gelu(y), "gelu"),
        (lambda self, y: F.gelu(y, approximate="tanh"), "gelu"),
        (lambda self, y: F.silu(y, inplace=True), "silu"),
        (lambda self, y: F.hardswish(y), "hardswish"),
    ],
)
def test_a_layer_and_its_activation_are_one_operation(make, name):
    qmodel, x = between(make)
    qmodel, x = qmodel.double(), x.double()
    fused = compress.fuse_for_training(qmodel)
    chain = chain_of(fused, name)
    assert chain.nodes == ("one", name) and chain.reason == ""
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-10, atol=1e-10)


def test_activations_with_other_readers_or_of_another_kind_keep_theirs():
    """A layer's result with two consumers; an activation without a kernel of its own."""
    qmodel, x = between(lambda self, y: (F.gelu(y), y))
    assert "one" not in chain_of(compress.fuse_for_training(qmodel), "gelu").nodes
    qmodel, x = between(lambda self, y: F.mish(y))
    fused = compress.fuse_for_training(qmodel)
    assert chain_of(fused, "mish").nodes == ()
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_convolutions_and_int8_forward():
    """An activation that the INT8 kernel does not compute stays out of it, and its values are codes for the next."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)]
    qmodel, x = quantized_rows(nn.Sequential(*layers), channels=16)
    fused = compress.fuse_for_training(qmodel, forward="int8")
    assert [chain.int8 for chain in fused.report.chains if chain.nodes and "1" in chain.quantizer] == [False]
    assert any(chain.int8 for chain in fused.report.chains)
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-3)


def test_quantizers_that_do_not_round():
    qmodel, x = between(lambda self, y: F.gelu(self.norm(F.silu(y) + y)))
    fused = compress.fuse_for_training(qmodel)
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_norms_of_a_vision_transformer(target):
    """Each with the sum before it, which goes on around it; the last norm's sum is read by it alone."""
    qmodel, x = quantized(vit(), target)
    qmodel, x = qmodel.double(), x.double()
    fused = compress.fuse_for_training(qmodel)
    found = norms(fused)
    if target == "tensorrt":
        assert [module.keep_sum for module in found] == [False, True, True, True, False]
        assert [module.feeds_only_matmuls for module in found] == [True, True, True, True, False]
        assert [len(chain.nodes) for chain in fused.report.chains if any("ln" in name for name in chain.nodes)] == [
            1,
            2,
            2,
            2,
            2,
        ]
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-9, atol=1e-9)
    assert {id(p) for p in fused.parameters()} == {id(p) for p in qmodel.parameters()}


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda self, y: self.norm(y), [False]),
        (lambda self, y: F.layer_norm(y, (16,), self.norm.weight, self.norm.bias), [False]),
        (lambda self, y: F.layer_norm(y, normalized_shape=(16,), weight=self.norm.weight, eps=1e-3), [False]),
        (lambda self, y: self.norm(y + y.flip(1)), [False]),
        (lambda self, y: (lambda z: (self.norm(z), z))(y + y.flip(1)), [True]),
        (lambda self, y: (lambda z: (self.norm(z), z))(y.mul(2).add_(y.flip(1))), [True]),
        (lambda self, y: (lambda z: z.reshape(z.shape[0], -1, 16))(self.norm(y)), [False]),  # asks for its shape
        (lambda self, y: self.norm(y + y.mean(1, keepdim=True)), [False]),  # the sum broadcasts and stays outside
        (lambda self, y: F.layer_norm(y, (16,)), []),  # nothing to learn
        (lambda self, y: F.layer_norm(y, y.shape[1:]), []),
        (lambda self, y: F.layer_norm(y, (16,), self.norm.weight * 2, self.norm.bias), []),
        (lambda self, y: F.rms_norm(y, (16,), self.norm.weight), []),
        (lambda self, y: (lambda z: z + z.sum())(self.norm(y)), []),
    ],
)
def test_which_norms_are_one_operation(make, kept):
    qmodel, x = between(lambda self, y: make(self, y))
    qmodel, x = qmodel.double(), x.double()
    fused = compress.fuse_for_training(qmodel)
    assert [module.keep_sum for module in norms(fused)] == kept
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-10, atol=1e-10)


def test_norms_with_hooks_stay():
    qmodel, x = between(lambda self, y: self.norm(y))
    seen = []
    qmodel.norm.register_forward_hook(lambda *_: seen.append(1))
    fused = compress.fuse_for_training(qmodel)
    fused(x)
    assert seen and not norms(fused)


def test_compiled():
    qmodel, x = between(lambda self, y: (lambda z: F.gelu(self.norm(z)) + z)(y + y.flip(1)))
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_triton_kernels_compute_the_same_in_the_interpreter():
    assert "32 activations, 4 norms, 1 network" in interpreted("tests.kernels.interpreted_rows")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_activations_compute_what_torch_does(dtype, compiled):
    from tests.kernels.interpreted_rows import FORMATS, GPU_SHAPES, SMOOTH_ACTIVATIONS, check_activation

    for activation in SMOOTH_ACTIVATIONS:
        for shape in GPU_SHAPES[:1] if compiled else GPU_SHAPES:
            torch.compiler.reset()
            check_activation(activation, *shape, FORMATS[0], dtype, "cuda", compiled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_the_norms_compute_what_torch_does(compiled):
    from tests.kernels.interpreted_rows import GPU_NORMS, check_norm

    for case in GPU_NORMS:
        torch.compiler.reset()
        check_norm(case, "cuda", compiled)
