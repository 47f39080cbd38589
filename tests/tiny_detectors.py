"""torchvision's one-stage detectors on a backbone of three convolutions, for tests of a second."""

from collections import OrderedDict

from torch import nn
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

SIZE = (32, 48)


class Backbone(nn.Module):
    out_channels = 8

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*layer(3, 8), *layer(8, 8))
        self.last = nn.Sequential(*layer(8, 8))

    def forward(self, x):
        x = self.stem(x)
        return OrderedDict([("0", x), ("1", self.last(x))])


def layer(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


# The tests' images have their size and normalization already.
UNCHANGED = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}


def retinanet(num_classes=3):
    anchors = AnchorGenerator(((8,), (16,)), ((0.5, 1.0),) * 2)
    model = RetinaNet(Backbone(), num_classes, anchor_generator=anchors, min_size=min(SIZE), max_size=64, **UNCHANGED)
    model.transform.size_divisible = 1
    return model


def fcos(num_classes=3):
    anchors = AnchorGenerator(((4,), (8,)), ((1.0,),) * 2)
    model = FCOS(_Wide(), num_classes, anchor_generator=anchors, min_size=min(SIZE), max_size=64, **UNCHANGED)
    model.transform.size_divisible = 1
    return model


class _Wide(nn.Module):
    # The backbone in 32 channels, which the head of FCOS needs for its 32 groups.
    out_channels = 32

    def __init__(self):
        super().__init__()
        self.body = Backbone()
        self.wide = nn.ModuleList(nn.Conv2d(8, 32, 1) for _ in range(2))

    def forward(self, x):
        return OrderedDict((k, conv(v)) for (k, v), conv in zip(self.body(x).items(), self.wide, strict=True))


def ssd(num_classes=3):
    boxes = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.4, 0.6])
    backbone = Backbone()
    backbone.out_channels = [8, 8]
    return SSD(backbone, boxes, SIZE[::-1], num_classes + 1, **UNCHANGED)  # (width, height)


FAMILIES = {"retinanet": retinanet, "fcos": fcos, "ssd": ssd}
