"""Networks for CIFAR-10 (32 x 32 pixels, 10 classes) that the studies of accuracy train and quantize.

ResNets as in He et al. (arXiv 1512.03385, section 4.2) with convolutions in the shortcuts, MobileNetV2 without its
first strides, VGG-16 with BatchNorm at half its width, a ViT and a ConvNeXt of two million parameters.
"""

from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of 6 n + 2 layers, whose stages have once, twice and four times `width` channels."""

    def __init__(self, n: int, width: int = 16, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        blocks = [[Block(i, o, s), *(Block(o, o, 1) for _ in range(n - 1))] for i, o, s in sizes]
        self.layers = nn.Sequential(*(nn.Sequential(*stage) for stage in blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(self.pool(x).flatten(1))


def mobilenet_v2() -> nn.Module:
    settings = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2]]
    model = torchvision.models.MobileNetV2(10, width_mult=0.5, inverted_residual_setting=settings, dropout=0.0)
    model.features[0][0].stride = (1, 1)
    return model


def vgg16_bn() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in [(32, 2), (64, 2), (128, 3), (256, 3), (256, 3)]:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def vit_tiny() -> nn.Module:
    sizes = {"patch_size": 4, "num_layers": 6, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 384}
    model = torchvision.models.VisionTransformer(image_size=32, num_classes=10, **sizes)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def convnext() -> nn.Module:
    setting = torchvision.models.convnext.CNBlockConfig
    stages = [setting(48, 96, 2), setting(96, 192, 2), setting(192, None, 4)]
    model = torchvision.models.ConvNeXt(stages, num_classes=10)
    model.features[0][0] = nn.Conv2d(3, 48, 2, 2)
    return model


resnet8 = partial(ResNet, 1)
resnet20 = partial(ResNet, 3)
resnet56 = partial(ResNet, 9)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "mobilenet_v2": mobilenet_v2,
    "vgg16_bn": vgg16_bn,
    "vit_tiny": vit_tiny,
    "convnext": convnext,
}
