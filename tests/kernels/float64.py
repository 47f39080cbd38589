"""Kernels against torch in float64, where rounding to a grid does not depend on the last bits."""

import torch


def beside_float64(run, reference, made, generator):
    """(the result, it and its gradients, those of the reference, where they are sure); zeros stand elsewhere.

    Args:
        run: takes what is `made`.
        reference: takes the same in float64; (its result, which of it is sure): elsewhere no gradient comes in either.
        made: tensors.
        generator: of the gradient that comes in.
    """
    leaves = [tensor.double().requires_grad_() for tensor in made]
    expected, sure = reference(*leaves)
    inputs = [tensor.clone().requires_grad_() for tensor in made]
    result = run(*inputs)
    grad = (torch.randn(expected.shape, generator=generator).to(sure.device) * sure).to(result.dtype)
    wanted = (expected * sure, *torch.autograd.grad(expected, leaves, grad.double()))
    return result, (result * sure, *torch.autograd.grad(result, inputs, grad)), wanted, sure


def assert_close_in_norm(one, other, precision, what):
    """Assert that `other` is not zero, and that `one` is close to it."""
    assert other.abs().max() > 0.01
    difference = float(((one.double() - other).norm() / other.norm()).detach())
    assert difference < precision, (what, difference)
