"""The two splits of a recipe's `data` section, of a user's function or of a DataLoader; the number of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from compress.data import IMAGENET, DataSpec, check_data_spec
from compress.data.base import Batch, BatchPlan, DataSet, Preprocessing, Split, hash_seed
from compress.data.boxes import coco_classes, coco_data, voc_data
from compress.data.degraded import degraded_data
from compress.data.folder import class_folders, folder_data, images_data
from compress.data.masks import mask_data
from compress.data.memory import cifar_data, digits_data, to_device
from compress.data.shapes import DEFAULT_SHAPES, shapes_data
from compress.errors import DataError
from compress.files import expand_user
from compress.graph.inputs import split_batch
from compress.support.imports import any_failure, described, imported, is_import_path


class Examples(Protocol):
    """A sequence of (image, target)."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        """Return the example at `index`."""


def own_data(spec: DataSpec) -> DataSet:
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
    """

    def __init__(self, examples: Examples, spec: DataSpec) -> None:
        if not len(examples):
            raise DataError(f"data.name {spec.name} returned a split without examples")
        with torch.random.fork_rng(devices=[]):
            first = _image(examples[0][0], 0)
        channels, height, width = first.shape
        known = IMAGENET if channels == 3 else ((0.0,) * channels, (1.0,) * channels)
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
        pixels = torch.stack(images)
        whole = pixels.float() if pixels.is_floating_point() else self.preprocessing.normalize(pixels.float().div_(255))
        return to_device(whole, device), stacked(targets, device)


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


class LoaderSplit(Split):
    """A DataLoader's images, normalized and augmented by its data set, in an order of our own.

    With workers, augmentation draws from the epoch's seed: after a resume within it anew.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int = 0) -> None:
        super().__init__(labels=(), preprocessing=_as_given(_example(loader)), seed=seed)
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        return _on(self.loader.collate_fn([self.dataset[index] for index in indices]), device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        if not self.loader.num_workers:
            yield from super().batches(plan, device=device)
            return
        passes = DataLoader(
            self.dataset,
            batch_sampler=[indices for indices in self.batch_indices(plan) if indices],
            num_workers=self.loader.num_workers,
            collate_fn=self.loader.collate_fn,
            worker_init_fn=self.loader.worker_init_fn,
            generator=torch.Generator().manual_seed(hash_seed(self.seed, plan.epoch or 0)),
        )
        for batch in passes:
            yield _on(batch, torch.device(device))


def loader_data(train: DataLoader[Any], val: DataLoader[Any] | None = None, *, seed: int = 0) -> DataSet:
    split = LoaderSplit(train, seed=seed)
    return DataSet(train=split, val=split if val is None else LoaderSplit(val, seed=seed))


def _example(loader: DataLoader[Any]) -> Tensor:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"the loader's data set is a {type(dataset).__name__} without a length: training needs images by number "
            "(__getitem__ and __len__), so that it can go on after a stop"
        )
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)) or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        raise DataError(
            f"the loader has a sampler of its own ({type(loader.sampler).__name__}): give one with shuffle=True or "
            "False, since the order of training follows from its seed; repeat images in the data set to weight them"
        )
    if not len(dataset):
        raise DataError("the loader's data set is empty")
    return _on(loader.collate_fn([dataset[0]]), torch.device("cpu"))[0]


def _on(batch: Any, device: torch.device) -> Batch:
    inputs, targets = split_batch(batch)
    given = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(tensors) != 1 or len(given) != 1:
        got = ", ".join(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise DataError(f"a batch holds the inputs {got}; training takes one tensor of images and its targets")
    return tensors[0].to(device), tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, targets)


def _as_given(images: Tensor) -> Preprocessing:
    channels = images.shape[1] if images.ndim > 1 else 1
    size = (images.shape[-2], images.shape[-1]) if images.ndim == 4 else 1
    return Preprocessing(
        image_size=size,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        channels="RGB" if channels == 3 else "other",
    )


_MAKERS: dict[str, Callable[[DataSpec], DataSet]] = {
    "digits": digits_data,
    "shapes": shapes_data,
    "folder": folder_data,
    "images": images_data,
    "cifar10": cifar_data,
    "cifar100": cifar_data,
    "masks": mask_data,
    "voc": voc_data,
    "coco": coco_data,
    "degraded": degraded_data,
}


def load_data(spec: DataSpec) -> DataSet:
    """The training and the evaluation split; nothing is ever downloaded.

    Returns:
        Splits whose batches are images (N, C, H, W) float32, normalized, and targets: (N,) int64 for classification,
        (N, H, W) int64 for segmentation, a list of N mappings for detection (see `boxes`), images (N, 3, H, W)
        float32 from 0 to 1 for restoration.

    Raises:
        DataError: a value out of range, missing or unreadable files, or another number of classes than `spec` names.

    Examples:
        >>> data = compress.load_data(compress.DataSpec(name="shapes", train_images=20, val_images=10, image_size=32))
        >>> len(data.train), len(data.val), data.val.num_classes
        (20, 10, 20)
    """
    check_data_spec(spec)
    data = own_data(spec) if is_import_path(spec.name) else _MAKERS[spec.name](spec)
    agreed_count(spec, data.train.num_classes)
    return data


FIXED_COUNTS = {"digits": 10, "cifar10": 10, "cifar100": 100}


def class_count(spec: DataSpec) -> int:
    if spec.classes is not None:
        return len(spec.classes)
    if spec.name == "shapes":
        return DEFAULT_SHAPES if spec.num_classes is None else spec.num_classes
    if spec.name == "folder":
        train = expand_user(str(spec.root)) / "train"
        if train.is_dir():
            return agreed_count(spec, len(class_folders(train)))
        if spec.num_classes is None:
            raise DataError(
                f"the classes of data.name folder cannot be counted, because there is no folder {train.absolute()}: "
                "set data.root to the folder that holds train/ and val/, or data.num_classes to their number"
            )
        return spec.num_classes
    if spec.name in ("images", "degraded"):
        return spec.num_classes or 0
    if spec.name == "coco":
        return agreed_count(spec, len(coco_classes(spec)))
    if spec.name in FIXED_COUNTS:
        return agreed_count(spec, FIXED_COUNTS[spec.name])
    if spec.num_classes is None:
        raise DataError(f"data.name {spec.name} has no fixed classes: set data.num_classes or data.classes")
    return spec.num_classes


def agreed_count(spec: DataSpec, found: int) -> int:
    if spec.num_classes not in (None, found):
        raise DataError(
            f"data.num_classes is {spec.num_classes}, but {spec.name} has {found}; leave the key out, or set it to null"
        )
    return found
