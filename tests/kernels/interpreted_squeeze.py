"""Kernels of squeeze and excitation against torch in float64: in Triton's interpreter when started.

Where rounding depends on the last bits nothing is compared (`tests.kernels.float64`). The mean and the gate are rounded
to the type of the network in the reference too, since all that follows depends on them.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from compress.kernels.epilogue import IntegerGrid
from compress.kernels.fake_quantize import SMOOTH_ACTIVATIONS
from compress.kernels.triton import squeeze as triton_squeeze
from compress.kernels.triton.squeeze import excite, excite_again, fits, response_again, response_quantize, squeeze
from compress.qat_fusion.squeeze import FusedSqueezeModule
from compress.quantization.numerics import fake_quantize, scale_from_amax
from tests.kernels.float64 import assert_close_in_norm, beside_float64
from tests.kernels.interpreted_rows import FORMATS, sure
from tests.networks import Net
from tests.qat_fusion.common import fused_as_plain, gradients, quantized

ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "relu6": F.relu6, **SMOOTH_ACTIVATIONS}
SHAPES = ((2, 8, 3, 5), (2, 40, 5, 7), (1, 72, 2, 2))
GPU_SHAPES = ((128, 72, 28, 28), (16, 1536, 7, 7), (5, 256, 14, 14), (3, 216, 56, 56))
CORNERS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}


def rounded_to(exact, dtype):
    return exact + (exact.to(dtype).double() - exact).detach()


def activated(x, bias, activation):
    # The activation of a layer's result, and where that is at no corner of it.
    x = x if bias is None else x + bias.view(1, -1, 1, 1)
    apart = torch.ones_like(x, dtype=torch.bool)
    for corner in CORNERS.get(activation, ()):
        apart &= (x - corner).abs() > 1e-5
    return ACTIVATIONS[activation](x), apart


def check_block(activation, shape, quant_format, rounds, has_bias, dtype, device):
    generator = torch.Generator().manual_seed(3)
    y = (2 * torch.randn(shape, generator=generator)).to(device, dtype).contiguous(memory_format=torch.channels_last)
    weight, offset, bias = (torch.randn(shape[1], generator=generator).to(device) for _ in range(3))
    made = [y, weight.to(dtype), offset.to(dtype), *([bias] if has_bias else [])]
    mean_amax, amax = torch.tensor(2.5, device=device), torch.tensor(1.5, device=device)
    grids = [IntegerGrid(a, quant_format.low, quant_format.high) for a in (mean_amax, amax)]
    assert fits(y)

    def gate_of(pooled, weight, offset):
        return torch.sigmoid(pooled * weight.view(1, -1, 1, 1) + offset.view(1, -1, 1, 1))

    def fused(y, weight, offset, bias=None):
        pooled, kept, link = squeeze(y, bias, activation, grids[0] if rounds else None)
        gate = gate_of(pooled, weight, offset)
        result = excite(kept, gate, grids[1], link)
        numbers = {"low": quant_format.low, "high": quant_format.high, "activation": activation}
        assert torch.equal(excite_again(kept.detach(), gate.detach(), amax, bias, **numbers), result)
        return result

    def reference(x, weight, offset, bias=None):
        a, apart = activated(x, bias, activation)
        averaged = fake_quantize(a, scale_from_amax(mean_amax.double(), quant_format), quant_format) if rounds else a
        pooled = rounded_to(averaged.mean((2, 3), keepdim=True), dtype)
        gate = gate_of(pooled, weight, offset)
        with torch.no_grad():
            found = gate_of(pooled.to(dtype), weight.to(dtype), offset.to(dtype)).double()
        product = a * (gate + (found - gate).detach())
        mask = sure(product, amax, quant_format) & apart.detach()
        return fake_quantize(product, scale_from_amax(amax.double(), quant_format), quant_format), mask

    _, found, wanted, mask = beside_float64(fused, reference, made, generator)
    assert mask.double().mean() > 0.4
    precision = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert_close_in_norm(one, other, precision, (activation, shape, dtype, rounds, has_bias))
    assert found[1].stride() == y.stride()


def check_response(activation, shape, quant_format, has_bias, dtype, device):
    generator = torch.Generator().manual_seed(4)
    y = 2 * torch.randn(shape, generator=generator)
    y[:, 1] = 0
    weight, shift, bias = (torch.randn(shape[1], generator=generator) for _ in range(3))
    bias[1] = 0
    y = y.to(device, dtype).contiguous(memory_format=torch.channels_last)
    made = [y, *(tensor.to(device) for tensor in (weight, shift, bias)[: 3 if has_bias else 2])]
    amax = torch.tensor(3.0, device=device)
    grid, numbers = IntegerGrid(amax, quant_format.low, quant_format.high), {"activation": activation}

    def fused(y, weight, shift, bias=None):
        result, gain = response_quantize(y, weight, shift, grid, bias=bias, eps=1e-6, **numbers)
        again = response_again(y.detach(), gain, shift.detach(), amax, bias, low=grid.low, high=grid.high, **numbers)
        assert torch.equal(again, result)
        return result

    def reference(x, weight, shift, bias=None):
        a, apart = activated(x, bias, activation)
        norms = a.norm(dim=(2, 3), keepdim=True)
        ratios = norms / (norms.mean(1, keepdim=True) + 1e-6)
        y = a + torch.addcmul(shift.view(1, -1, 1, 1), weight.view(1, -1, 1, 1), a * ratios)
        mask = sure(y, amax, quant_format) & apart.detach()
        return fake_quantize(y, scale_from_amax(amax.double(), quant_format), quant_format), mask

    _, found, wanted, mask = beside_float64(fused, reference, made, generator)
    assert mask.double().mean() > 0.4
    precision = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert_close_in_norm(one, other, precision, (activation, shape, dtype, has_bias))


class ResponseNet(nn.Module):
    # A block of ConvNeXt V2 on (N, H, W, 8).
    def __init__(self):
        super().__init__()
        from timm.layers.grn import GlobalResponseNorm  # optional: tests run without timm

        self.stem, self.norm, self.one, self.drop = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(0)
        self.grn, self.two, self.head = GlobalResponseNorm(16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        return self.head(self.two(self.grn(self.drop(F.gelu(self.one(self.norm(x)))))) + x).mean((1, 2))


def response_net():
    torch.manual_seed(1)
    net = ResponseNet().eval()
    nn.init.normal_(net.grn.weight)
    return net


def check_response_network():
    qmodel, x = quantized(response_net)
    fused_as_plain(qmodel, x, rtol=1e-3, atol=1e-3, kernels="triton")


def check_parts():
    # Gradients where the gate, or the product, is no part of the loss; and of a second backward pass.
    y = torch.randn(2, 16, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    grid = IntegerGrid(torch.tensor(1.0), -127, 127)

    def gradient(run):
        pooled, kept, link = squeeze(y, None, "relu", grid)
        return torch.autograd.grad(run(pooled, lambda gate: excite(kept, gate, grid, link)).sum(), y)[0]

    inside = (y > 0) & (y < 1 + 0.5 / 127)
    assert torch.equal(
        gradient(lambda pooled, product: product(0 * pooled.detach() + 0.5)), 0.5 * ((y > 0) & (y < 2 + 1 / 127))
    )
    torch.testing.assert_close(gradient(lambda pooled, product: pooled), inside / 9)
    pooled, kept, link = squeeze(y, None, "relu", grid)
    result = excite(kept, torch.sigmoid(pooled), grid, link).sum()
    first, second = (torch.autograd.grad(result, y, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def squeeze_net(activation=nn.SiLU, gate=nn.Sigmoid):
    torch.manual_seed(1)

    def run(net, x):
        x = net.activation(net.stem(x))
        y = net.activation(net.one(x))
        gate = net.gate(net.up(F.relu(net.down(F.adaptive_avg_pool2d(y, 1)))))
        return net.head(net.project(gate * y) + x).mean((2, 3))

    net = Net(
        run,
        stem=nn.Conv2d(3, 16, 3, 2, 1),
        one=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        activation=activation(),
        gate=gate(),
        down=nn.Conv2d(16, 8, 1),
        up=nn.Conv2d(8, 16, 1),
        project=nn.Conv2d(16, 16, 1),
        head=nn.Conv2d(16, 5, 1),
    )
    return net.to(memory_format=torch.channels_last).eval()


def in_channels_last(made):
    qmodel, x = made
    return qmodel.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)


def check_network(activation, gate):
    qmodel, x = in_channels_last(quantized(lambda: squeeze_net(activation, gate)))
    fused = fused_as_plain(qmodel, x, rtol=1e-3, atol=1e-3, kernels="triton")
    assert sum(isinstance(module, FusedSqueezeModule) for module in fused.modules()) == 1
    found, wanted = (gradients(run, qmodel, x, autocast=True) for run in (fused, qmodel))
    exact = gradients(qmodel, qmodel, x)
    for name, grad in exact[2].items():
        ours, theirs = (float((made[2][name] - grad).norm() / grad.norm()) for made in (found, wanted))
        assert ours < max(0.04, 3 * theirs), (name, ours, theirs)


def check_other_layouts():
    # Images with channels first take torch's operations, also where the layer's bias is apart from it.
    qmodel, x = quantized(squeeze_net)
    qmodel, x = qmodel.to(memory_format=torch.contiguous_format), x.contiguous()
    fused_as_plain(qmodel, x, rtol=1e-3, atol=1e-3, kernels="triton")


def main():
    triton_squeeze._FORWARD = triton_squeeze._BACKWARD = (256, 4, 3)  # each program goes through several tiles
    for i, (activation, shape) in enumerate(itertools.product(ACTIVATIONS, SHAPES)):
        dtype = (torch.float32, torch.float16)[i % 2]
        check_block(activation, shape, FORMATS[i % 2], i // 3 % 3 > 0, i % 4 > 0, dtype, "cpu")
        if i % 7 == 0:
            check_response(activation, SHAPES[i // 7], FORMATS[i % 4 // 2], i % 4 > 0, dtype, "cpu")
    check_network(nn.SiLU, nn.Sigmoid)
    check_network(nn.Hardswish, nn.Hardsigmoid)
    check_response_network()
    check_parts()
    check_other_layouts()
