"""Runs the kernel that resizes windows in Triton's interpreter against torch."""

import torch

from compress.kernels.resample import Window, resample

CASES = (
    # height, width of the image; window
    (19, 23, Window(0, 19, 8, 0, 0, 23, 9, 0, 0)),
    (30, 17, Window(3, 20, 8, 0, 2, 13, 9, 0, 1)),
    (9, 40, Window(1, 7, 13, 2, 5, 33, 24, 7, 0)),
    (8, 9, Window(0, 8, 8, 0, 0, 9, 9, 0, 1)),
    (5, 6, Window(1, 1, 8, 0, 2, 3, 9, 0, 0)),
    (40, 50, Window(4, 33, 9, 1, 8, 41, 11, 2, 0)),
)


def check(device):
    generator = torch.Generator().manual_seed(1)
    images = [torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=generator) for h, w, _ in CASES]
    images = [image.to(device) for image in images]
    windows = [window for _, _, window in CASES]
    expected = resample([image.cpu() for image in images], windows, (8, 9), kernels="torch")
    found = resample(images, windows, (8, 9), kernels="triton").cpu()
    assert found.shape == (len(CASES), 3, 8, 9)
    apart = (found.int() - expected.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 0.01  # ties alone


def main():
    check("cpu")
