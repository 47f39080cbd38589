"""Batch norm, activation and quantizer as one against torch in float64, in Triton's interpreter when started."""

import itertools
import math

import torch
import torch.nn.functional as F

from compress.kernels.epilogue import Epilogue
from compress.kernels.triton import batch_norm
from compress.kernels.triton.batch_norm import Running, batch_norm_again, batch_norm_quantize, fits
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from tests.kernels.interpreted_rows import compare, sure

SHAPES = ((3, 8, 5, 7), (2, 40, 3, 3), (4, 24, 6, 2))
GPU_SHAPES = ((16, 96, 28, 28), (8, 1024, 7, 7), (4, 168, 56, 56), (2, 64, 112, 112))
FORMATS = (QuantFormat(num_bits=8), QuantFormat(num_bits=4, signed=False))
BOUNDS = ((0.0, math.inf), (0.0, 6.0), (-math.inf, math.inf))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(shape, dtype, bounds, batch, quant_format, device):
    # Result, gradients and running statistics; then the result once more, with the same bits.
    #
    # A value in float32 within the kernel's precision of a bound of the activation is not compared either.
    generator = torch.Generator().manual_seed(3)
    scales, shifts = torch.rand(2, shape[1], 1, 1, generator=generator)
    x = (torch.randn(shape, generator=generator) * (scales + 0.1) + 5 * shifts).to(device, dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (2 * torch.rand(2, shape[1], generator=generator) + 0.3).to(device)
    mean, var = (torch.rand(2, shape[1], generator=generator) + 0.5).to(device)
    amax = torch.tensor(3.0, device=device)
    epilogue = Epilogue(quant_format.low, quant_format.high, *bounds)
    momentum, runs = (0.1 if batch else None), []
    assert fits(x)

    def fused(x, weight, bias):
        running = Running(mean.clone(), var.clone(), momentum)
        found, *statistics = batch_norm_quantize(x, weight, bias, amax, running, 1e-3, epilogue)
        again = batch_norm_again(x, *statistics, weight, bias, amax, epilogue=epilogue)
        assert torch.equal(again, found) and again.stride() == x.stride()
        runs.append(running)
        return found

    def reference(x, weight, bias):
        followed = mean.double(), var.double()
        y = F.batch_norm(x, *followed, weight, bias, batch, momentum or 0.0, 1e-3)
        runs.append(followed)
        apart = torch.ones_like(y, dtype=torch.bool)
        for bound in filter(math.isfinite, bounds):
            apart &= (y - bound).abs() > 1e-4
        y = y.clamp(*bounds)
        apart &= sure(y, amax, quant_format) | (y == 0)
        return fake_quantize(y, scale_from_amax(amax.double(), quant_format), quant_format), apart

    compare(fused, reference, [x, weight, bias], generator)
    wanted, found = runs[0], runs[1][:2]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def check_a_mean_far_from_zero(device):
    # A mean of a thousand deviations costs no precision, and a channel without deviation is zero.
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 8, 6, 6, generator=generator).to(device) * 0.01 + 10.0
    x[:, 3] = 7.0
    x = x.contiguous(memory_format=torch.channels_last)
    ones, zeros = torch.ones(8, device=device), torch.zeros(8, device=device)
    running = Running(zeros.clone(), ones.clone(), 1.0)
    amax = torch.tensor(4.0, device=device)
    found, mean, _ = batch_norm_quantize(x, ones, zeros, amax, running, 1e-5, Epilogue(-128, 127))
    torch.testing.assert_close(running.mean.double(), x.double().mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(running.var.double(), x.double().var((0, 2, 3)), rtol=1e-3, atol=1e-12)
    expected = F.batch_norm(x.double(), None, None, training=True, eps=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.6 * 4 / 127)
    assert not found[:, 3].any() and torch.equal(mean[3], x[0, 3, 0, 0])


def main():
    batch_norm._FORWARD = batch_norm._BACKWARD = (256, 3)  # so that each program goes through several tiles
    batch_norm._FINISHED = (2, 16)
    for i, (shape, dtype, bounds) in enumerate(itertools.product(SHAPES, DTYPES, BOUNDS)):
        check(shape, dtype, bounds, i % 3 != 2, FORMATS[i % 2], "cpu")
    check_a_mean_far_from_zero("cpu")
