"""Runs the Triton kernels in Triton's interpreter against the torch operations: started by `test_fused`.

The interpreter cuts float32 off where it becomes bfloat16, and a GPU rounds it; so results in bfloat16 are asked for in
float32 here.
"""

import itertools
import math
import os

import torch

import compress
from compress.quantization import fused_ops, fused_triton
from compress.quantization.fused_ops import Epilogue
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
    result, bits = fused_triton.forward(y, bias, residual, amax, epilogue, out)
    expected, expected_bits = fused_ops.forward_torch(y, bias, residual, amax, epilogue, out)
    same(result, expected)
    same(bits, expected_bits)
    grad = torch.randn_like(y, dtype=out)
    passed, sums = fused_triton.backward(grad, bits, out, bias_dim, has_bias)
    expected, expected_sums = fused_ops.backward_torch(grad, bits, out, bias_dim, has_bias)
    same(passed, expected)
    torch.testing.assert_close(
        sums, expected_sums.to(sums.dtype), rtol=1e-4, atol=1e-2 if out == torch.float16 else 1e-4
    )


def check_weight(shape, axis, last):
    """A range for each output channel."""
    weight = torch.randn(shape)
    if last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    amax = 0.8 * weight.abs().amax([d for d in range(weight.dim()) if d != axis])
    epilogue = Epilogue(-127, 127, -math.inf, math.inf, axis, 1)
    results = [
        f(weight, None, None, amax, epilogue, torch.float16) for f in (fused_triton.forward, fused_ops.forward_torch)
    ]
    for one, other in zip(*results, strict=True):
        same(one, other)
    assert int(results[0][1].count_nonzero()) > 0


def check_network():
    """All kernels behind a network of two layouts, bias gradients included."""
    qmodel, x = quantized()
    qmodel.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-4, atol=1e-3)


def main():
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.manual_seed(0)
    bounds = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    choices = itertools.product(
        ("conv", "linear"), dtypes, bounds, ((False, True), (True, False)), ((-128, 127), (0, 255))
    )
    activations = [check_activation(*c[:3], *c[3], c[4]) for c in choices]
    shapes = (((6, 5, 3, 3), 0), ((5, 6, 3, 3), 1), ((10, 7), 0), ((10, 7), 1), ((9, 1, 3, 3), 0), ((4, 4, 1, 1), 0))
    weights = [check_weight(s, a, last) for s, a in shapes for last in (False, True) if len(s) == 4 or not last]
    check_network()
    print(f"{len(activations)} activations, {len(weights)} weights, 1 network")


if __name__ == "__main__":
    main()
