"""Data sets whose batches depend on (seed, epoch, step) alone, and the preprocessing that is stored with a model.

Here: the `data` section of a recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from compress.errors import DataError, near_misses
from compress.files import parse_json
from compress.support.imports import is_import_path
from compress.support.limits import IMAGE_PIXELS, IMAGE_SIDE
from compress.support.validation import AtLeastOne, BatchSize, Classes, Pixels, Positive, Seed, Share, Workers, validate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DataName = Literal["digits", "shapes", "folder", "images", "cifar10", "cifar100", "masks", "voc", "coco", "degraded"]

Interpolation = Literal["bilinear", "bicubic"]
Resize = Literal["crop", "squash", "pad"]

DATASETS: tuple[DataName, ...] = get_args(DataName)
LEAST_SIDE = 8

Channels = tuple[float, ...]
# Mean and standard deviation of the channels, in units of pixel / 255.
IMAGENET: tuple[Channels, Channels] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Mean and standard deviation of the data sets that have their own; all others are normalized as ImageNet is.
NORMALIZATION: dict[str, tuple[Channels, Channels]] = {
    "digits": ((0.305,) * 3, (0.376,) * 3),
    "shapes": ((0.5,) * 3, (0.25,) * 3),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "degraded": ((0.0,) * 3, (1.0,) * 3),
}

_ROOTED = ("folder", "images", "cifar10", "cifar100", "masks", "voc", "coco", "degraded")
_FILES = ("folder", "images")
_RECTANGLES = (*_FILES, "masks", "voc", "coco", "degraded")
_NAMED = {
    "masks": "masks needs the names of the classes, in the order of their values in the masks",
    "voc": "voc needs the names of the classes, as they are in the annotations",
}
SHAPES_CLASSES = (2, 100)  # fewest and most classes of `shapes`


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set, and how its images become the model's input.

    Attributes:
        name: data set (`digits`, `shapes`, `folder`, `cifar10`, `cifar100`; `images`, images without labels,
            judged by how often a network says the class that the float network says; for segmentation `masks`; for
            detection `voc` and `coco`; for restoration `degraded`, images and the same made smaller or noisier), or a
            function of yours, `package.module:function`, that takes this section and
            returns the training and the evaluation split; see `compress/data/load.py`. Nothing is ever downloaded.
        root: folder of `folder` (holding train/ and val/), of `images` (any depth; every fourth is for evaluation), of
            `masks`, `voc` and `coco`, of the cifar files, and of `degraded` (holding train/ and val/, else every fourth
            image is for evaluation); unused by the others.
        image_size: side of the model's square input in pixels, 8 or more, or [height, width] for `folder`, `masks`,
            `voc`, `coco`, `degraded` and functions.
        batch_size: images of one step over all processes together (the global batch).
        workers: loader processes of `folder`, `images`, `masks`, `voc`, `coco` and `degraded`; None = one per core
            and process, 8 at most.
        decode: what decodes the JPEG files of `folder` and `images` for a GPU: the `cpu`, in the loader processes, or
            the `gpu` itself (nvJPEG), which also cuts and resizes them; other formats, grey and CMYK stay with the CPU.
            Pixels of the two differ by a few grey levels; order and random parts are the same. Without effect where a
            CPU computes.
        on_error: `raise` names an unreadable image, or one whose annotation is wrong, and stops; `skip` leaves it out
            and counts it.
        max_pixels: largest image file that is decoded, width times height; one that says it has more cannot be read. It
            keeps out files of some bytes that take gigabytes.
        augment: random shifts, crops and flips of training images, as suits the data set.
        num_classes: classes of `shapes` (2 to 100; None = 20) and of `images` (the outputs of the network). For
            other data sets None = as the data say, and a number must agree with them.
        classes: names of the classes of `masks`, whose pixels hold their positions, of `voc`, of a function's data, and
            of `coco` (None = all categories of its training split).
        other_classes: objects of `voc` and `coco` whose class `classes` does not name: `raise` stops, or leaves out
            their images if `on_error` is skip; `background` learns them as background, for a detector of a few of the
            classes.
        scale: of `degraded`, side of the truth over that of the input: 1 for denoising, 2 to 8 for super-resolution.
        noise: of `degraded`, standard deviation of Gaussian noise in the input, in grey levels.
        ignore_index: value of the pixels of masks that have no class.
        clutter: opacity of the clutter of `shapes`, as a share of the usual; 0 leaves the object alone.
        train_images, val_images: images of `shapes` (None = 20,000 and 2,000); of the others an upper bound, every
            class in proportion (None = all).
        seed: seed of everything random in the data: shuffling, augmentation, drawing.
        mean, std: normalization per channel in [0, 1] units; None = the data set's own. The data of a function may have
            any number of channels.
        crop_ratio: evaluation of `folder` and `images`: image_size over the side that images are resized to before the
            centre crop.
        resize: evaluation of `folder` and `images`: `crop` scales an image until it covers the input and takes the
            centre, `squash` scales both sides to the input, `pad` keeps all of the image and its shape, with black
            borders.
        interpolation: how `folder` and `images` are resized, in training and in evaluation: `bilinear`, or `bicubic`,
            with which EfficientNets and most networks of timm were trained (0.6 points of EfficientNet-Lite0's top-1).

    Examples:
        >>> data = compress.load_data(compress.DataSpec(name="digits", image_size=16))
        >>> data.val.num_classes
        10
    """

    name: str = "digits"
    root: str | None = None
    image_size: int | tuple[int, int] = 64
    batch_size: BatchSize = 64
    workers: Workers | None = None
    decode: Literal["cpu", "gpu"] = "cpu"
    on_error: Literal["raise", "skip"] = "raise"
    max_pixels: Pixels = IMAGE_PIXELS
    augment: bool = True
    num_classes: Classes | None = None
    classes: tuple[str, ...] | None = None
    other_classes: Literal["raise", "background"] = "raise"
    ignore_index: Annotated[int, Field(ge=0, le=255)] = 255
    scale: Annotated[int, Field(ge=1, le=8)] = 2
    noise: Annotated[float, Field(ge=0, le=100)] = 0.0
    clutter: Share = 1.0
    train_images: AtLeastOne | None = None
    val_images: AtLeastOne | None = None
    seed: Seed = 0
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    resize: Resize = "crop"
    interpolation: Interpolation = "bilinear"

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return sides(self.image_size)


