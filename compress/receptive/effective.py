"""Effective receptive fields: the influence of each pixel on a unit, measured on images; their drift by compression."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import ReceptiveFieldError, near_misses
from compress.graph.inputs import batch_inputs
from compress.graph.traits import WEIGHTED
from compress.receptive.metrics import ErfMetrics, distances, erf_metrics
from compress.receptive.probe import Point, Probe, make_probe
from compress.receptive.theoretical import ReceptiveField, ReceptiveFieldTable
from compress.support.progress import NoProgress, Progress

Upstream = Literal["ones", "random"]
Average = Literal["absolute", "positive", "rms", "signed"]


@dataclass(frozen=True, kw_only=True)
class ErfOptions:
    """Options of the measurement of an effective receptive field.

    Attributes:
        unit: (row, column); None = (rows // 2, columns // 2).
        upstream: gradient at the unit's channels: `random` normal weights for each image, which measure the norm of
            all channels' gradients; `ones` uses their sum, in which opposite signs cancel (nearly all after a
            LayerNorm).
        average: mean over images of each gradient's `absolute` value, its `positive` part (RepLKNet), its square
            (`rms`, with the root at the end), or itself (`signed`, with the magnitude at the end; needs `ones`).
        batch_size: images of one pass.
        double: compute in float64.
        device: None = the model's own.
        seed: of the random upstream weights.
    """

    unit: tuple[int, int] | None = None
    upstream: Upstream = "random"
    average: Average = "absolute"
    batch_size: int = 8
    double: bool = False
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {"upstream": ("ones", "random"), "average": ("absolute", "positive", "rms", "signed")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ReceptiveFieldError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(values)}")
        if self.average == "signed" and self.upstream == "random":
            raise ReceptiveFieldError("average 'signed' needs upstream 'ones': random weights average to zero")
        if self.batch_size < 1:
            raise ReceptiveFieldError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EffectiveReceptiveField:
    """The effective receptive field of one unit of one layer.

    Attributes:
        heat: (height, width) float64 on the CPU: mean influence of each pixel, summed over the image's channels.
        unit: (row, column) in the layer's grid.
        grid: (rows, columns) of the layer.
        centre: (row, column) of the unit's centre in the image, pixels.
        images: number of images in the mean.
        dead_images: number of images whose gradient was zero everywhere.
        method: `graph`, or `hooks` with the reason.
        theoretical: field of the layer; None with hooks.
    """

    model: str
    layer: str
    heat: Tensor
    unit: tuple[int, int]
    grid: tuple[int, int]
    centre: tuple[float, float]
    images: int
    dead_images: int
    upstream: Upstream
    average: Average
    method: str
    theoretical: ReceptiveField | None
    metrics: ErfMetrics

    @property
    def normalized(self) -> Tensor:
        """The map, scaled to a largest value of 1."""
        return self.heat / self.heat.amax()


def effective_receptive_field(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layer: str | None = None,
    options: ErfOptions | None = None,
    progress: Progress | None = None,
) -> EffectiveReceptiveField:
    """Return the effective receptive field of the central unit of one layer (arXiv 1701.04128).

    The arguments and errors are those of `effective_receptive_fields`, which measures several layers in one pass. The
    map is (height, width); its sizes are in pixels (`.metrics`).

    Examples:
        >>> field = compress.effective_receptive_field(model, images, layer="0")
        >>> field.metrics.size <= 3.0
        True
    """
    return effective_receptive_fields(model, images, layers=[layer], options=options, progress=progress)[0]


def effective_receptive_fields(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layers: Sequence[str | None],
    options: ErfOptions | None = None,
    progress: Progress | None = None,
) -> tuple[EffectiveReceptiveField, ...]:
    """The effective receptive fields of several layers, from one forward pass for each batch.

    The gradient of a unit's channels, weighted by `upstream`, is averaged over images (Luo et al., "Understanding the
    Effective Receptive Field in Deep Convolutional Neural Networks", arXiv 1701.04128).

    Args:
        model: its first input is an image; it is not changed.
        images: (N, C, height, width), or an iterable of such batches or of (batch, target) pairs, of one size.
        layers: paths of modules or of blocks (`layer4` is its result), or names of fx nodes; None = the last layer
            whose units lie on a grid, which in a vision transformer are its tokens.
        options: None = `ErfOptions()`.
        progress: counts images.

    Raises:
        ReceptiveFieldError: there are no images; a layer does not exist or has no positions; or its gradient to the
            image is missing, not finite, or zero for every image.
        ModelError: the model fails on the images.
        DataError: a batch holds no tensor.
    """
    options, progress = options or ErfOptions(), progress or NoProgress()
    batches = _batches(images, options.batch_size)
    first = next(batches, None)
    if first is None:
        raise ReceptiveFieldError("no images were given")
    probe, form = _prepare(model, first, layers, options)
    sums = [_Sum(point, options) for point in probe.points]
    generator = torch.Generator().manual_seed(options.seed)
    total = sum(len(batch_inputs(one)[0]) for one in images) if isinstance(images, (list, tuple)) else 0
    total = len(images) if isinstance(images, Tensor) else total
    progress.start("receptive field", total)
    for batch in _chain(first, batches):
        if batch.shape[1:] != first.shape[1:]:
            raise ReceptiveFieldError(f"images differ in size: {tuple(first.shape[1:])}, then {tuple(batch.shape[1:])}")
        _accumulate(probe, batch.to(**form), sums, generator, options)
        progress.advance("receptive field", len(batch))
    progress.finish("receptive field")
    return tuple(s.result(type(model).__name__, probe.method) for s in sums)


def _prepare(
    model: nn.Module, first: Tensor, layers: Sequence[str | None], options: ErfOptions
) -> tuple[Probe, dict[str, Any]]:
    """The probe, and the device and type of images."""
    if first.ndim != 4 or 0 in first.shape:
        raise ReceptiveFieldError(f"images must be (N, C, height, width), got a tensor of shape {tuple(first.shape)}")
    own = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), first)
    form: dict[str, Any] = {"device": own.device, "dtype": own.dtype}
    if options.double or options.device is not None:
        form["device"] = torch.device(options.device or own.device)
        form["dtype"] = torch.float64 if options.double else own.dtype
        model = copy.deepcopy(model).to(**form)
    return make_probe(model, first[:1].to(**form), layers), form


def _batches(images: Tensor | Iterable[Any], size: int) -> Iterator[Tensor]:
    """Yield batches of at most `size` images, without targets."""
    for item in [images] if isinstance(images, Tensor) else images:
        yield from (part for part in batch_inputs(item)[0].split(size) if len(part))


def _chain(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    yield from rest


class _Sum:
    def __init__(self, point: Point, options: ErfOptions) -> None:
        rows, columns = point.grid.units
        self.point, self.options = point, options
        self.unit = options.unit if options.unit is not None else (rows // 2, columns // 2)
        if not (0 <= self.unit[0] < rows and 0 <= self.unit[1] < columns):
            raise ReceptiveFieldError(f"unit {self.unit} is not in {point.name}, which has {rows} x {columns} units")
        self.total: Tensor | None = None
        self.images = self.dead = 0

    def add(self, gradient: Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            raise ReceptiveFieldError(
                f"the gradient of {self.point.name} is not finite (images {self.images} to "
                f"{self.images + len(gradient) - 1}): the model overflows on them"
            )
        self.dead += int((gradient == 0).flatten(1).all(1).sum())
        self.images += len(gradient)
        change = {"absolute": Tensor.abs, "positive": Tensor.relu, "rms": Tensor.square}.get(self.options.average)
        part = gradient.sum(0) if change is None else change(gradient).sum((0, 1))
        self.total = part.double().cpu() if self.total is None else self.total + part.double().cpu()

    def heat(self) -> Tensor:
        """The mean map (ReceptiveFieldError: it is zero everywhere)."""
        mean = torch.zeros(1) if self.total is None else self.total / self.images
        if self.options.average == "rms":
            mean = mean.sqrt()
        elif self.options.average == "signed":
            mean = mean.abs().sum(0)
        if not bool(mean.amax() > 0):
            raise ReceptiveFieldError(
                f"the gradient of unit {self.unit} of {self.point.name} is zero for all {self.images} images: its "
                "activations are dead there (an inactive ReLU, a saturated or rounded value), or its channels cancel "
                "(try upstream='random'), or its field lies outside of the image; choose another unit or layer, or "
                "other images"
            )
        return mean

    def result(self, model: str, method: str) -> EffectiveReceptiveField:
        heat, row, grid = self.heat(), self.point.row, self.point.grid.units
        centre = unit_centre(row, self.unit, grid, tuple(heat.shape))
        return EffectiveReceptiveField(
            model=model,
            layer=self.point.name,
            heat=heat,
            unit=self.unit,
            grid=grid,
            centre=centre,
            images=self.images,
            dead_images=self.dead,
            upstream=self.options.upstream,
            average=self.options.average,
            method=method,
            theoretical=row,
            metrics=erf_metrics(heat, centre, theoretical=_local_size(row)),
        )


def mean_field(fields: Sequence[EffectiveReceptiveField]) -> EffectiveReceptiveField:
    """The mean of several networks' fields, with maps scaled to a sum of 1.

    Raises:
        ReceptiveFieldError: there are no fields, or their maps differ in size.
    """
    if not fields or any(f.heat.shape != fields[0].heat.shape for f in fields):
        raise ReceptiveFieldError("mean_field needs one or more fields whose maps have one size")
    heat = torch.stack([f.heat / f.heat.sum() for f in fields]).mean(0)
    return replace(
        fields[0],
        heat=heat,
        images=sum(f.images for f in fields),
        dead_images=sum(f.dead_images for f in fields),
        metrics=erf_metrics(heat, fields[0].centre, theoretical=_local_size(fields[0].theoretical)),
    )


def _local_size(row: ReceptiveField | None) -> tuple[int | None, ...] | None:
    """The size of a field that is a window, else None."""
    return row.local_size if row is not None and row.status == "exact" and not row.reason else None


def unit_centre(
    row: ReceptiveField | None, unit: Sequence[int], grid: Sequence[int], image: Sequence[int]
) -> tuple[float, float]:
    """(row, column) of the unit's window, else of its cell in a grid over the image."""
    found = []
    for axis in range(2):
        centre = row.centre(unit, axis) if row is not None and row.located else None
        found.append((unit[axis] + 0.5) * image[axis] / grid[axis] - 0.5 if centre is None else centre)
    return found[0], found[1]


