"""Preprocessing to a model's input, kept in the ONNX file."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.data.spec import IMAGENET, DataSpec, sides
from compress.errors import DataError
from compress.files import parse_json

MEAN, STD = IMAGENET


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """(N, channels, height, width) float32, (pixel / 255 - mean) / std.

    Attributes:
        image_size: side in pixels, or (height, width).
        channels: `RGB` (grey is repeated), or `other`.
        crop_ratio: image_size over the side before the centre crop.
        resize: `crop`, `squash` or `pad`, see `DataSpec`.
    """

    image_size: int | tuple[int, int]
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    channels: str = "RGB"
    layout: str = "NCHW"
    interpolation: str = "bilinear"
    crop_ratio: float = 1.0
    resize: str = "crop"

    @classmethod
    def of(
        cls, spec: DataSpec, *, mean: tuple[float, ...], std: tuple[float, ...], crop_ratio: float = 1.0
    ) -> Preprocessing:
        """Return the preprocessing of `spec`; `mean` and `std` are for a spec without its own."""
        mean = mean if spec.mean is None else tuple(spec.mean)
        return cls(
            image_size=spec.image_size,
            mean=mean,
            std=std if spec.std is None else tuple(spec.std),
            channels="RGB" if len(mean) == 3 else "other",
            interpolation=spec.interpolation,
            crop_ratio=crop_ratio,
            resize=spec.resize,
        )

    @property
    def height_width(self) -> tuple[int, int]:
        return sides(self.image_size)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (len(self.mean), *self.height_width)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize (N, C, H, W), pixel / 255; grey is repeated."""
        mean, std = _constant(self.mean, images.device), _constant(self.std, images.device)
        return images.sub(mean).div_(std)

    def pixels(self, images: Tensor) -> Tensor:
        """Undo `normalize`: (N, channels, H, W) uint8."""
        mean, std = _constant(self.mean, images.device), _constant(self.std, images.device)
        return images.mul(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        if self.resize == "crop":  # earlier versions read files without the field alone
            del fields["resize"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        try:
            fields: dict[str, Any] = parse_json(text)
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"the preprocessing in the model's metadata is not readable ({error}): {text!r}") from None

    def differences(self, other: Preprocessing) -> list[str]:
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [f"{k}: {mine[k]} here, {theirs[k]} there" for k in mine if mine[k] != theirs[k]]


@functools.lru_cache(maxsize=32)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(1, C, 1, 1), cached: a copy to a GPU would wait for its work."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)
