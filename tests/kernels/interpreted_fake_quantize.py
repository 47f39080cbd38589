"""Runs the Triton kernels in Triton's interpreter against the torch operations: started by `test_fused`.

The interpreter cuts float32 off where it becomes bfloat16, and a GPU rounds it; so results in bfloat16 are asked for in
float32 here.
"""

import itertools
import math

import torch
from torch import nn

import compress
from compress.kernels.epilogue import Epilogue, Window, backward_torch, forward_torch, max_pool
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.memory_format import pack
from compress.kernels.triton import fake_quantize as triton_fake_quantize
from compress.kernels.triton import pool as triton_pool
from compress.kernels.triton import weights as triton_weights
from compress.qat_fusion.chain import grid_of
from compress.quantization.numerics import QuantFormat
from tests.qat_fusion.common import fused_as_plain, quantized


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert one.stride() == other.stride()


def check_activation(layout, dtype, bounds, has_bias, has_residual, integers):
    # One chain forward and backward; NaN and infinities included.
    y = 4 * torch.randn((2, 16, 5, 3) if layout == "conv" else (3, 7, 24))
    y.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    y = y.to(dtype).contiguous(memory_format=torch.channels_last if layout == "conv" else torch.contiguous_format)
    bias_dim = 1 if layout == "conv" else -1
    bias = torch.randn(y.shape[bias_dim]) if has_bias else None
    residual = torch.randn_like(y) if has_residual else None
    epilogue = Epilogue(*integers, *bounds, None, bias_dim)
    amax, out = torch.tensor(5.3), torch.float32 if dtype == torch.bfloat16 else dtype
    plan = triton_fake_quantize.plan_of(y, bias, residual, amax, epilogue, out)
    result, bits = plan.forward(y, bias, residual, amax)
    expected, mask = forward_torch(y, bias, residual, amax, epilogue, out)
    same(result, expected)
    same(bits, pack(mask))
    grad = torch.randn_like(y, dtype=out)
    plan.y_dtype = out
    passed, sums = plan.backward(grad, bits, has_bias)
    expected, expected_sums = backward_torch(grad, bits, out, bias_dim, has_bias)
    same(passed, expected)
    assert (sums is not None) == has_bias
    if has_bias:
        torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-2 if out == torch.float16 else 1e-4)


def check_pool(window, size, dtype, bounds, has_bias, integers):
    # A pooled chain against the chain and torch's pool, NaN included: few steps, so that windows hold equals.
    y = 4 * torch.randn(2, 24, *size)
    y.view(-1)[5] = math.nan
    y = y.to(dtype).contiguous(memory_format=torch.channels_last)
    bias = torch.randn(24) if has_bias else None
    epilogue, amax = Epilogue(*integers, *bounds), torch.tensor(5.3)
    grad, found = None, []
    for run in (triton_pool.pooled_quantize, composed):
        leaves = [t.detach().clone().requires_grad_() for t in (y, *([bias] if has_bias else []))]
        result = run(leaves[0], amax, epilogue, window, leaves[1] if has_bias else None, dtype)
        grad = torch.randn_like(result) if grad is None else grad
        found.append((result.detach(), *torch.autograd.grad(result, leaves, grad)))
    same(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
        assert one.stride() == other.stride()


def composed(y, amax, epilogue, window, bias, dtype):
    return max_pool(fused_quantize(y, amax, epilogue, bias=bias, kernels="torch"), window)


def check_weights(out, even):
    # A group of weights of several formats and layouts, one of them frozen and one unused, in one launch each way.
    shapes = ((6, 5, 3, 3), (10, 7), (9, 1, 3, 3), (4, 4, 1, 1), (70, 64), (3, 2, 5), (5, 5))
    weights, found = [], []
    for i, shape in enumerate(shapes):
        shape = (8 * shape[0], *shape[1:]) if even else shape
        weight = torch.randn(shape)
        weight = weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and i % 4 == 0 else weight
        weights.append(weight.requires_grad_(i != 3))
        axis = None if i == 1 else 0
        quantizer = compress.Quantizer(
            QuantFormat(num_bits=4 if i == 2 else 8, axis=axis, narrow=True), channels=shape[0]
        )
        quantizer.set_amax(0.8 * (weight.abs().amax() if axis is None else weight.flatten(1).abs().amax(1)).float())
        found.append(quantizer)
    owner = nn.Module()
    for _ in range(2):  # the second time everything is known
        results = triton_weights.quantize_weights(owner, weights, [grid_of(q) for q in found], out)
        expected = [q(w).to(out) for w, q in zip(weights, found, strict=True)]
        factors = [torch.randn_like(weight, dtype=out) for weight in weights]
        grads = []
        for outputs in (results, expected):
            for weight in weights:
                weight.grad = None
            sum((f * o).sum() for i, (f, o) in enumerate(zip(factors, outputs, strict=True)) if i != 4).backward()
            grads.append([weight.grad for weight in weights])
        for one, other, weight in zip(results, expected, weights, strict=True):
            same(one.detach(), other.detach())
            assert one.requires_grad == weight.requires_grad
        for one, other, weight in zip(*grads, weights, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0)
                assert one.stride() == weight.stride() and one.dtype == torch.float32
        stored = {grad.untyped_storage().data_ptr() for grad in grads[0] if grad is not None}
        assert len(stored) == 1  # parameters hold parts of one buffer, not copies
        grads[0][0].add_(1)


def check_network():
    qmodel, x = quantized()
    qmodel.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    fused_as_plain(qmodel, x, rtol=1e-4, atol=1e-3, kernels="triton")


def main():
    torch.manual_seed(0)
    bounds = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    choices = itertools.product(
        ("conv", "linear"), dtypes, bounds, ((False, True), (True, False)), ((-128, 127), (0, 255))
    )
    for layout, dtype, bound, added, integers in choices:
        check_activation(layout, dtype, bound, *added, integers)
    check_weights(torch.float32, True)
    check_weights(torch.float16, False)
    windows = (
        (Window((3, 3), (2, 2), (1, 1)), (7, 6)),
        (Window((2, 2), (2, 2)), (6, 5)),
        (Window((3, 2), (1, 3), (1, 0), True), (4, 9)),
        (Window((3, 3), (2, 2), (0, 0), True), (6, 7)),
    )
    kinds = ((torch.float32, bounds[1], True, (-4, 3)), (torch.float16, bounds[2], False, (0, 255)))
    for window, kind in itertools.product(windows, kinds):
        check_pool(*window, *kind)
    check_network()
