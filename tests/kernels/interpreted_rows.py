"""Kernels of smooth activations and of layer norms against torch in float64: in Triton's interpreter when started.

A value within the kernel's precision of a tie may round to the other neighbour, and one at the end of the grid, or at a
corner of hard swish, may pass its gradient or not: there nothing is compared, and the gradient is zero.
"""

import itertools

import torch
import torch.nn.functional as F

import compress
from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import SMOOTH_ACTIVATIONS, smooth_fits, smooth_quantize
from compress.kernels.triton import activation as triton_activation
from compress.kernels.triton import layer_norm
from compress.qat_fusion.norm import FusedNormModule
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from tests.kernels.float64 import assert_close_in_norm, beside_float64
from tests.networks import Net
from tests.qat_fusion.common import fused_as_plain
from tests.qat_fusion.test_attention import quantized, vit

FORMATS = (QuantFormat(num_bits=8), QuantFormat(num_bits=4, signed=False))
SHAPES = (((3, 7, 24), -1), ((2, 16, 5, 3), 1), ((2, 8, 2, 2), None), ((2, 16, 6), 1))
GPU_SHAPES = (((64, 197, 1536), -1), ((4, 96, 28, 28), 1), ((5, 200, 6), None), ((4, 96, 784), 1))
NORMS = (
    # rows, width, type of the sum's terms, whether the sum is kept, with a bias, format
    ((3, 7), 24, (torch.float32, torch.float16), True, True, FORMATS[0]),
    ((50,), 40, (torch.float32,), False, True, FORMATS[1]),
    ((2, 30), 64, (torch.float32, torch.float32), False, False, FORMATS[0]),
    ((9,), 100, (torch.float16, torch.float32), True, True, FORMATS[0]),
)
GPU_NORMS = (
    ((16, 197), 384, (torch.float32, torch.bfloat16), True, True, FORMATS[0]),
    ((40, 50), 96, (torch.float32,), False, True, FORMATS[1]),
    ((777,), 200, (torch.bfloat16, torch.float32), True, False, FORMATS[0]),
    ((64, 49), 2048, (torch.float16, torch.float32), False, True, FORMATS[0]),
)


def quantize(quant_format, amax):
    net = Net(lambda net, x: net.quantizer(x), quantizer=compress.Quantizer(quant_format))
    net.quantizer.set_amax(torch.tensor(amax))
    return net


def sure(x, amax, quant_format):
    steps = x / scale_from_amax(amax.double(), quant_format)
    return ((steps % 1 - 0.5).abs() > 1e-5 * (1 + steps.abs())).detach()


def check_activation(activation, shape, bias_dim, quant_format, dtype, device, compiled=False):
    # Result and gradients of one activation; a third of the values saturates.
    generator = torch.Generator().manual_seed(3)
    y = (4 * torch.randn(shape, generator=generator)).to(device, dtype)
    y = y.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else y
    bias = None if bias_dim is None else torch.randn(shape[bias_dim], generator=generator).to(device)
    amax = torch.tensor(3.0, device=device)
    epilogue = Epilogue(quant_format.low, quant_format.high, bias_dim=-1 if bias_dim is None else bias_dim)
    assert smooth_fits(y, epilogue, None)

    def fused(y, bias=None):
        return smooth_quantize(y, amax, epilogue, activation, bias=bias, kernels="triton" if device == "cpu" else None)

    def reference(x, bias64=None):
        if bias64 is not None:
            shaped = [-1 if i == bias_dim % y.dim() else 1 for i in range(y.dim())]
            x = x + bias64.view(shaped)
            if not smooth_fits(y, epilogue, bias):  # then it is added before, in the type of the network
                x = x + ((y + bias.to(dtype).view(shaped)).double() - x).detach()
        smooth = (x.abs() - 3).abs() > 1e-5 if activation == "hardswish" else torch.ones_like(x, dtype=torch.bool)
        x = SMOOTH_ACTIVATIONS[activation](x)
        mask = sure(x, amax, quant_format) & smooth
        return fake_quantize(x, scale_from_amax(amax.double(), quant_format), quant_format), mask

    compare(maybe_compiled(fused, compiled), reference, [y] if bias is None else [y, bias], generator)


def check_norm(case, device, compiled=False):
    rows, width, dtypes, kept, has_bias, quant_format = case
    generator = torch.Generator().manual_seed(4)
    amax = 1.3
    made = [(2 * torch.randn((*rows, width), generator=generator) + 1).to(device, dtype) for dtype in dtypes]
    made += [torch.randn(width, generator=generator).to(device) for _ in range(2 if has_bias else 1)]
    module = FusedNormModule(
        1e-5, quantize(quant_format, amax).to(device), kept, False, "triton" if device == "cpu" else None
    )
    range_ = torch.tensor(amax, device=device)

    def split(tensors):
        terms, (weight, *bias) = tensors[: len(dtypes)], tensors[len(dtypes) :]
        return terms, weight, bias[0] if bias else None

    def fused(*tensors):
        (x, *added), weight, bias = split(tensors)
        result = module(x, weight, bias, *added)
        if not kept:
            return result
        y, total = result
        again, total = module(total, weight, bias, y)
        return again + total

    def rounded(x, weight, bias):
        y = F.layer_norm(x, (width,), weight, bias, 1e-5)
        return fake_quantize(y, scale_from_amax(range_.double(), quant_format), quant_format), sure(
            y, range_, quant_format
        )

    def reference(*leaves):
        terms, weight, bias = split(leaves)
        total = sum(terms)
        expected, mask = rounded(total, weight, bias)
        if kept:
            total = total + expected
            whole = mask.all(-1, keepdim=True)  # one that rounds otherwise changes all of its row's second norm
            expected, mask = rounded(total, weight, bias)
            expected, mask = expected + total, mask & whole
        return expected, mask

    compare(maybe_compiled(fused, compiled), reference, made, generator)


def maybe_compiled(run, compiled):
    return torch.compile(run, fullgraph=True) if compiled else run


def compare(run, reference, made, generator):
    # Result and gradients of a function against those in float64, where they are sure.
    _, found, wanted, mask = beside_float64(run, reference, made, generator)
    assert mask.double().mean() > 0.4
    for one, other in zip(found, wanted, strict=True):
        precision = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[one.dtype]
        precision = max([precision, *(5e-3 for t in made if t.dtype == torch.float16 and t.dim() > 1)])
        precision = max([precision, *(3e-2 for t in made if t.dtype == torch.bfloat16 and t.dim() > 1)])
        assert_close_in_norm(one, other, precision, (made[0].shape, made[0].dtype))
    assert found[1].stride() == made[0].stride()


def check_network():
    qmodel, x = quantized(vit())
    fused = fused_as_plain(qmodel, x, rtol=1e-3, atol=1e-3, kernels="triton")
    assert sum(isinstance(module, FusedNormModule) for module in fused.modules()) == 5


def main():
    layer_norm._PROGRAMS = 3  # so that each goes through several tiles
    triton_activation._FORWARD = triton_activation._BACKWARD = (256, 3)
    choices = itertools.product(SMOOTH_ACTIVATIONS, SHAPES, (torch.float32, torch.float16))
    for i, (activation, shape, dtype) in enumerate(choices):
        check_activation(activation, *shape, FORMATS[i % 2], dtype, "cpu")
    for case in NORMS:
        check_norm(case, "cpu")
    check_network()
