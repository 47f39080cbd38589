"""Augmentation of training batches: torchvision's by name, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.data.base import Preprocessing
from compress.errors import RecipeError
from compress.support.imports import any_failure, described, imported, is_import_path
from compress.training import MIXES, TrainSpec

# From a batch's images and targets to augmented ones.
Augment = Callable[[Any, Any], tuple[Any, Any]]

_PIXELS = {
    "randaugment": "RandAugment",
    "trivialaugment": "TrivialAugmentWide",
    "autoaugment": "AutoAugment",
    "augmix": "AugMix",
}
_ERASING = {"random_erasing": "RandomErasing"}
_MIXES = {"mixup": "MixUp", "cutmix": "CutMix"}
# Largest distance of an image from its 8-bit pixels at which it counts as made from them.
_OFF = 2 / 255


def make_augment(
    spec: TrainSpec, *, num_classes: int, preprocessing: Preprocessing, images: Any, targets: Any = None
) -> Augment | None:
    """The augmentation of `spec`, tried on two images if there are `targets`; None without one."""
    names = spec.augment
    if not names:
        return None
    steps: list[Augment] = []
    if pixels := [name for name in names if name in _PIXELS]:
        _check_pixels(images, preprocessing, pixels[0])
        steps.append(_on_pixels([_made(_PIXELS[name], name, spec) for name in pixels], preprocessing))
    steps += [_each(_made(_ERASING[name], name, spec)) for name in names if name in _ERASING]
    steps += [imported(name, key="augment", error=RecipeError) for name in names if is_import_path(name)]
    if mixes := [_made(_MIXES[name], name, spec, num_classes=num_classes) for name in names if name in _MIXES]:
        steps.append(_one_of(mixes))

    def augment(images: Any, targets: Any) -> tuple[Any, Any]:
        for step in steps:
            images, targets = _pair(step(images, targets), names)
        return images, targets

    if targets is not None:
        _try(augment, images, targets, names)
    return augment


def _made(kind: str, name: str, spec: TrainSpec, **more: Any) -> nn.Module:
    from torchvision.transforms import v2  # lazy: it takes a second, and most trainings name none

    options: Mapping[str, Any] = spec.augment_options.get(name, {})
    try:
        made: nn.Module = getattr(v2, kind)(**options, **more)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"augment_options.{name} is {dict(options)}, and {name} refuses it: {error}") from error
    return made


def _check_pixels(images: Any, preprocessing: Preprocessing, name: str) -> None:
    good = isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3)
    if good:
        again = preprocessing.normalize(preprocessing.pixels(images).float() / 255)
        std = torch.tensor(preprocessing.std, device=images.device).view(1, -1, 1, 1)
        good = bool(((again - images) * std).abs().max() <= _OFF)
    if not good:
        raise RecipeError(
            f"augment {name} changes 8-bit pixels, and the data's images are not made of them by data.mean and "
            "data.std: return uint8 pixels from data.name, or name a function package.module:function"
        )


def _on_pixels(transforms: Sequence[Any], preprocessing: Preprocessing) -> Augment:
    def augment(images: Tensor, targets: Any) -> tuple[Tensor, Any]:
        rows = []
        for row in preprocessing.pixels(images):
            for transform in transforms:
                row = transform(row)
            rows.append(row)
        return preprocessing.normalize(torch.stack(rows).float().div_(255)), targets

    return augment


def _each(transform: Any) -> Augment:
    return lambda images, targets: (torch.stack([transform(row) for row in images]), targets)


def _one_of(transforms: Sequence[Any]) -> Augment:
    def augment(images: Tensor, targets: Tensor) -> tuple[Any, Any]:
        chosen = transforms[int(torch.randint(len(transforms), ())) if len(transforms) > 1 else 0]
        return chosen(images, targets)

    return augment


def _pair(value: Any, names: Sequence[str]) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise RecipeError(f"augment {list(names)} returned a {type(value).__name__}: it must return (images, targets)")
    return value


def _try(augment: Augment, images: Any, targets: Any, names: Sequence[str]) -> None:
    mixes = " (mixup and cutmix need one class for each image)" if set(names) & set(MIXES) else ""
    failing = f"augment {list(names)} fails on two images of the data"
    with (
        torch.random.fork_rng(devices=[]),
        any_failure(lambda error: RecipeError(f"{failing} ({described(error)}){mixes}")),
    ):
        after, _ = augment(images, targets)
    if isinstance(images, Tensor) and (not isinstance(after, Tensor) or after.shape[1:] != images.shape[1:]):
        got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
        raise RecipeError(
            f"augment {list(names)} made images of shape {got} from {tuple(images.shape)}: it must keep their shape"
        )
