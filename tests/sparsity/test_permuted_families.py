"""Permuted networks compute the same as before: every family of torchvision's CNNs, and a transformer."""

import pytest
import torch
from torch import nn
from torchvision import models

from tests.sparsity.permuted import permuted


def vision(name, **kwargs):
    torch.manual_seed(0)
    return models.get_model(name, weights=None, **kwargs)


def with_small_classifier(make, features):
    """The network with a classifier of 64 instead of 4,096 channels, which is most of its time."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make()
        model.classifier = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def vgg():
    return models.VGG(models.vgg.make_layers([32, "M", 64, 64, "M", 64], batch_norm=False))


def resnet(block, layers, **kwargs):
    return models.ResNet(block, layers, num_classes=16, **kwargs)


def convnext():
    widths = ((32, 64), (64, 128), (128, None))
    return models.ConvNeXt([models.convnext.CNBlockConfig(c, out, 1) for c, out in widths], layer_scale=0.5)


FAMILIES = {
    "alexnet": (lambda: with_small_classifier(models.AlexNet, 256 * 36), 64),
    "vgg": (lambda: with_small_classifier(vgg, 64 * 49), 32),
    "resnet18": (lambda: resnet(models.resnet.BasicBlock, [2, 1, 1, 1]), 32),
    "resnet50": (lambda: resnet(models.resnet.Bottleneck, [2, 1, 1, 1]), 32),
    "resnext": (lambda: resnet(models.resnet.Bottleneck, [1, 1, 1, 1], groups=16, width_per_group=8), 32),
    "densenet": (lambda: models.DenseNet(32, (3, 3, 3), 64), 32),
    "googlenet": (lambda: models.googlenet(init_weights=False), 32),
    "inception_v3": (lambda: models.inception_v3(init_weights=False), 75),
    "squeezenet": (models.squeezenet1_1, 32),
    "mobilenet_v2": (models.mobilenet_v2, 32),
    "mobilenet_v3": (models.mobilenet_v3_small, 32),
    "mnasnet": (models.mnasnet0_5, 32),
    "shufflenet_v2": (models.shufflenet_v2_x0_5, 32),
    "efficientnet": (models.efficientnet_b0, 32),
    "regnet": (models.regnet_y_400mf, 32),
    "convnext": (convnext, 32),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_torchvision(family):
    make, size = FAMILIES[family]
    report = permuted(make(), torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(3)))
    assert report.groups > 0
    assert sum(row.after for row in report.rows) > sum(row.before for row in report.rows)
    if family not in {"alexnet", "vgg", "shufflenet_v2"}:  # flattened pictures, interleaved halves
        assert all(row.reason == "" for row in report.rows)


def test_transformer_blocks_are_permuted_inside_and_say_why_not_between():
    torch.manual_seed(0)
    model = models.VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=8)
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(1, 3, 16, 16)
    report = permuted(model, x)
    rows = {row.layer: row for row in report.rows}
    mlp = "encoder.layers.encoder_layer_0.mlp"
    assert rows[f"{mlp}.3"].reason == "" and rows[f"{mlp}.3"].searched == 64
    assert "encoder.pos_embedding of (1, 5, 32), which cannot be followed" in rows[f"{mlp}.0"].reason
