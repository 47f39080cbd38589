"""Receptive fields and compression: how far a network's gaze moved, and which layers no longer widen it.

Drift compares the effective fields of one unit before and after quantization, sparsity or pruning. Both are taken as
distributions of influence over the pixels. Unproductive layers are those of Richter et al. ("Should You Go Deeper?
Optimizing Convolutional Neural Network Architectures without Training", arXiv 2106.12307): a convolution whose input
already sees the whole image cannot add context, and tends to add nothing to the accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compress.errors import ReceptiveFieldError
from compress.receptive_field.effective import EffectiveReceptiveField, ErfOptions, effective_receptive_field
from compress.receptive_field.metrics import distances
from compress.receptive_field.table import ReceptiveField, ReceptiveFieldTable

Seen = EffectiveReceptiveField | nn.Module


@dataclass(frozen=True, kw_only=True)
class ErfDrift:
    """How an effective receptive field changed.

    Attributes:
        before, after: the two fields.
        total_variation: share of the influence that lies on other pixels, 0 (same map) to 1 (no pixel in common).
        moved_px: how far the influence moved towards or away from the unit's centre, on average over it (the
            Wasserstein distance of the distributions of the radius), pixels.
        radius_change_px: mean radius after minus before, pixels; above 0 the network looks wider.
        size_ratio: `metrics.size` after over before.
    """

    before: EffectiveReceptiveField
    after: EffectiveReceptiveField
    total_variation: float
    moved_px: float
    radius_change_px: float
    size_ratio: float


def erf_drift(
    before: Seen,
    after: Seen,
    images: Tensor | Iterable[Any] | None = None,
    *,
    layer: str | None = None,
    options: ErfOptions | None = None,
) -> ErfDrift:
    """The drift from one network's effective receptive field to another's, over the same images.

    Args:
        before: a module, or a field that was measured already.
        after: the other one.
        images: as for `effective_receptive_field`; a list where batches are given, as both modules see them. Needed for
            modules only.
        layer: the same name in both; None = the last layer on a grid in each.
        options: of the measurement; the same random upstream weights meet the same images.

    Raises:
        ReceptiveFieldError: modules without images, maps of different sizes, or what `effective_receptive_field` says.
    """
    fields = []
    for seen in (before, after):
        if isinstance(seen, EffectiveReceptiveField):
            fields.append(seen)
        elif images is None:
            raise ReceptiveFieldError("erf_drift needs images to measure a module")
        else:
            fields.append(effective_receptive_field(seen, images, layer=layer, options=options or ErfOptions()))
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
    """Wasserstein-1 distance of the distributions of `radius` under two maps that each sum to 1."""
    ordered, order = radius.flatten().sort()
    gap = (left - right).flatten()[order].cumsum(0).abs()
    return float((gap[:-1] * ordered.diff()).sum())


@dataclass(frozen=True, kw_only=True)
class UnproductiveLayer:
    """A convolution that cannot widen what the network sees.

    Attributes:
        path: the module's path, or the node's name.
        input_size: what its input sees along the widest path, pixels, without global operations.
        input_smallest: along the narrowest path.
        certain: every path to its input sees the whole image. False = only some do (critical: it still integrates
            context along shortcuts).
        macs: multiply-accumulates at the table's image size, batch 1; None = unknown.
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
    """The convolutions of a network whose input field covers the image.

    Attributes:
        image_size: (height, width) that was asked about.
        layers: in the order of the network.
        macs: of all convolutions and linear layers together, at the table's image size.
        unknown: weighted layers whose field is unknown, and which are therefore not judged.
    """

    image_size: tuple[int, ...]
    layers: tuple[UnproductiveLayer, ...]
    macs: int
    unknown: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of the macs in layers whose input sees the whole image along its widest path."""
        return sum(layer.share or 0.0 for layer in self.layers)

    @property
    def certain_share(self) -> float:
        """Share of the macs in layers all of whose paths see the whole image."""
        return sum(layer.share or 0.0 for layer in self.layers if layer.certain)


def unproductive_layers(table: ReceptiveFieldTable, image_size: Sequence[int] | None = None) -> UnproductiveLayers:
    """The convolutions whose input already sees the whole image, as candidates for pruning or removal.

    A linear layer over the channels of a map (ConvNeXt) is a 1 x 1 convolution; one behind the map is not judged.
    Global operations (squeeze-and-excite, pooling) are left aside: what counts is what convolutions see. Macs and their
    shares are those at the table's own image size.

    Args:
        table: of `receptive_field`.
        image_size: (height, width) in pixels; None = the table's.

    Raises:
        ReceptiveFieldError: an image size of other axes than the table's.
    """
    size = tuple(image_size) if image_size is not None else table.image_size
    if len(size) != len(table.image_size) or min(size) < 1:
        raise ReceptiveFieldError(f"image_size is {size}; the table's images have {len(table.image_size)} axes")
    weighted = [row for row in table if row.kind in {"conv", "conv_transpose", "linear"}]
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
    """Richter et al.: the input's field is larger than the image."""
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