def _accumulate(
    probe: Probe, batch: Tensor, sums: Sequence[_Sum], generator: torch.Generator, options: ErfOptions
) -> None:
    images = batch.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = probe.run(images)
        for position, (total, output) in enumerate(zip(sums, outputs, strict=True)):
            value = total.point.grid.take(output, total.unit)
            if options.upstream == "random":
                weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                value = value * weights.to(value)
            elif value.shape[1] > 1 and bool((value.sum(1).abs() < 1e-5 * value.abs().sum(1)).all()):
                raise ReceptiveFieldError(
                    f"the channels of {total.point.name} sum to zero, as after a LayerNorm: the gradient of their sum "
                    "is rounding noise; use upstream='random' or an earlier layer"
                )
            total.add(_gradient(value, images, total.point.name, keep=position + 1 < len(sums)))


def _gradient(value: Tensor, images: Tensor, name: str, *, keep: bool) -> Tensor:
    found = None
    if value.requires_grad:
        try:
            (found,) = torch.autograd.grad(value.sum(), images, retain_graph=keep, allow_unused=True)
        except RuntimeError as error:
            raise ReceptiveFieldError(f"the gradient from {name} to the image fails: {error}") from error
    if found is None:
        raise ReceptiveFieldError(
            f"no gradient leads from {name} to the image: it does not depend on the image, or through an operation "
            "without a derivative (detach, a comparison, integers)"
        )
    return found


