"""Networks whose engines are asked: torchvision's and timm's with random weights on small images, and small blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

Made = tuple[nn.Module, Tensor]


class Block(nn.Module):
    """Layers by name, and what `forward` does with them."""

    def __init__(self, compute: Callable[[nn.ModuleDict, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.compute = nn.ModuleDict(layers), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layers, x)


def _conv(inputs: int, outputs: int, kernel: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **more)


def _norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    made.running_mean, made.running_var = torch.rand(channels), torch.rand(channels) + 0.5
    nn.init.uniform_(made.weight, -0.5, 1.5)  # a negative factor turns the signs of a channel's integers
    return made


def _attend(m: nn.ModuleDict, x: Tensor) -> Tensor:
    q, k, v = (m[name](x).reshape(len(x), -1, 2, 16).transpose(1, 2) for name in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, 32)
    out: Tensor = x + m["o"](mixed)
    return out


def _gated(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x).relu()
    out: Tensor = m["b"](y * m["e"](m["s"](y.mean((2, 3), keepdim=True)).relu()).sigmoid())
    return out


def _residual(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x).relu()
    out: Tensor = m["c"]((m["b"](y) + y).relu())
    return out


def _levels(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x)
    fine, coarse = (m[f"n{i}"](m["s"](F.max_pool2d(y, 1 + i))).relu() for i in range(2))
    out: Tensor = m["b"](fine + F.interpolate(coarse, scale_factor=2.0))
    return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), _conv(16, 16), nn.ReLU(), _conv(16, 8)),
    "residual": lambda: Block(_residual, a=_conv(3, 16), b=_conv(16, 16), c=_conv(16, 8)),
    "depthwise": lambda: nn.Sequential(
        _conv(3, 16), nn.Hardswish(), _conv(16, 16, 5, groups=16), nn.Hardswish(), _conv(16, 8, 1)
    ),
    "squeeze and excite": lambda: Block(_gated, a=_conv(3, 16), s=_conv(16, 8, 1), e=_conv(8, 16, 1), b=_conv(16, 8)),
    "concat": lambda: Block(
        lambda m, x: m["c"](torch.cat((m["a"](x).relu(), m["b"](x).relu()), 1)),
        a=_conv(3, 8),
        b=_conv(3, 8, 1),
        c=_conv(16, 8),
    ),
    "up": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(), _conv(8, 8)),
    "resize": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.Upsample(scale_factor=2), _conv(16, 8)),
    "padded": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.ZeroPad2d(1), nn.Conv2d(16, 8, 3)),
    "dilated": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=2, dilation=2)),
    "grouped": lambda: nn.Sequential(_conv(3, 16), nn.SiLU(), _conv(16, 16, groups=4), nn.SiLU(), _conv(16, 8, 1)),
    "pooled": lambda: nn.Sequential(
        _conv(3, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        _conv(16, 16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 8),
    ),
    "shared": lambda: Block(lambda m, x: m["b"](m["b"](m["a"](x)).relu()), a=_conv(3, 16), b=_conv(16, 16)),
    "shared by levels": lambda: Block(
        _levels, a=_conv(3, 16), s=_conv(16, 16), n0=_norm(16), n1=_norm(16), b=_conv(16, 8)
    ),
    "frozen norm": lambda: nn.Sequential(_conv(3, 16), FrozenBatchNorm2d(16), nn.ReLU(), _conv(16, 8)),
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "mlp without bias": lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False)),
    "attention": lambda: Block(_attend, **{name: nn.Linear(32, 32) for name in "qkvo"}),
    "multi-head": lambda: Block(lambda m, x: m["a"](x, x, x)[0], a=nn.MultiheadAttention(32, 2, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True),
    "normed": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)),
}
ROWS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 3)),
}
TORCHVISION = (
    *("alexnet", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "squeezenet1_1", "mobilenet_v2"),
    *("mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_b0", "googlenet"),
    *("regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "swin_t"),
)
TIMM = (
    *("resnet26d", "ecaresnet26t", "seresnet18", "repvgg_a0", "ghostnet_050", "mobileone_s0", "tinynet_e", "lcnet_035"),
    *(
        "hardcorenas_a",
        "mobilenetv4_conv_small_035",
        "fbnetc_100",
        "dla34",
        "vovnet39a",
        "cspresnet50",
        "efficientvit_b0",
    ),
    *("hrnet_w18_small", "poolformer_s12", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mobilevit_xxs"),
    *("mobilevitv2_050", "edgenext_xx_small", "fastvit_t8"),
)


def _torchvision(name: str) -> Made:
    more = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    return zoo.get_model(name, weights=None, num_classes=10, **more), _images(name)


def _timm(name: str) -> Made:
    import timm  # lazy: an optional package

    more: dict[str, Any] = {"img_size": 64} if "_patch16_" in name else {}
    return timm.create_model(name, pretrained=False, num_classes=10, **more), _images(name)


def _images(name: str) -> Tensor:
    side = 96 if name in {"alexnet", "googlenet"} else 64
    return torch.randn(2, 3, side, side)


def _with(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: (make(), torch.randn(shape))


NETWORKS: dict[str, Callable[[], Made]] = {
    **{name: _with(make, 2, 3, 16, 16) for name, make in BLOCKS.items()},
    **{name: _with(make, 2, 8, 32) for name, make in TOKENS.items()},
    **{name: _with(make, 2, 8, 32) for name, make in ROWS.items()},
    **{name: partial(_torchvision, name) for name in TORCHVISION},
    **{f"timm {name}": partial(_timm, name) for name in TIMM},
}
