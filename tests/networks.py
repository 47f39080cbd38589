"""Small networks that tests share, and factories that recipes name (`tests.networks:tiny`)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Net(nn.Module):
    # Named parts, and what they compute: a function of the network and of an image, or tokens.
    def __init__(self, run: Callable[["Net", Tensor], Tensor], **parts: object) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Opaque(nn.Module):
    # A layer whose Python code depends on values: it is a leaf for fx.
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Residual(nn.Module):
    # A downsampling residual block as in ResNet: both branches of its add end in a convolution.
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        plain = stride == 1 and inputs == outputs
        self.downsample = (
            None if plain else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x = x if self.downsample is None else self.downsample(x)
        return self.relu(y + x)


class TinyResNet(nn.Module):
    # Stem, max pool, two residual blocks, global average pool, classifier: 16 by 16 pixels and more.
    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(2)
        self.block1 = Residual(width, width)
        self.block2 = Residual(width, 2 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.block2(self.block1(x)))
        return self.fc(self.dropout(torch.flatten(x, 1)))


def tiny(num_classes: int = 10, width: int = 8) -> nn.Module:
    # A network that trains on the digits in seconds.
    return TinyResNet(num_classes, width)


def halved(num_classes: int = 10) -> nn.Module:
    # The same in float16, which cannot be quantized.
    return tiny(num_classes).half()


def network() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(TinyResNet())


def with_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    # `model` with BatchNorm statistics and affine parameters that are not those of a fresh layer.
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            size = module.running_mean.shape
            module.running_mean.copy_(torch.randn(size, generator=generator) * 0.2)
            module.running_var.copy_(torch.rand(size, generator=generator) + 0.5)
            module.weight.data.copy_(torch.randn(size, generator=generator) + 0.5)
            module.bias.data.copy_(torch.randn(size, generator=generator) * 0.1)
    return model.eval()


def narrow(num_classes: int = 10) -> nn.Module:
    # Two convolutions with BatchNorm and a classifier, which a test can search in seconds.
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def minimized(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    # Take steps of an optimizer and return the loss of each; the gradients of the last step stay.
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    # Assert that weights, statistics and other buffers are the same after the block, to the bit.
    before = [copy.deepcopy(model.state_dict()) for model in models]
    yield
    torch.testing.assert_close([model.state_dict() for model in models], before, rtol=0, atol=0, equal_nan=True)
