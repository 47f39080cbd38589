"""`sparsify`: from a spec to a masked model and a report of every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import SparsityError
from compress.graph.compare import alone
from compress.graph.inputs import Inputs
from compress.graph.trace import check_module
from compress.sparsity.channel_permutation import PermutationReport, permute_channels
from compress.sparsity.eligibility import Eligibility, chosen_layers, eligibility
from compress.sparsity.parametrization import apply_masks, kept_magnitude, masked_layers, pattern_mask
from compress.sparsity.saliency import prune_layers
from compress.sparsity.spec import Pattern, SparsitySpec, check_sparsity_spec
from compress.support.progress import NoProgress, Progress


@dataclass(frozen=True, kw_only=True)
class SparsityRow(Eligibility):
    """One convolution or linear layer, and what its mask keeps.

    Attributes:
        density: share of the weight's elements that stay.
        kept_magnitude: share of the weight's L1 norm (before any update) that stays; None if it is dense.
    """

    density: float = 1.0
    kept_magnitude: float | None = None


@dataclass(frozen=True, kw_only=True)
class SparsityReport:
    """Result of `sparsify`.

    Attributes:
        rows: every convolution and linear layer, in order; then weights of other modules, which stay dense.
        permutation: before masking; None if it was not asked for.
    """

    pattern: str
    rows: tuple[SparsityRow, ...]
    permutation: PermutationReport | None = None

    @property
    def masked(self) -> tuple[str, ...]:
        """Paths of the layers that are masked."""
        return tuple(row.layer for row in self.rows if row.eligible)

    @property
    def density(self) -> float:
        """Share of the weights of all rows that stays."""
        sizes = [torch.Size(row.shape).numel() for row in self.rows]
        return sum(n * row.density for n, row in zip(sizes, self.rows, strict=True)) / max(1, sum(sizes))


@alone
def sparsify(
    model: nn.Module,
    spec: SparsitySpec,
    *,
    example_inputs: Inputs | None = None,
    batches: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> SparsityReport:
    """Mask the eligible layers of `model`, in place; `squash_masks` bakes the masks in.

    Masks begin as all ones with schedule `gradual`, else as the pattern's; `MaskSchedule` changes them.

    Args:
        model: dense and float; saliency `hessian` updates its weights.
        spec: pattern, saliency, schedule and rules.
        example_inputs: a small batch on the model's device: needed by `permute`; it also shows which layers are first
            and last, and which do not run.
        batches: calibration batches, as for `compress.quantize`: needed by saliency `hessian`.
        progress: is advanced by the permutation and the Hessians.

    Returns:
        A row for every layer. If the graph cannot be followed, `permutation.refused` says why.

    Raises:
        SparsityError: the spec or a rule is not acceptable, the model is masked already, no layer is eligible, or an
            argument that the spec needs is missing.

    Examples:
        >>> network = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3)))
        >>> compress.sparsify(network, compress.SparsitySpec(pattern="2:4")).masked  # first and last stay dense
        ('1',)
    """
    progress = progress or NoProgress()
    check_module(model)
    pattern = check_sparsity_spec(spec)
    _check_given(model, spec, pattern, example_inputs, batches)
    checks = eligibility(model, spec, example_inputs=example_inputs)
    layers = chosen_layers(model, spec, checks)
    permutation = None
    if spec.permute and example_inputs is not None:
        try:
            permutation = permute_channels(model, spec, example_inputs=example_inputs, progress=progress)
        except SparsityError as error:
            permutation = PermutationReport(refused=str(error))
    masks, kept = _masks(model, layers, spec, pattern, batches, progress)
    if spec.schedule == "gradual":
        masks = {path: torch.ones_like(mask) for path, mask in masks.items()}
    apply_masks(model, masks, pattern=str(pattern), **mask_options(spec))
    density = {path: mask.double().mean().item() for path, mask in masks.items()}
    rows = tuple(
        SparsityRow(**vars(row), density=density.get(row.layer, 1.0), kept_magnitude=kept.get(row.layer))
        for row in checks
    )
    return SparsityReport(pattern=spec.pattern, rows=rows, permutation=permutation)


def mask_options(spec: SparsitySpec) -> dict[str, Any]:
    """The arguments of `apply_masks` that follow from the schedule."""
    return {
        "straight_through": spec.schedule == "sr-ste",
        "learned": spec.seed if spec.schedule == "gumbel" else None,
    }


def _check_given(
    model: nn.Module, spec: SparsitySpec, pattern: Pattern, example_inputs: Inputs | None, batches: Iterable[Any] | None
) -> None:
    if pattern.kind == "channel":
        raise SparsityError(
            f"pattern {spec.pattern!r} removes whole channels and has no mask: call compress.prune_channels"
        )
    already = list(masked_layers(model))
    if already:
        raise SparsityError(
            f"the model is sparse already ({', '.join(already[:3])}{', ...' if len(already) > 3 else ''}): call "
            "squash_masks before another sparsify"
        )
    if spec.saliency == "hessian" and batches is None:
        raise SparsityError("saliency 'hessian' needs calibration batches: give batches, or use saliency 'magnitude'")
    if spec.permute and example_inputs is None:
        raise SparsityError("sparsity.permute needs example_inputs, a small batch: give it, or set permute to false")


def _masks(
    model: nn.Module,
    layers: dict[str, nn.Module],
    spec: SparsitySpec,
    pattern: Pattern,
    batches: Iterable[Any] | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Masks, and shares of the magnitude that stay, by path; `hessian` sets the updated weights."""
    weights: dict[str, Tensor] = {path: layer.weight for path, layer in layers.items()}  # type: ignore[misc]
    if spec.saliency == "magnitude" or batches is None:
        masks = {path: _named(path, weight, pattern) for path, weight in weights.items()}
        return masks, {path: kept_magnitude(weights[path], mask) for path, mask in masks.items()}
    pruned = prune_layers(
        model,
        layers,
        batches,
        pattern,
        images=spec.calibration_images,
        damping=spec.damping,
        progress=progress,
    )
    kept = {path: kept_magnitude(weights[path], mask) for path, (_, mask) in pruned.items()}
    with torch.no_grad():
        for path, (weight, _) in pruned.items():
            weights[path].copy_(weight)
    return {path: mask for path, (_, mask) in pruned.items()}, kept


def _named(path: str, weight: Tensor, pattern: Pattern) -> Tensor:
    try:
        return pattern_mask(weight, pattern)
    except SparsityError as error:
        raise SparsityError(f"layer {path}: {error}") from error
