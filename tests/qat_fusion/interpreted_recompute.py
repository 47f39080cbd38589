"""Inputs of layers that are computed again in the backward pass: checks for Triton's interpreter."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compress
from compress.qat_fusion.recompute import Recipe
from compress.quantization.quantizer import quantizers
from tests.networks import Net
from tests.qat_fusion.common import assert_same, gradients, saved_bytes


def block(dropout=0.0, inplace=False):
    def run(net, x):
        x = net.depthwise(net.silu(net.stem(x))).flatten(2).transpose(1, 2).contiguous()
        x = x + net.narrow(net.dropout(F.gelu(net.wide(net.norm(x)))))
        return net.head(net.last(x)).mean(1)

    return Net(
        run,
        stem=nn.Conv2d(3, 16, 3, padding=1),
        depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        silu=nn.SiLU(),
        norm=nn.LayerNorm(16),
        wide=nn.Linear(16, 64),
        dropout=nn.Dropout(dropout, inplace),
        narrow=nn.Linear(64, 16),
        last=nn.LayerNorm(16),
        head=nn.Linear(16, 5),
    )


class Dense(nn.Module):
    # Two layers of DenseNet: batch norms after concatenations, which no convolution takes in.
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (16, 24, 32))
        self.convs = nn.ModuleList(nn.Conv2d(width, 8, 3, padding=1) for width in (16, 24))
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(torch.relu(norm(x)))], 1)
        return self.head(F.relu6(self.norms[2](x))).mean((2, 3))


def made(make=block, **options):
    # A calibrated network whose ranges are too small, so that values saturate; and its input.
    torch.manual_seed(1)
    model = make(**options).to(memory_format=torch.channels_last)
    x = (2 * torch.randn(2, 3, 6, 6)).contiguous(memory_format=torch.channels_last)
    qmodel = compress.quantize(model.eval(), x, [x]).to(memory_format=torch.channels_last).train()
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax * 0.7)
    return model, qmodel, x


def seeded(run):
    def call(x):
        torch.manual_seed(5)
        return run(x)

    return call


def check_gradients(make=block, **options):
    # Those of the plain path; and bit for bit those without recipes.
    _, qmodel, x = made(make, **options)
    fused = compress.fuse_for_training(qmodel, kernels="triton").train()
    found = gradients(seeded(fused), qmodel, x)
    assert_same(found, gradients(seeded(qmodel), qmodel, x), rtol=2e-3, atol=2e-3)
    assert_same(found, gradients(seeded(keeping(fused)), qmodel, x))
    in_half, kept = (gradients(seeded(run), qmodel, x, bf16=True) for run in (fused, keeping(fused)))
    assert_same(in_half, kept)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        assert_same(gradients(seeded(fused), qmodel, x), found)
    if make is Dense:
        return  # a checkpoint computes the statistics of its batch twice, and running ones follow twice
    again = gradients(seeded(lambda x: checkpoint(fused, x, use_reentrant=False)), qmodel, x)
    assert_same(again, found)


def keeping(fused):
    class Keeping(torch.fx.Interpreter):
        def call_module(self, target, args, kwargs):
            kwargs = {key: None if isinstance(value, Recipe) else value for key, value in kwargs.items()}
            return super().call_module(target, args, kwargs)

    return Keeping(fused).run


def check_bytes(make, channels, share):
    model, qmodel, x = made(make)
    fused = compress.fuse_for_training(qmodel, kernels="triton").train()
    with torch.autocast("cpu", torch.bfloat16):
        images = x, x.repeat(3, 1, 1, 1).contiguous(memory_format=torch.channels_last)
        ours, others, floats = (
            saved_bytes(run, images[1]) - saved_bytes(run, images[0]) for run in (fused, keeping(fused), model.train())
        )
    pixels, images = 36, 4
    assert others - ours == pixels * images * 2 * channels, (others, ours)
    assert ours < share * floats, (ours, floats)


def check_batch_norms(training):
    # Running statistics are those of the plain path, in training and where they are frozen.
    _, qmodel, x = made(Dense)
    plain = copy.deepcopy(qmodel)
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    for run, owner in ((fused, qmodel), (plain, plain)):
        for module in owner.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(training)
        for _ in range(2):
            run(x)
    found, wanted = (dict(owner.named_buffers()) for owner in (qmodel, plain))
    assert all(int(found[name]) == 2 * training for name in found if name.endswith("num_batches_tracked"))
    moved = [name for name in found if "running" in name]
    assert len(moved) == 6
    for name in moved:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-2, atol=1e-2)  # a tie may round otherwise
    assert_same(gradients(fused, qmodel, x), gradients(plain, plain, x), rtol=5e-3, atol=5e-3)


def main():
    check_gradients()
    check_gradients(dropout=0.5)
    check_gradients(dropout=0.5, inplace=True)
    check_gradients(Dense)
    check_batch_norms(training=True)
    check_batch_norms(training=False)
    check_bytes(block, 16 + 16 + 64, share=0.65)  # inputs of the depthwise convolution and of two linear layers
    check_bytes(Dense, 16 + 24 + 32, share=0.65)