SOURCES = ("photographs", "noise")
_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, on which torchvision's and most of timm's models were trained
_STD = (0.229, 0.224, 0.225)


def probe_images(source: str, count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Images, (count, 3, height, width) float32, normalized with ImageNet's mean and standard deviation.

    `source` is `photographs` (crops of scikit-learn's two) or `noise` (standard normal); the seed is of either.

    Raises:
        ReceptiveFieldError: the source is unknown, or a count or size is below 1.
    """
    if count < 1 or min(size) < 1:
        raise ReceptiveFieldError(f"{count} images of {size[0]} x {size[1]} pixels were asked for")
    if source == "photographs":
        return photograph_crops(count, size, seed=seed)
    if source == "noise":
        return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    raise ReceptiveFieldError(f"image source {source!r}{near_misses(source, SOURCES)} ({', '.join(SOURCES)})")


def photograph_crops(count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Random crops, half mirrored, of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images  # lazy: it takes seconds, and only photographs need it

    photographs = [torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
    crops = [_crop(photographs[i % len(photographs)], size, generator) for i in range(count)]
    return torch.stack([(crop - mean) / std for crop in crops])


def _crop(photograph: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A resized crop with the proportions of `size`, at least half of the largest."""
    _, height, width = photograph.shape
    largest = min(height / size[0], width / size[1])
    scale = largest * (0.5 + 0.5 * float(torch.rand((), generator=generator)))
    rows, columns = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    top = int(torch.randint(0, height - rows + 1, (), generator=generator))
    left = int(torch.randint(0, width - columns + 1, (), generator=generator))
    crop = photograph[:, top : top + rows, left : left + columns]
    if bool(torch.rand((), generator=generator) < 0.5):
        crop = crop.flip(-1)
    return torch.nn.functional.interpolate(crop[None], size, mode="bilinear", antialias=True)[0]


Measurable = EffectiveReceptiveField | nn.Module


@dataclass(frozen=True, kw_only=True)
class ErfDrift:
    """The change of an effective receptive field.

    Attributes:
        total_variation: share of the influence that lies on other pixels, 0 to 1.
        moved_px: Wasserstein distance of the distributions of the radius around the unit's centre, pixels.
        radius_change_px: mean radius after minus before, pixels.
        size_ratio: `metrics.size` after over before.
    """

    before: EffectiveReceptiveField
    after: EffectiveReceptiveField
    total_variation: float
    moved_px: float
    radius_change_px: float
    size_ratio: float


def erf_drift(
    before: Measurable,
    after: Measurable,
    images: Tensor | Iterable[Any] | None = None,
    *,
    layer: str | None = None,
    options: ErfOptions | None = None,
) -> ErfDrift:
    """The drift from one network's effective receptive field to another's, over the same images.

    Modules need images, as `effective_receptive_field` takes them (batches as a list), and have the same random
    upstream weights. Layer None is the last one on a grid.

    Raises:
        ReceptiveFieldError: a module has no images, the maps differ in size, or a measurement fails.
    """
    fields = []
    for one in (before, after):
        if isinstance(one, EffectiveReceptiveField):
            fields.append(one)
        elif images is None:
            raise ReceptiveFieldError("erf_drift needs images to measure a module")
        else:
            fields.append(effective_receptive_field(one, images, layer=layer, options=options or ErfOptions()))
    first, second = fields
    if first.heat.shape != second.heat.shape:
        raise ReceptiveFieldError(
            f"the maps differ in size: {tuple(first.heat.shape)} and {tuple(second.heat.shape)}; use images of one size"
        )
    left, right = (f.heat / f.heat.sum() for f in fields)
    radius = distances(first.heat.shape, first.centre)
    return ErfDrift(
        before=first,
        after=second,
        total_variation=float((left - right).abs().sum() / 2),
        moved_px=radial_distance(left, right, radius),
        radius_change_px=float((radius * (right - left)).sum()),
        size_ratio=second.metrics.size / first.metrics.size,
    )


def radial_distance(left: Tensor, right: Tensor, radius: Tensor) -> float:
    """The Wasserstein-1 distance of `radius` under two maps of sum 1."""
    ordered, order = radius.flatten().sort()
    gap = (left - right).flatten()[order].cumsum(0).abs()
    return float((gap[:-1] * ordered.diff()).sum())


@dataclass(frozen=True, kw_only=True)
class UnproductiveLayer:
    """A convolution that cannot widen the receptive field.

    Attributes:
        path: of the module, or name of the node.
        input_size: field of its input along the widest path, pixels, without global operations.
        input_smallest: along the narrowest path.
        certain: True if every path to its input covers the whole image.
        macs: at the table's image size, batch 1; None = unknown.
        share: of the network's known macs; None = unknown.
    """

    path: str
    input_size: tuple[int, ...]
    input_smallest: tuple[int, ...]
    certain: bool
    macs: int | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class UnproductiveLayers:
    """The convolutions of a network whose input field covers the image, (height, width).

    `macs` are those of all convolutions and linear layers; `unknown` are weighted layers whose field is unknown.
    """

    image_size: tuple[int, ...]
    layers: tuple[UnproductiveLayer, ...]
    macs: int
    unknown: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of the macs in all these layers."""
        return sum(layer.share or 0.0 for layer in self.layers)

    @property
    def certain_share(self) -> float:
        """Share of the macs in those that are certain."""
        return sum(layer.share or 0.0 for layer in self.layers if layer.certain)


def unproductive_layers(table: ReceptiveFieldTable, image_size: Sequence[int] | None = None) -> UnproductiveLayers:
    """The convolutions whose input already covers the whole image (Richter et al., arXiv 2106.12307).

    A linear layer over the channels of a map is a 1 x 1 convolution; one after the map is not judged. `image_size` is
    (height, width), None = the table's; macs are at the table's size.

    Raises:
        ReceptiveFieldError: the image size has another number of axes than the table's.
    """
    size = tuple(image_size) if image_size is not None else table.image_size
    if len(size) != len(table.image_size) or min(size) < 1:
        raise ReceptiveFieldError(f"image_size is {size}; the table's images have {len(table.image_size)} axes")
    weighted = [row for row in table if row.kind in WEIGHTED]
    macs = sum(row.macs or 0 for row in weighted)
    judged = [row for row in weighted if row.kind != "linear" or (row.located and None not in row.local_size)]
    found = [row for row in judged if _covers(row.input_size, size)]
    return UnproductiveLayers(
        image_size=size,
        layers=tuple(_layer(row, size, macs) for row in found),
        macs=macs,
        unknown=tuple(row.path or row.name for row in weighted if row.status == "unknown"),
    )


def _covers(sizes: Sequence[int | None], image: Sequence[int]) -> bool:
    """True if the input's field is larger than the image (Richter et al.)."""
    return all(s is not None and s > n for s, n in zip(sizes, image, strict=True))


def _layer(row: ReceptiveField, size: Sequence[int], macs: int) -> UnproductiveLayer:
    return UnproductiveLayer(
        path=row.path or row.name,
        input_size=tuple(s or 0 for s in row.input_size),
        input_smallest=tuple(s or 0 for s in row.input_smallest),
        certain=_covers(row.input_smallest, size),
        macs=row.macs,
        share=row.macs / macs if row.macs is not None and macs else None,
    )
