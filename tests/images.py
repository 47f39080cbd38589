"""Folders of images that tests share."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image


def write_images(
    root: Path, labels: Sequence[str] = "ab", count: int = 2, *, size: tuple[int, int] = (16, 16), ending: str = "png"
) -> Path:
    # Write `count` images for training and for evaluation of each class, each of a colour of its own.
    for part in ("train", "val"):
        for number, label in enumerate(labels):
            (root / part / label).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", size, (30 * i, 100 * number, 60)).save(root / part / label / f"{i}.{ending}")
    return root
