import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

import compress
from compress.qat_fusion.attention import FusedAttentionModule, PackedAttentionModule
from compress.qat_fusion.norm import FusedNormModule
from compress.quantization.quantizer import quantizers
from tests.kernels.interpreter import interpreted
from tests.networks import Net
from tests.qat_fusion import common
from tests.qat_fusion.common import assert_same, compiled_gradients, fused_as_plain, gradients
from tests.qat_fusion.interpreted_recompute import Dense, block, keeping, made

TARGETS = ("tensorrt", "openvino", "onnxruntime")


def vit():
    torch.manual_seed(1)
    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    return VisionTransformer(**sizes, num_classes=5, attention_dropout=0.5).eval()


def swin():
    torch.manual_seed(1)
    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": [2, 2]}
    return SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=5).eval()


def attention(score, twice=False):
    # One head on (N, tokens, 8), with a softmax whose input is made by `score`.
    def run(net, x):
        q, k, v = net.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        weights = net.score(q, k.transpose(-2, -1)).softmax(-1)
        y = net.head(weights @ v)
        return y.mean(1) + weights.mean() if net.twice else y.mean(1)

    return Net(run, qkv=nn.Linear(8, 24), head=nn.Linear(8, 5), score=score, twice=twice)


def heads(change):
    # Two heads on (N, tokens, 8), with queries, keys and values that `change` makes of a linear layer's.
    def run(net, x):
        x = x.flatten(2).transpose(1, 2)
        n, tokens, _ = x.shape
        q, k, v = net.change(*net.qkv(x).reshape(n, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0))
        weights = (net.norm(q) @ k.transpose(-2, -1)).softmax(-1)
        return net.head((weights @ v).transpose(1, 2).reshape(n, tokens, 8)).mean(1)

    return Net(run, qkv=nn.Linear(8, 24), norm=nn.Identity(), head=nn.Linear(8, 5), change=change)


def quantized(model, target="tensorrt", clip=0.6, channels=3):
    def make():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5)  # probabilities that are not all alike
        return model

    return common.quantized(make, target, clip, size=16, channels=channels, count=3, smooth=None)  # all products


def attentions(module):
    return [found for found in module.modules() if isinstance(found, FusedAttentionModule)]


def packed(module):
    return [found for found in module.modules() if isinstance(found, PackedAttentionModule)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("make", "nodes"), [(vit, [5, 5]), (swin, [5, 8])])
def test_vision_transformers_have_the_gradients_of_the_plain_path(make, nodes, target):
    # Product, scale, softmax, dropout, product; of windows also with tables of scores, and with masks.
    qmodel, x = quantized(make(), target)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-09, atol=1e-09)
    assert len(attentions(fused)) == len(packed(fused)) == 2
    chains = [chain for chain in fused.report.chains if {"matmul", "matmul_2", "softmax", "softmax_1"} & {*chain.nodes}]
    assert sorted(len(chain.nodes) for chain in chains) == nodes
    assert all(chain.reason == "" for chain in chains)


