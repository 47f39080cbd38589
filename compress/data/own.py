"""The data of a user's function: `data.name: package.module:function`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.data.base import Batch, DataSet, Split, hash_seed
from compress.data.memory import to_device
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DataSpec
from compress.errors import DataError
from compress.support.imports import any_failure, described, imported

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, for pixels of three channels and recipes without a mean."""


class Examples(Protocol):
    """A sequence of (image, target)."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        """Return the example at `index`."""


def own_data(spec: DataSpec) -> DataSet:
    """The splits that the function `spec.name` makes.

    Raises:
        DataError: no import, a failure, or another result.
    """
    function = imported(spec.name, key="data.name", error=DataError, what="a function that returns two splits")
    with any_failure(lambda error: DataError(f"data.name {spec.name} fails ({described(error)})")):
        made = function(spec)
    if isinstance(made, DataSet):
        return made
    if not isinstance(made, tuple) or len(made) != 2:
        raise DataError(
            f"data.name {spec.name} returned a {type(made).__name__}: it must return (training, evaluation), two "
            "splits or two sequences of (image, target)"
        )
    train, val = (part if isinstance(part, Split) else _examples(part, spec) for part in made)
    return DataSet(train=train, val=val)


def _examples(part: Any, spec: DataSpec) -> ExamplesSplit:
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
        raise DataError(f"data.name {spec.name} returned a {type(part).__name__} that has no length and no items")
    return ExamplesSplit(part, spec)


class ExamplesSplit(Split):
    """A sequence of (image, target) as a split.

    Args:
        spec: `classes` are the labels; `mean` and `std` normalize.

    Raises:
        DataError: no example, or an image that is no tensor (C, H, W).
    """

    def __init__(self, examples: Examples, spec: DataSpec) -> None:
        if not len(examples):
            raise DataError(f"data.name {spec.name} returned a split without examples")
        with torch.random.fork_rng(devices=[]):
            first = _image(examples[0][0], 0)
        channels, height, width = first.shape
        known = (MEAN, STD) if channels == 3 else ((0.0,) * channels, (1.0,) * channels)
        mean, std = spec.mean or known[0], spec.std or known[1]
        if not len(mean) == len(std) == channels:
            raise DataError(
                f"the images of {spec.name} have {channels} channels, data.mean has {len(mean)} values and data.std "
                f"{len(std)}: give one for each channel"
            )
        preprocessing = Preprocessing(
            image_size=height if height == width else (height, width),
            mean=mean,
            std=std,
            channels="RGB" if channels == 3 else "other",
        )
        count = 0 if spec.num_classes is None else spec.num_classes
        labels = spec.classes or tuple(f"class {i}" for i in range(count))
        super().__init__(labels=labels, preprocessing=preprocessing, seed=spec.seed)
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """See `Split.load`.

        Raises:
            DataError: an example is not (image, target), or images differ in size.
        """
        images, targets = [], []
        with torch.random.fork_rng(devices=[]):
            for index in indices:
                torch.manual_seed(hash_seed(self.seed, index) if epoch is None else hash_seed(self.seed, epoch, index))
                with any_failure(partial(_unreadable, index)):
                    image, target = self.examples[index]
                images.append(_image(image, index))
                targets.append(target)
        if len({image.shape for image in images}) > 1:
            shapes = ", ".join(str(tuple(image.shape)) for image in images[:4])
            raise DataError(f"the images of a batch have different shapes ({shapes}, ...): resize them to one")
        return to_device(self._normalized(torch.stack(images)), device), stacked(targets, device)

    def _normalized(self, images: Tensor) -> Tensor:
        return images.float() if images.is_floating_point() else self.preprocessing.normalize(images.float().div_(255))


def _unreadable(index: int, error: Exception) -> DataError:
    return DataError(f"example {index} cannot be read ({described(error)})")


def stacked(targets: Sequence[Any], device: torch.device) -> Tensor | list[Any]:
    """Return a batch's targets: numbers and tensors of one shape as one tensor, others as a list."""
    if all(isinstance(target, (bool, int, float)) for target in targets):
        return to_device(torch.tensor(list(targets)), device)
    if all(isinstance(target, Tensor) for target in targets) and len({target.shape for target in targets}) == 1:
        return to_device(torch.stack(list(targets)), device)
    return list(targets)


def _image(image: Any, index: int) -> Tensor:
    if not isinstance(image, Tensor) or image.ndim != 3:
        got = f"a tensor of shape {tuple(image.shape)}" if isinstance(image, Tensor) else f"a {type(image).__name__}"
        raise DataError(f"the image of example {index} is {got}: it must be a tensor (channels, height, width)")
    return image
