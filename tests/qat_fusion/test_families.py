"""Training through the fused graph, eager or compiled, is training on the plain one, for every measured family."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as zoo

import compress
from tests.families import FAMILIES

ALL = {**FAMILIES, "MobileNetV2": lambda: zoo.MobileNetV2(4, 0.25, [[1, 8, 1, 1], [4, 8, 2, 2]], dropout=0.0)}
"""`test_fuse` trains a residual network with BatchNorm and ReLU in the same way, for 200 steps."""

COMPILED = ("ViT", "Swin", "MobileNetV3")
"""Compiled too: other tests compile convolutions, BatchNorm and ConvNeXt's kernels."""


@pytest.mark.parametrize("family", ALL)
def test_losses_ranges_and_weights_are_those_of_the_plain_path(family):
    """Scales of exported activations are the ranges, those of weights follow from the weights.

    Trained in float64, where no value is so near to a tie that a sum in another order rounds to the other side.
    """
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 4
    x += y[:, None, None, None] * torch.linspace(-0.5, 0.5, 16)
    model = ALL[family]()
    for parameter in model.parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.02)  # a head of zeros has no range
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # its statistics become those of one batch
    with torch.no_grad():
        model.train()(x)
    start = compress.quantize(model.eval(), x[:2], [x]).double()
    x = x.double()
    runs = []
    for fused in (False, True):
        qmodel = copy.deepcopy(start).train()
        run, losses = compress.fuse_for_training(qmodel) if fused else qmodel, []
        optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01, eps=1e-3)
        for _ in range(8):
            loss = F.cross_entropy(run(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, dict(qmodel.named_parameters()), dict(qmodel.named_buffers())))
    (expected, weights, ranges), (losses, *ours) = runs
    learned = expected[0] - expected[-1]
    assert learned > 5e-3
    assert losses == pytest.approx(expected, rel=0, abs=1e-6 * learned)
    for name, value in weights.items():
        torch.testing.assert_close(ours[0][name], value, rtol=0, atol=1e-6)
    for name, value in ranges.items():
        assert torch.equal(ours[1][name], value), name
    if family not in COMPILED:
        return
    torch.compiler.reset()
    F.cross_entropy(run(x), y).backward()
    eager = {name: p.grad.clone() for name, p in qmodel.named_parameters()}
    optimizer.zero_grad()
    F.cross_entropy(torch.compile(run, backend="aot_eager", fullgraph=True)(x), y).backward()
    for name, parameter in qmodel.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], msg=f"{name}, in one compiled graph")
