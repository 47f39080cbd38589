"""Runs the Triton kernels of learned ranges in Triton's interpreter against the torch operations.

The interpreter cuts float32 off where it becomes bfloat16; so only float32 and float16 are compared here.
"""

import itertools
import math

import torch

import compress
from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import learned_quantize
from tests.qat_fusion.common import fused_as_plain, quantized

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3)}


def check(shape, dtype, bounds, integers, axis, has_bias, has_residual, last, device="cpu"):
    y = (3 * torch.randn(shape, device=device)).to(dtype)
    y = y.contiguous(memory_format=torch.channels_last) if last else y
    bias = torch.randn(shape[1], device=device) if has_bias else None
    residual = torch.randn(shape, device=device).to(dtype) if has_residual else None
    amax = torch.rand(() if axis is None else shape[axis], device=device) + 1.5
    if axis is not None:
        amax[0] = -0.5  # training has overshot: the gradient must bring it back
    grad = torch.randn(shape, device=device).to(dtype)
    found = []
    for kernels in ("triton", "torch"):
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (y, amax, bias, residual)]
        result = learned_quantize(
            leaves[0],
            leaves[1],
            Epilogue(*integers, *bounds, axis, 1),
            0.37,
            bias=leaves[2],
            residual=leaves[3],
            kernels=kernels,
        )
        assert result.dtype == dtype and result.stride() == y.stride()
        present = [leaf for leaf in leaves if leaf is not None]
        found.append((result.detach(), *torch.autograd.grad(result, present, grad)))
    rtol, atol = TOLERANCES[dtype]
    exact = 0 if device == "cpu" else rtol  # a GPU's torch divides a range by a number by multiplying
    torch.testing.assert_close(found[0][0], found[1][0], rtol=exact, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    torch.testing.assert_close(found[0][2:], found[1][2:], rtol=rtol, atol=atol * math.sqrt(y.numel()))


def check_network(batchnorm):
    qmodel, x = quantized(batchnorm=batchnorm)
    compress.learn_scales(qmodel)
    fused_as_plain(qmodel, x, rtol=1e-4, atol=2e-3, kernels="triton")


def cases():
    for dtype, integers, (bias, residual) in itertools.product(
        TOLERANCES, ((-128, 127), (0, 15)), ((False, False), (True, True))
    ):
        yield (2, 5, 3, 7), dtype, (0.0, math.inf), integers, None, bias, residual, bias
    yield (3, 6), torch.float32, (-math.inf, math.inf), (-7, 7), 0, False, False, False
    yield (9, 1, 3, 3), torch.float32, (-math.inf, math.inf), (-127, 127), 0, False, False, False
    yield (4, 3, 3, 300), torch.float16, (0.0, 6.0), (-8, 7), None, True, False, True
    yield (4, 8, 3, 3), torch.float32, (-math.inf, math.inf), (-2, 1), 0, False, False, True


def main():
    torch.manual_seed(0)
    for case in cases():
        check(*case)
    for batchnorm in ("fold", "keep"):
        check_network(batchnorm)