def test_quantizers_that_do_not_round_and_dropout_that_drops():
    qmodel, x = quantized(vit())
    fused = compress.fuse_for_training(qmodel)
    qmodel.train(), fused.train()
    expected = {}
    for run in (qmodel, fused):
        torch.manual_seed(3)
        expected[run] = run(x)
    torch.testing.assert_close(expected[fused], expected[qmodel], rtol=1e-4, atol=1e-4)
    qmodel.eval(), fused.eval()
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    torch.testing.assert_close(fused(x), qmodel(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(fused)(x), qmodel(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("score", "twice", "reason"),
    [
        (lambda q, k: q @ k / 3, False, ""),
        (lambda q, k: torch.bmm(q, k), False, ""),
        (lambda q, k: 0.3 * torch.matmul(q, k), False, ""),
        (lambda q, k: q @ k, True, "attention stays open: softmax has 2 consumers"),
        (lambda q, k: q @ k + 1, False, "add add comes before the softmax"),
        (lambda q, k: 3 / (q @ k).abs().add(1), False, "does not multiply by a number"),
        (lambda q, k: q @ k * q.abs().amax(), False, "does not multiply by a number"),
    ],
)
def test_what_is_one_operation_and_what_is_not(score, twice, reason):
    torch.manual_seed(1)
    qmodel, x = quantized(attention(score, twice).eval(), channels=8)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.0001)
    assert len(attentions(fused)) == (reason == "")
    reasons = [chain.reason for chain in fused.report.chains if chain.quantizer == "quantizers.softmax"]
    assert reasons == [""] if not reason else reason in reasons[0]


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        (lambda q, k, v: (q, k, v), True),
        (lambda q, k, v: (k, q, v), False),
        (lambda q, k, v: (q, k, k), False),
        (lambda q, k, v: (q, k, 2 * v), False),
        (lambda q, k, v: (q, k.abs(), v), False),
    ],
)
def test_parts_of_one_tensor_are_read_as_one(change, alike):
    torch.manual_seed(1)
    qmodel, x = quantized(heads(change).eval(), channels=8)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.0001)
    assert len(attentions(fused)) == 1
    assert len(packed(fused)) == alike
    rounded = [
        chain for chain in fused.report.chains if chain.nodes and chain.quantizer.startswith("quantizers.getitem")
    ]
    assert len(rounded) == 3 * alike
    assert any(chain.quantizer == "quantizers.matmul_1" and chain.nodes for chain in fused.report.chains) == alike
    for path, quantizer in quantizers(qmodel):
        quantizer.enabled = "softmax" in path
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_heads_too_wide_for_the_kernels_stay_open():
    model = attention(lambda q, k: q @ k).eval()
    model.qkv, model.head = nn.Linear(8, 3 * 264), nn.Linear(264, 5)
    qmodel, _ = quantized(model, channels=8)
    fused = compress.fuse_for_training(qmodel)
    assert attentions(fused) == []
    assert any("264 wide" in chain.reason for chain in fused.report.chains)


def test_compiled():
    qmodel, x = quantized(attention(lambda q, k: q @ k / 3).eval(), channels=8)
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "checks", ["kernels.interpreted_attention", "kernels.interpreted_rows", "qat_fusion.interpreted_recompute"]
)
def test_triton_kernels_compute_the_same_in_the_interpreter(checks):
    interpreted(f"tests.{checks}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_kernels_compute_what_torch_does(dtype, compiled):
    from tests.kernels.interpreted_attention import (
        GPU_CASES,
        GPU_PACKED,
        GPU_WINDOWS,
        SIGNED,
        UNSIGNED,
        check,
        check_packed,
        check_window,
    )

    for quant_format in (SIGNED, UNSIGNED):
        for sizes in GPU_CASES:
            torch.compiler.reset()
            check((*sizes, quant_format, dtype, None), "cuda", compiled)
        for sizes in GPU_PACKED:
            torch.compiler.reset()
            check_packed((*sizes, quant_format, dtype, None), "cuda", compiled)
        for sizes in GPU_WINDOWS:
            torch.compiler.reset()
            check_window((*sizes, quant_format, dtype), "cuda", compiled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_a_vision_transformer_has_the_gradients_of_the_plain_path(dtype, compiled):
    # In half precision it is as near to the plain path in float32 as the plain path in half precision is.
    from tests.kernels.interpreted_attention import in_half

    def angle(found):
        return max(1 - F.cosine_similarity(found[n].flatten(), g.flatten(), dim=0) for n, g in exact.items())

    qmodel, x = quantized(vit(), clip=1.0)
    qmodel, x = qmodel.cuda(), x.cuda()
    run = compress.fuse_for_training(qmodel)
    run = torch.compile(run) if compiled else run
    exact = in_half(qmodel, qmodel, x, torch.float32)
    assert angle(in_half(run, qmodel, x, torch.float32)) < 1e-3
    assert angle(in_half(run, qmodel, x, dtype)) < 0.01 + 1.5 * angle(in_half(qmodel, qmodel, x, dtype))


# Smooth activations and layer norms in one operation with their quantizer: the plain path's function and gradients.


def quantized_rows(model, channels=8):
    return common.quantized(lambda: model.eval(), size=6, channels=channels, count=3)


def between(make, **parts):
    # Two layers on (N, tokens, 8), and what `make` puts between them; or that, and what goes around the second.
    def run(net, x):
        made = make(net, net.one(x.flatten(2).transpose(1, 2)))
        if isinstance(made, tuple):
            return net.two(made[0]).mean(1) + made[1].mean()
        return net.two(made).mean(1)

    torch.manual_seed(1)
    return quantized_rows(Net(run, one=nn.Linear(8, 16), norm=nn.LayerNorm(16), two=nn.Linear(16, 5), **parts))


def chain_of(fused, name):
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
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10)
    chain = chain_of(fused, name)
    assert chain.nodes == ("one", name) and chain.reason == ""


def test_activations_with_other_readers_or_of_another_kind_keep_theirs():
    # A layer's result with two consumers; an activation without a kernel of its own.
    qmodel, x = between(lambda self, y: (F.gelu(y), y))
    assert "one" not in chain_of(compress.fuse_for_training(qmodel), "gelu").nodes
    qmodel, x = between(lambda self, y: F.mish(y))
    assert chain_of(fused_as_plain(qmodel, x, rtol=0.0001, atol=0.0001), "mish").nodes == ()


def test_convolutions_and_int8_forward():
    # An activation that the INT8 kernel does not compute stays out of it, and its values are codes for the next.
    torch.manual_seed(1)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)]
    qmodel, x = quantized_rows(nn.Sequential(*layers), channels=16)
    fused = fused_as_plain(qmodel, x, rtol=0.0001, atol=0.001, forward="int8")
    assert [chain.int8 for chain in fused.report.chains if chain.nodes and "1" in chain.quantizer] == [False]
    assert any(chain.int8 for chain in fused.report.chains)


