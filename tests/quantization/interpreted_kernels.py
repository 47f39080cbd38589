"""Runs the Triton kernels in Triton's interpreter against the torch operations: started by `test_fused`.

The interpreter cuts float32 off where it becomes bfloat16, and a GPU rounds it; so results in bfloat16 are asked for in
float32 here.
"""

import itertools
import math
import os

import torch
from torch import nn

import compress
from compress.quantization import fused_ops, fused_triton, fused_weights_triton, histogram, histogram_triton
from compress.quantization.amax import row_amax
from compress.quantization.fused_ops import Epilogue
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import Quantizer
from tests.quantization.test_fused import assert_same, gradients, quantized


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert one.stride() == other.stride()


def check_activation(layout, dtype, bounds, has_bias, has_residual, integers):
    """One chain forward and backward; NaN and infinities included."""
    y = 4 * torch.randn((2, 16, 5, 3) if layout == "conv" else (3, 7, 24))
    y.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    y = y.to(dtype).contiguous(memory_format=torch.channels_last if layout == "conv" else torch.contiguous_format)
    bias_dim = 1 if layout == "conv" else -1
    bias = torch.randn(y.shape[bias_dim]) if has_bias else None
    residual = torch.randn_like(y) if has_residual else None
    epilogue = Epilogue(*integers, *bounds, None, bias_dim)
    amax, out = torch.tensor(5.3), torch.float32 if dtype == torch.bfloat16 else dtype
    plan = fused_triton.plan_of(y, bias, residual, amax, epilogue, out)
    result, bits = plan.forward(y, bias, residual, amax)
    expected, expected_bits = fused_ops.forward_torch(y, bias, residual, amax, epilogue, out)
    same(result, expected)
    same(bits, expected_bits)
    grad = torch.randn_like(y, dtype=out)
    plan.y_dtype = out
    passed, sums = plan.backward(grad, bits, has_bias)
    expected, expected_sums = fused_ops.backward_torch(grad, bits, out, bias_dim, has_bias)
    same(passed, expected)
    assert (sums is not None) == has_bias
    if has_bias:
        torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-2 if out == torch.float16 else 1e-4)


def check_weights(dtype, out, even):
    """A group of weights of several formats and layouts, one of them frozen and one unused, in one launch each way."""
    shapes = ((6, 5, 3, 3), (10, 7), (9, 1, 3, 3), (4, 4, 1, 1), (70, 64), (3, 2, 5), (5, 5))
    weights, found = [], []
    for i, shape in enumerate(shapes):
        shape = (8 * shape[0], *shape[1:]) if even else shape
        weight = torch.randn(shape).to(dtype)
        weight = weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and i % 4 == 0 else weight
        weights.append(weight.requires_grad_(i != 3))
        axis = None if i == 1 else 0
        quantizer = Quantizer(QuantFormat(num_bits=4 if i == 2 else 8, axis=axis, narrow=True), channels=shape[0])
        quantizer.set_amax(0.8 * (weight.abs().amax() if axis is None else weight.flatten(1).abs().amax(1)).float())
        found.append(quantizer)
    owner = nn.Module()
    for _ in range(2):  # the second time everything is known
        results = fused_weights_triton.quantize_weights(owner, weights, found, out)
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
                assert one.stride() == weight.stride() and one.dtype == dtype
        stored = {grad.untyped_storage().data_ptr() for grad in grads[0] if grad is not None}
        assert len(stored) == 1  # parameters hold parts of one buffer, not copies
        grads[0][0].add_(1)


def check_network():
    """All kernels behind a network of two layouts, bias gradients included."""
    qmodel, x = quantized()
    qmodel.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-3)


def check_histograms():
    """Bin for bin those of the CPU: widths set late, values at upper ends, growth within and beyond the bins, NaN."""
    histogram.BINS, bins = 64, 300
    growing = [torch.zeros(9), torch.randn(3000).relu(), 2 * torch.randn(700), 40 * torch.randn(900), torch.randn(50)]
    sequences = [
        growing,
        [x.half() for x in growing[1:]],
        [torch.tensor([64.0, 63.0, 1.0]), torch.tensor([64.0, 128.0]), torch.tensor([-300.0]), torch.tensor([301.0])],
    ]
    for batches in sequences:
        cpu, gpu = (histogram.Histogram.empty(1, bins, torch.device("cpu")) for _ in range(2))
        watch = histogram_triton.Watch(gpu.amax, gpu.width, gpu.counts, 64)
        for x in batches:
            cpu.add(x[None])
            watch.collect(x[None])
            for one, other in ((cpu.counts, gpu.counts), (cpu.width, gpu.width), (cpu.amax, gpu.amax)):
                assert torch.equal(one, other)
        assert int(gpu.counts.sum()) == sum(x.numel() for x in batches)
    for x in (torch.randn(5000), torch.tensor([math.nan, 3.0]), torch.tensor([-math.inf, 1.0])):
        amax = torch.zeros(1)
        histogram_triton.collect_amax(x[None], amax)
        same(amax, row_amax(x[None]))
    return len(sequences)


def main():
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.manual_seed(0)
    bounds = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    choices = itertools.product(
        ("conv", "linear"), dtypes, bounds, ((False, True), (True, False)), ((-128, 127), (0, 255))
    )
    activations = [check_activation(*c[:3], *c[3], c[4]) for c in choices]
    weights = [check_weights(torch.float32, out, even) for out, even in ((torch.float32, True), (torch.float16, False))]
    check_network()
    assert check_histograms() == 3
    print(f"{len(activations)} activations, {len(weights)} groups of weights, 1 network, 3 histograms")


if __name__ == "__main__":
    main()
