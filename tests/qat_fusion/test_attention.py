"""Attention in one operation: the same function and gradients as the operations one by one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

import compress
from compress.qat_fusion.attention import FusedAttentionModule, PackedAttentionModule
from compress.quantization.quantizer import quantizers
from tests.kernels.interpreter import interpreted
from tests.qat_fusion.common import assert_same, compiled_gradients, gradients

TARGETS = ("tensorrt", "openvino", "onnxruntime")


def vit():
    torch.manual_seed(1)
    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    return VisionTransformer(**sizes, num_classes=5, attention_dropout=0.5).eval()


class Attention(nn.Module):
    """One head on (N, tokens, 8), with a softmax whose input is made by `score`."""

    def __init__(self, score, twice=False):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 5)
        self.score, self.twice = score, twice

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        weights = self.score(q, k.transpose(-2, -1)).softmax(-1)
        y = self.head(weights @ v)
        return y.mean(1) + weights.mean() if self.twice else y.mean(1)


class Heads(nn.Module):
    """Two heads on (N, tokens, 8), with queries, keys and values that `change` makes of a linear layer's."""

    def __init__(self, change):
        super().__init__()
        self.qkv, self.norm, self.head, self.change = nn.Linear(8, 24), nn.Identity(), nn.Linear(8, 5), change

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        n, tokens, _ = x.shape
        q, k, v = self.change(*self.qkv(x).reshape(n, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0))
        weights = (self.norm(q) @ k.transpose(-2, -1)).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).reshape(n, tokens, 8)).mean(1)


def quantized(model, target="tensorrt", clip=0.6, channels=3):
    """A calibrated network whose ranges are too small, so that values saturate."""
    torch.manual_seed(2)
    x = 2 * torch.randn(3, channels, 16, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5)  # probabilities that are not all alike
    qmodel = compress.quantize(model, x, [x], spec=compress.QuantSpec(target=target))
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax * clip)
    return qmodel, x


def attentions(module):
    return [found for found in module.modules() if isinstance(found, FusedAttentionModule)]


def packed(module):
    return [found for found in module.modules() if isinstance(found, PackedAttentionModule)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_vision_transformer_has_the_gradients_of_the_plain_path(target):
    qmodel, x = quantized(vit(), target)
    qmodel, x = qmodel.double(), x.double()
    fused = compress.fuse_for_training(qmodel)
    assert len(attentions(fused)) == len(packed(fused)) == 2
    chains = [chain for chain in fused.report.chains if "matmul" in chain.nodes or "matmul_2" in chain.nodes]
    assert [len(chain.nodes) for chain in chains] == [5, 5]  # product, scale, softmax, dropout, product
    assert all(chain.reason == "" for chain in chains)
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-9, atol=1e-9)


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
    qmodel, x = quantized(Attention(score, twice).eval(), channels=8)
    fused = compress.fuse_for_training(qmodel)
    assert len(attentions(fused)) == (reason == "")
    reasons = [chain.reason for chain in fused.report.chains if chain.quantizer == "quantizers.softmax"]
    assert reasons == [""] if not reason else reason in reasons[0]
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


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
    qmodel, x = quantized(Heads(change).eval(), channels=8)
    fused = compress.fuse_for_training(qmodel)
    assert len(attentions(fused)) == 1
    assert len(packed(fused)) == alike
    rounded = [
        chain for chain in fused.report.chains if chain.nodes and chain.quantizer.startswith("quantizers.getitem")
    ]
    assert len(rounded) == 3 * alike
    assert any(chain.quantizer == "quantizers.matmul_1" and chain.nodes for chain in fused.report.chains) == alike
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)
    for path, quantizer in quantizers(qmodel):
        quantizer.enabled = "softmax" in path
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_heads_too_wide_for_the_kernels_stay_open():
    model = Attention(lambda q, k: q @ k).eval()
    model.qkv, model.head = nn.Linear(8, 3 * 264), nn.Linear(264, 5)
    qmodel, _ = quantized(model, channels=8)
    fused = compress.fuse_for_training(qmodel)
    assert attentions(fused) == []
    assert any("264 wide" in chain.reason for chain in fused.report.chains)


def test_compiled():
    qmodel, x = quantized(Attention(lambda q, k: q @ k / 3).eval(), channels=8)
    assert_same(compiled_gradients(qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-4)


def test_triton_kernels_compute_the_same_in_the_interpreter():
    assert "10 attentions, 1 network" in interpreted("tests.kernels.interpreted_attention")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_kernels_compute_what_torch_does(dtype, compiled):
    from tests.kernels.interpreted_attention import (
        GPU_CASES,
        GPU_PACKED,
        SIGNED,
        UNSIGNED,
        check,
        check_packed,
    )

    for quant_format in (SIGNED, UNSIGNED):
        for sizes in GPU_CASES:
            torch.compiler.reset()
            check((*sizes, quant_format, dtype, None), "cuda", compiled)
        for sizes in GPU_PACKED:
            torch.compiler.reset()
            check_packed((*sizes, quant_format, dtype, None), "cuda", compiled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_a_vision_transformer_has_the_gradients_of_the_plain_path(dtype, compiled):
    """In half precision it is as near to the plain path in float32 as the plain path in half precision is."""
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
