"""The networks of the study: built, quantized and exported on the CPU, without weights from anywhere."""

from pathlib import Path

import torch
from torch import Tensor, nn

import compress
from analysis.common.networks import random_network
from examples.yolo import SIZES as YOLOS
from examples.yolo import Yolo

# Side of the input of networks that are not fed 224 pixels.
SIZES = {"tiny": 32, "vit_tiny_of_32": 32, **{f"yolo_{size}": 320 for size in YOLOS}}


def image_size(name: str) -> int:
    return SIZES.get(name, 224)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "tiny":
        return _Tiny().eval()
    if name.startswith("yolo_"):
        return Yolo(12, size=name.removeprefix("yolo_"), end_to_end=True).eval()
    if name == "vit_tiny_of_32":
        return random_network("vit_tiny_patch16_224", img_size=32, patch_size=8).eval()
    return random_network(name).eval()


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 32, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.first, self.second = nn.Conv2d(32, 32, 3, 1, 1), nn.Conv2d(32, 32, 1)
        self.deep = nn.Conv2d(32, 32, 3, 2, 1, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x).relu())
        x = (self.second(self.first(x).relu()) + x).relu()
        return self.head(self.deep(x).relu().mean((2, 3)))


def images(count: int, side: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, max(2, side // 8), max(2, side // 8), generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear") * 1.5


def qdq_file(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    x = images(4, image_size(name))
    quantized = compress.quantize(network(name), x[:1], [x])
    return compress.export_onnx(quantized, x[:1], path, dynamic_batch=True)


def prepare(name: str, folder: str) -> str:
    torch.set_num_threads(4)
    try:
        qdq_file(name, Path(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
