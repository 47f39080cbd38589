"""Networks that the sparsity tests share."""

import torch
from torch import nn

from tests.networks import with_statistics


def small() -> nn.Module:
    """Four convolutions and a classifier; all but the first and the last are 2:4 eligible."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return with_statistics(layers)


def batch(count: int = 4, size: int = 8) -> torch.Tensor:
    """Images for `small`."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))
