"""torchvision's families of networks, each as small as its class allows, for pictures of 16 by 16 pixels."""

import torchvision.models as zoo
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams

FAMILIES = {
    "RegNetY": lambda: zoo.RegNet(BlockParams.from_init_params(2, 16, 8.0, 2.0, 8, se_ratio=0.25), num_classes=4),
    "EfficientNetV2": lambda: zoo.EfficientNet(
        [FusedMBConvConfig(2, 3, 1, 8, 8, 1), MBConvConfig(2, 3, 2, 8, 16, 1)],
        dropout=0.0,
        num_classes=4,
        stochastic_depth_prob=0.0,
        last_channel=16,
    ),
    "MobileNetV3": lambda: zoo.MobileNetV3(
        [InvertedResidualConfig(16, 3, 32, 16, True, "HS", 1, 1, 1.0)], last_channel=16, num_classes=4, dropout=0.0
    ),
    "ConvNeXt": lambda: zoo.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.0, 1.0, num_classes=4),
    "Swin": lambda: zoo.SwinTransformer([2, 2], 8, [2], [2], [2, 2], stochastic_depth_prob=0.0, num_classes=4),
    "ViT": lambda: zoo.VisionTransformer(16, 4, 1, 2, 16, 32, num_classes=4),
    "DenseNet": lambda: zoo.DenseNet(8, (2, 2), 16, bn_size=2, num_classes=4),
}
