"""The drift of an effective field by compression, and layers that cannot widen a field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compress.errors import ReceptiveFieldError
from compress.graph.traits import WEIGHTED
from compress.receptive.effective import EffectiveReceptiveField, ErfOptions, effective_receptive_field
from compress.receptive.metrics import distances
from compress.receptive.table import ReceptiveField, ReceptiveFieldTable

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