def sides(image_size: int | tuple[int, int]) -> tuple[int, int]:
    return (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])


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
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
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
        return images.mul(std).add_(mean).mul_(255).round_().clamp_(0, 255).byte()

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
    import torch  # lazy: a recipe is read without it

    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def preprocessing_words(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], *, resize: str, crop_ratio: float = 1.0
) -> str:
    """Say how an image becomes the network's input.

    >>> preprocessing_words((224, 224), (0.5,) * 3, (0.25,) * 3, resize="crop", crop_ratio=0.875)
    'centre crop of 224 x 224 after resizing to 256, mean 0.5, std 0.25'
    """
    sides = f"{size[0]} x {size[1]}"
    resized = f"after resizing to {round(min(size) / crop_ratio)}" if crop_ratio != 1 else "of the resized image"
    ways = {"crop": f"centre crop of {sides} {resized}", "pad": f"resized into {sides} with black borders"}
    mean_text, std_text = (", ".join(f"{value:g}" for value in dict.fromkeys(values)) for values in (mean, std))
    return f"{ways.get(resize, f'resized to {sides}')}, mean {mean_text}, std {std_text}"


def check_data_spec(spec: DataSpec) -> None:
    validate(spec, DataSpec, section="data", error=DataError, rules=data_contradictions)


def data_contradictions(spec: DataSpec) -> Iterator[str]:
    own = is_import_path(spec.name)
    if not own and spec.name not in DATASETS:
        hint = near_misses(spec.name, DATASETS)
        yield f"data.name is {spec.name!r}{hint} (one of: {', '.join(DATASETS)}, or package.module:function)"
        return
    if not LEAST_SIDE <= min(spec.height_width) <= max(spec.height_width) <= IMAGE_SIDE:
        given = spec.image_size if isinstance(spec.image_size, int) else list(spec.image_size)
        yield f"data.image_size is {given}: it must be {LEAST_SIDE} to {IMAGE_SIDE:,}"
    if spec.decode == "gpu" and spec.name not in _FILES:
        yield f"data.decode is gpu, for the JPEG files of folder and images; data.name is {spec.name}: leave it out"
    if spec.interpolation != "bilinear" and (spec.name not in _FILES or spec.decode == "gpu"):
        yield (
            f"data.interpolation is {spec.interpolation}, which folder and images have where the CPU decodes; "
            f"data.name is {spec.name} and data.decode {spec.decode}: leave it out"
        )
    if spec.resize != "crop" and (spec.name not in _FILES or spec.decode == "gpu"):
        yield (
            f"data.resize is {spec.resize}, which folder and images have where the CPU decodes; "
            f"data.name is {spec.name} and data.decode {spec.decode}: leave it out"
        )
    if spec.name in _ROOTED and not spec.root:
        yield f"data.root is missing: {spec.name} needs the folder of its files; compress never downloads data"
    low, high = SHAPES_CLASSES
    if spec.name == "shapes" and spec.num_classes is not None and not low <= spec.num_classes <= high:
        yield f"data.num_classes is {spec.num_classes}: shapes has from {low} to {high}"
    if not own and spec.name not in _RECTANGLES and isinstance(spec.image_size, tuple):
        yield f"data.image_size is {list(spec.image_size)}: {spec.name} has square images; give one number"
    if spec.name in _NAMED and not spec.classes:
        yield f"data.classes is missing: {_NAMED[spec.name]}"
    if spec.classes is not None and spec.num_classes not in (None, len(spec.classes)):
        yield f"data.num_classes is {spec.num_classes}, but data.classes names {len(spec.classes)}; leave one out"
    for key in ("mean", "std"):
        values = getattr(spec, key)
        if values is not None and len(values) != 3 and not own:
            yield f"data.{key} has {len(values)} values: it must have one for each of R, G and B"


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