def test_quantizers_that_do_not_round():
    qmodel, x = between(lambda self, y: F.gelu(self.norm(F.silu(y) + y)))
    fused = compress.fuse_for_training(qmodel)
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_norms_of_a_vision_transformer(target):
    # Each with the sum before it, which goes on around it; the last norm's sum is read by it alone.
    qmodel, x = quantized(vit(), target)
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-09, atol=1e-09)
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
    fused = fused_as_plain(qmodel.double(), x.double(), rtol=1e-10, atol=1e-10)
    assert [module.keep_sum for module in norms(fused)] == kept


def test_norms_with_hooks_stay():
    qmodel, x = between(lambda self, y: self.norm(y))
    seen = []
    qmodel.norm.register_forward_hook(lambda *_: seen.append(1))
    fused = compress.fuse_for_training(qmodel)
    fused(x)
    assert seen and not norms(fused)


def test_compiled_of_rows():
    qmodel, x = between(lambda self, y: (lambda z: F.gelu(self.norm(z)) + z)(y + y.flip(1)))
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


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


# Layers whose quantized input is computed again in the backward pass instead of kept.


def layers_with_recipes(fused):
    nodes = [node for node in fused.graph.nodes if "recipe" in node.kwargs]
    return [name for node in nodes for name in ("one", "two", "three") if name in str(node.target)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda self, y: F.gelu(y), ["two"]),
        (lambda self, y: self.norm(y), ["two"]),
        (lambda self, y: F.dropout(F.gelu(y), 0.0), ["two"]),
        (lambda self, y: self.norm(self.three(F.silu(y))), ["three", "two"]),
        (lambda self, y: (lambda z: self.three(z).reshape(z.shape))(self.norm(y)), ["three"]),
        (lambda self, y: F.relu(y), []),  # keeps bits alone, from which nothing is computed again
        (lambda self, y: (lambda z: (z, z))(F.gelu(y)), []),  # something else keeps the values
        (lambda self, y: F.gelu(y).flip(1), []),
    ],
)
def test_which_layers_compute_their_input_again(make, expected):
    qmodel, x = between(make, three=nn.Linear(16, 16))
    assert layers_with_recipes(fused_as_plain(qmodel, x, rtol=0.0001, atol=0.0001)) == expected
    assert layers_with_recipes(compress.fuse_for_training(qmodel, kernels="torch")) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [block, Dense])
def test_on_a_gpu_the_same_bits_are_computed_again(dtype, make):
    _, qmodel, x = made(make)
    qmodel, x = qmodel.to("cuda"), x.to("cuda")
    fused = compress.fuse_for_training(qmodel).train()
    found = []
    for run in (fused, keeping(fused)):
        qmodel.zero_grad()
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = run(x).float().square().sum()
            loss.backward()
        found.append([parameter.grad.clone() for parameter in qmodel.parameters()])
    assert all(map(torch.equal, *found))
