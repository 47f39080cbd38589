"""Small networks with costs that are easy to count."""

import torch
from torch import nn

from tests.networks import Net, Opaque


def residual(channels=4):
    # conv-bn-relu, conv-bn, and a residual addition with a ReLU after it, on 4 channels.
    def run(net, x):
        y = torch.relu(net.bn1(net.conv1(x)))
        y = net.bn2(net.conv2(y))
        return torch.relu(y + x)

    return Net(
        run,
        conv1=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(channels),
        conv2=nn.Conv2d(channels, channels, 1, bias=False),
        bn2=nn.BatchNorm2d(channels),
    )


def squeeze_excite():
    # Squeeze-and-excite, whose second convolution must not be fused with the product with the map.
    def run(net, x):
        x = net.conv(x)
        return x * torch.sigmoid(net.fc(net.pool(x)))

    return Net(run, conv=nn.Conv2d(3, 4, 3, padding=1), pool=nn.AdaptiveAvgPool2d(1), fc=nn.Conv2d(4, 4, 1))


def pre_activation():
    # BatchNorm and ReLU before the convolution, and a concat, as in DenseNet.
    return Net(
        lambda net, x: torch.cat([x, net.conv(torch.relu(net.norm(x)))], 1),
        norm=nn.BatchNorm2d(4),
        conv=nn.Conv2d(4, 8, 3, padding=1, bias=False),
    )


def with_opaque():
    return Net(lambda net, x: net.odd(net.conv(x)), conv=nn.Conv2d(3, 4, 3), odd=Opaque())


def block_net(width=16, heads=2):
    def run(net, x):
        y = net.norm1(x)
        x = x + net.attention(y, y, y, need_weights=False)[0]
        return x + net.down(torch.nn.functional.gelu(net.up(net.norm2(x))))

    return Net(
        run,
        norm1=nn.LayerNorm(width),
        attention=nn.MultiheadAttention(width, heads, batch_first=True),
        norm2=nn.LayerNorm(width),
        up=nn.Linear(width, 4 * width),
        down=nn.Linear(4 * width, width),
    )
