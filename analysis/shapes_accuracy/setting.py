"""The networks of the study and the setting that they share, in full size and as a quick trial."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compress.data import DataSpec


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the study.

    Attributes:
        name: name for `compress.ModelSpec`.
        lr: peak learning rate of the float training (AdamW).
        options: options of `compress.ModelSpec`.
        adaround_steps: steps for each layer; 0 leaves AdaRound out.
        least_s: seconds that its float training needs; with less time left, the network is not begun.
    """

    name: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    adaround_steps: int = 100
    least_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The data and the training of all networks.

    Attributes:
        data: data set; `train_images` is the number of images of the float training.
        small_size: side of the images of the first epochs.
        epochs_small, epochs: epochs of the float training, on small images and on images of full size.
        batch_size: batch size of the float training.
        tune_images, tune_batch_size: images and batch size of one epoch of fine-tuning or QAT.
        calibration_images: images for calibration.
        precision: precision of training.
        permute_seconds: time of the permutation search.
        ort_gmacs: multiply-accumulates, in 1e9, that ONNX Runtime spends on a file; they limit its images.
    """

    data: DataSpec
    small_size: int
    epochs_small: int
    epochs: int
    batch_size: int
    tune_images: int
    tune_batch_size: int
    calibration_images: int = 512
    precision: Literal["fp32", "bf16"] = "bf16"
    permute_seconds: float = 8.0
    ort_gmacs: float = 100.0


NETWORKS = {
    "resnet18": Network(name="resnet18", lr=2e-3, adaround_steps=300, least_s=60.0),
    "mobilenet_v2": Network(name="mobilenet_v2", lr=3e-3, options={"dropout": 0.0}, least_s=80.0),
    "resnet50": Network(name="resnet50", lr=1.5e-3, least_s=110.0),
    "vgg16_bn": Network(name="vgg16_bn", lr=5e-4, options={"dropout": 0.0}, adaround_steps=0, least_s=150.0),
}
FULL = Setting(
    data=DataSpec(
        name="shapes", image_size=224, num_classes=100, train_images=51_200, val_images=4_000, batch_size=256
    ),
    small_size=128,
    epochs_small=8,
    epochs=4,
    batch_size=256,
    tune_images=19_200,
    tune_batch_size=128,
)
QUICK_NETWORKS = {
    "resnet18": Network(
        name="timm:resnet18", lr=2e-3, options={"channels": (16, 32, 64, 128), "stem_width": 16}, adaround_steps=4
    ),
    "mobilenet_v2": Network(name="mobilenet_v2", lr=3e-3, options={"width_mult": 0.25}, adaround_steps=0),
}
QUICK = Setting(
    data=replace(FULL.data, image_size=32, num_classes=4, clutter=0.0, train_images=256, val_images=60),
    small_size=24,
    epochs_small=1,
    epochs=1,
    batch_size=32,
    tune_images=64,
    tune_batch_size=32,
    calibration_images=32,
    precision="fp32",
    permute_seconds=1.0,
    ort_gmacs=0.02,
)
