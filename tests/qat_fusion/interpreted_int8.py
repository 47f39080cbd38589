"""Training on codes in Triton's interpreter against the plain path: started by `test_fused_codes`."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compress
from tests.networks import Net
from tests.qat_fusion.common import assert_same, gradients


class Block(nn.Module):
    # Two or three convolutions and what came in, which passes a convolution where its shape changes.
    def __init__(self, inputs, outputs, stride, narrow=0):
        super().__init__()
        kinds = ((inputs, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, outputs, 1, 1)) if narrow else None
        kinds = kinds or ((inputs, outputs, 3, stride), (outputs, outputs, 3, 1))
        layers = [[nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()] for i, o, k, s in kinds]
        self.path = nn.Sequential(*(layer for group in layers for layer in group))[:-1]
        self.other = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.other = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return torch.relu(self.path(x) + self.other(x))


def small_network():
    def run(net, x):
        x = torch.relu(net.depthwise(net.blocks(net.pool(net.stem(x)))))
        return net.head(torch.relu(net.last(x)).mean((2, 3)))

    return Net(
        run,
        stem=nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        pool=nn.MaxPool2d(3, 2, 1),
        blocks=nn.Sequential(Block(16, 32, 1, 16), Block(32, 32, 1), Block(32, 16, 2)),
        depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        last=nn.Conv2d(16, 16, 1),
        head=nn.Linear(16, 5),
    )


def made(network=small_network, **spec):
    torch.manual_seed(0)
    x = (2 * torch.randn(2, 3, 16, 16)).contiguous(memory_format=torch.channels_last)
    qmodel = compress.quantize(network().eval(), x, [x], spec=compress.QuantSpec(**spec))
    for name, quantizer in qmodel.named_modules():
        if name.startswith("quantizers."):
            quantizer.set_amax(0.8 * quantizer.amax)
    return qmodel.to(memory_format=torch.channels_last), x


def close(one, other):
    assert_same(one, other, rtol=1e-3, atol=1e-3)


def check_network():
    # Eager, in every state that a quantizer can be in, and copied.
    qmodel, x = made()
    before = {name: value.clone() for name, value in qmodel.state_dict().items()}
    fused = compress.fuse_for_training(qmodel, kernels="triton", forward="int8")
    coded = [chain.nodes[0] for chain in fused.report.chains if chain.int8]
    assert len(coded) == 11 and "depthwise" not in coded  # stem, 4 + 2 + 3 convolutions of the blocks, the last
    close(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x))
    close(gradients(lambda x: checkpoint(fused, x, use_reentrant=False), qmodel, x), gradients(qmodel, qmodel, x))
    assert all(torch.equal(value, before[name]) for name, value in qmodel.state_dict().items())
    twin = copy.deepcopy(fused)
    quantizers = dict(qmodel.named_modules())
    changed = next(name for name in quantizers if name.startswith("quantizers.blocks_1"))
    quantizers[changed].set_amax(0.5 * quantizers[changed].amax)
    expected = gradients(qmodel, qmodel, x)
    close(gradients(fused, qmodel, x), expected)
    assert not torch.equal(twin(x), fused(x))  # the copy has ranges of its own
    quantizers[changed].enabled = False
    quantizers["last"].weight_quantizer.enabled = False
    close(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x))
    qmodel.to(memory_format=torch.contiguous_format)
    x = x.contiguous()
    close(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x))


def check_kept_batchnorm():
    qmodel, x = made(batchnorm="keep")
    fused = compress.fuse_for_training(qmodel, kernels="triton", forward="int8")
    close(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x))


def main():
    check_network()
    check_kept_batchnorm()
