"""Small data and models for the training tests: images of a class are its pattern plus noise."""

import torch
from torch import nn

from compress.data.base import DataSet, Preprocessing, Split, hash_seed
from compress.support.progress import NoProgress

CLASSES = 4


class ToySplit(Split):
    def __init__(self, count, *, seed=0, classes=CLASSES, size=6, noise=1.0):
        super().__init__(
            labels=tuple(f"class {i}" for i in range(classes)), preprocessing=Preprocessing(image_size=size), seed=seed
        )
        pattern = torch.randn(classes, 3, size, size, generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(count)
        self.targets = torch.arange(count) % classes
        self.images = pattern[self.targets] + noise * torch.randn(count, 3, size, size, generator=generator)

    def __len__(self):
        return len(self.targets)

    def load(self, indices, *, epoch, device):
        images = self.images[indices].clone()
        if epoch is not None:
            for image, index in zip(images, indices, strict=True):
                generator = torch.Generator().manual_seed(hash_seed(self.seed, epoch, index))
                image += 0.1 * torch.randn(image.shape, generator=generator)
        return images.to(device), self.targets[indices].to(device)


def toy_data(train=48, val=22, **options):
    return DataSet(train=ToySplit(train, **options), val=ToySplit(val, **options))


def interrupt():
    raise KeyboardInterrupt


class Stop(NoProgress):
    # A user who stops a training, or another task, at its step number `at`; or what else `end` does there.
    def __init__(self, at, end=interrupt, task="train"):
        self.left, self.end, self.task = at, end, task

    def advance(self, task, amount=1, **fields):
        self.left -= task == self.task
        if not self.left:
            self.end()


def interrupted_data(loads, end=interrupt):
    # Data that end a process, Ctrl-C by default, when it asks for its batch number `loads`.
    data = toy_data()
    load = data.train.load

    def stop(*arguments, **options):
        nonlocal loads
        loads -= 1
        if not loads:
            end()
        return load(*arguments, **options)

    data.train.load = stop
    return data


def linear(seed=0, classes=CLASSES):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, classes))


def convnet(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def smooth(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, CLASSES))


class WithAuxiliary(nn.Module):
    # Returns a tuple while training, as GoogLeNet and Inception do; the second head is not in the loss.
    def __init__(self, output=tuple):
        super().__init__()
        self.body, self.auxiliary, self.output = linear(0), linear(1), output

    def forward(self, images):
        logits = self.body(images)
        if not self.training:
            return logits
        both = (logits, self.auxiliary(images))
        return {"aux": both[1], "logits": both[0]} if self.output is dict else both
