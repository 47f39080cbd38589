"""Kernels against torch in float64, where rounding to a grid does not depend on the last bits."""

import torch
import torch.nn.functional as F

from compress.qat_fusion.chain import product


def beside_float64(run, reference, made, generator):
    # (the result, it and its gradients, those of the reference, where they are sure); zeros stand elsewhere.
    #
    # run: takes what is `made`.
    # reference: takes the same in float64; (its result, which of it is sure): elsewhere no gradient comes in either.
    # made: tensors.
    # generator: of the gradient that comes in.
    leaves = [tensor.double().requires_grad_() for tensor in made]
    expected, sure = reference(*leaves)
    inputs = [tensor.clone().requires_grad_() for tensor in made]
    result = run(*inputs)
    grad = (torch.randn(expected.shape, generator=generator).to(sure.device) * sure).to(result.dtype)
    wanted = (expected * sure, *torch.autograd.grad(expected, leaves, grad.double()))
    return result, (result * sure, *torch.autograd.grad(result, inputs, grad)), wanted, sure


def assert_close_in_norm(one, other, precision, what):
    # Assert that `other` is not zero, and that `one` is close to it.
    assert other.abs().max() > 0.01
    difference = float(((one.double() - other).norm() / other.norm()).detach())
    assert difference < precision, (what, difference)


# Depthwise convolutions of training against torch in float64.

CASES = (
    # images, channels, height, width, taps, with a bias
    (3, 5, 3, 9, (7, 9), True),
)
GPU_CASES = (
    *CASES,
    (1, 33, 3, 3, (9, 7), False),
    (8, 96, 56, 56, (7, 7), True),
    (8, 192, 28, 28, (7, 7), False),
    (16, 768, 7, 7, (7, 7), True),
)


def check_depthwise(case, dtype, device, compiled=False):
    # Result and gradients of one convolution, as a layer of a fused network computes it.
    images, channels, height, width, taps, has_bias = case
    generator = torch.Generator().manual_seed(5)
    padding = tuple(count // 2 for count in taps)
    layer = torch.nn.Conv2d(channels, channels, taps, padding=padding, groups=channels)
    made = [torch.randn(images, channels, height, width, generator=generator)]
    made[0] = made[0].contiguous(memory_format=torch.channels_last)
    made += [torch.randn(channels, 1, *taps, generator=generator) / 7]
    made += [torch.randn(channels, generator=generator)] if has_bias else []
    made = [tensor.to(device, dtype) for tensor in made]

    def run(x, weight, bias=None):
        return product(layer, x, weight, bias, "triton")

    def reference(x, weight, bias=None):
        result = F.conv2d(x, weight, bias, padding=padding, groups=channels)
        return result, torch.ones_like(result, dtype=torch.bool)

    call = torch.compile(run, fullgraph=True) if compiled else run
    result, found, wanted, _ = beside_float64(call, reference, made, generator)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert compiled or type(result.grad_fn).__name__ == "_DepthwiseBackward"
    precision = 2e-3 if dtype == torch.float16 else 1.6e-2
    for one, other in zip(found, wanted, strict=True):
        assert_close_in_norm(one, other, precision, (case, dtype))
