"""Small networks with costs that are easy to count."""

import torch
from torch import nn


class Residual(nn.Module):
    """conv-bn-relu, conv-bn, and a residual addition with a ReLU after it, on 4 channels."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + x)


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite, whose second convolution must not be fused with the product with the map."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        return x * torch.sigmoid(self.fc(self.pool(x)))


class PreActivation(nn.Module):
    """BatchNorm and ReLU before the convolution, and a concat, as in DenseNet."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], 1)


class Opaque(nn.Module):
    """A layer whose Python code depends on values: it is a leaf for fx, and its cost is unknown."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class WithOpaque(nn.Module):
    """An opaque layer after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.odd = Opaque()

    def forward(self, x):
        return self.odd(self.conv(x))


class Block(nn.Module):
    """A transformer block: LayerNorm, attention, residual, MLP, residual."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))
