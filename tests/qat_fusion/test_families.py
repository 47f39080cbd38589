"""Training through the fused graph is training on the plain one, for a small network of every measured family."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams

import compress

FAMILIES = {
    "RegNetY": lambda: zoo.RegNet(BlockParams.from_init_params(2, 16, 8.0, 2.0, 8, se_ratio=0.25), num_classes=4),
    "EfficientNetV2": lambda: zoo.EfficientNet(
        [FusedMBConvConfig(2, 3, 1, 8, 8, 1), MBConvConfig(2, 3, 2, 8, 16, 1)], dropout=0.0, num_classes=4,
        stochastic_depth_prob=0.0, last_channel=16,
    ),
    "MobileNetV3": lambda: zoo.MobileNetV3(
        [InvertedResidualConfig(16, 3, 32, 16, True, "HS", 1, 1, 1.0)], last_channel=16, num_classes=4, dropout=0.0
    ),
    "ConvNeXt": lambda: zoo.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.0, 1.0, num_classes=4),
    "Swin": lambda: zoo.SwinTransformer([2, 2], 8, [2], [2], [2, 2], stochastic_depth_prob=0.0, num_classes=4),
    "ViT": lambda: zoo.VisionTransformer(16, 4, 1, 2, 16, 32, num_classes=4),
    "DenseNet": lambda: zoo.DenseNet(8, (2, 2), 16, bn_size=2, num_classes=4),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_ranges_and_weights_are_those_of_the_plain_path(family):
    """Scales of exported activations are the ranges, those of weights follow from the weights."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 4
    x += y[:, None, None, None] * torch.linspace(-0.5, 0.5, 16)
    model = FAMILIES[family]()
    for parameter in model.parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.02)  # a head of zeros has no range
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # its statistics become those of one batch
    with torch.no_grad():
        model.train()(x)
    start = compress.quantize(model.eval(), x[:2], [x])
    runs = []
    for fused in (False, True):
        qmodel = copy.deepcopy(start).train()
        run, losses = compress.fuse_for_training(qmodel) if fused else qmodel, []
        optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01, eps=1e-3)
        for _ in range(12):
            loss = F.cross_entropy(run(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, dict(qmodel.named_parameters()), dict(qmodel.named_buffers())))
    (expected, weights, ranges), (losses, *ours) = runs
    learned = expected[0] - expected[-1]
    assert learned > 5e-3
    assert losses == pytest.approx(expected, rel=0, abs=0.05 * learned)
    for name, value in weights.items():
        torch.testing.assert_close(ours[0][name], value, rtol=0, atol=2e-3)
    for name, value in ranges.items():
        assert torch.equal(ours[1][name], value), name
