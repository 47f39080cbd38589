"""Grouped convolutions whose groups are merged: torch's own grouped convolution in float64 is the oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.qat_fusion.chain import groups_together, merged_groups, product


@pytest.mark.parametrize(
    ("groups", "width", "expected"),
    [
        (24, 24, 4),  # a multiple of 32 channels
        (9, 24, 9),  # all of them
        (3, 24, 3),
        (63, 24, 3),  # the widest up to 96
        (32, 4, 1),  # not timed
        (8, 64, 1),  # a multiple of 32 already
        (5, 72, 1),  # nothing fits
    ],
)
def test_how_many_groups_become_one(groups, width, expected):
    assert groups_together(groups, width) == expected


@pytest.mark.parametrize(("groups", "count"), [(6, 2), (6, 3), (6, 6), (6, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_merged_groups_are_the_same_convolution(groups, count, stride):
    torch.manual_seed(0)
    x = torch.randn(2, 6 * 5, 7, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6 * 4, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    one = F.conv2d(x, weight, None, stride, 1, 1, groups)
    other = F.conv2d(x, merged_groups(weight, groups, count), None, stride, 1, 1, groups // count)
    torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    grad = torch.randn_like(one)
    expected = torch.autograd.grad(one, (x, weight), grad)
    for found, wanted in zip(torch.autograd.grad(other, (x, weight), grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_layer_with_narrow_groups_computes_what_float64_does(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv2d(72, 72, 3, padding=1, groups=3)
    weight = layer.weight.detach().bfloat16()
    x = torch.randn(2, 72, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    groups = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: groups.append(args[6]) or convolve(*args))
    found = product(layer, x, weight, layer.bias.detach().bfloat16(), "triton")
    product(layer, x, weight, layer.bias.detach().bfloat16(), "torch")
    assert groups == [1, 3]
    expected = convolve(x.double(), weight.double(), layer.bias.detach().bfloat16().double(), 1, 1, 1, 3)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
