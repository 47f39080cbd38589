"""Masks on a model (`sparsify`).

Second-order saliency is SparseGPT's (Frantar and Alistarh, arXiv 2301.00774, section 3), after Optimal Brain Surgeon
(Hassibi and Stork, 1993).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.errors import SparsityError
from compress.graph.compare import alone, own_copy
from compress.graph.inputs import (
    Inputs,
    first_inputs,
    hooked,
    run_batch,
)
from compress.graph.trace import check_module
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec
from compress.sparsity.channel_permutation import PermutationReport, permute_channels
from compress.sparsity.eligibility import (
    Eligibility,
    chosen_layers,
    eligibility,
    weight_of,
)
from compress.sparsity.parametrization import (
    apply_masks,
    from_groups,
    kept_magnitude,
    masked_layers,
    nm_mask,
    pattern_mask,
    unstructured_mask,
)
from compress.support.progress import NoProgress, Progress

BLOCK = 128  # columns whose corrections to the right are applied together
MEMORY_BYTES = 2 * 2**30  # memory for the Hessians that are measured in one pass


def prune_by_hessian(weight: Tensor, hessian: Tensor, pattern: Pattern, *, damping: float) -> tuple[Tensor, Tensor]:
    """Mask a matrix and update the other weights, so that the output error over the calibration inputs is small.

    The weight is (out, in), the Hessian (in, in) the mean of x x^T over the inputs x. Groups of n:m are m consecutive
    columns; an unstructured share is removed from every 128 columns, as in the paper. `damping` is the share of the
    mean diagonal that is added to it. The updated weight is zero where masked.
    """
    mean = hessian.diagonal().mean()
    if not bool(torch.isfinite(hessian).all()) or not mean > 0:
        raise SparsityError("its calibration inputs are all zero, or hold NaN or infinite values")
    work = weight.detach().to(torch.float64, copy=True)
    mask = torch.ones_like(weight, dtype=torch.bool)
    factor = _inverse_factor(hessian.double(), float(mean) * damping)
    step = BLOCK if pattern.kind == "unstructured" else max(1, BLOCK // pattern.m) * pattern.m
    for first in range(0, weight.shape[1], step):
        end = min(first + step, weight.shape[1])
        block, upper = work[:, first:end], factor[first:end, first:end]
        errors = torch.zeros_like(block)
        if pattern.kind == "unstructured":
            mask[:, first:end] = unstructured_mask(block, pattern.ratio, scores=(block / upper.diagonal()) ** 2)
        for i in range(end - first):
            if pattern.kind == "nm" and i % pattern.m == 0:
                group = block[:, i : i + pattern.m]
                scores = (group / upper.diagonal()[i : i + pattern.m]) ** 2
                mask[:, first + i : first + i + pattern.m] = nm_mask(group, pattern.n, pattern.m, scores=scores)
            errors[:, i] = torch.where(mask[:, first + i], 0.0, block[:, i]) / upper[i, i]
            block[:, i:] -= errors[:, i : i + 1] * upper[i, i:]
        work[:, end:] -= errors @ factor[first:end, end:]
    return torch.where(mask, work, 0.0).to(weight.dtype), mask


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor U of H^-1 = U^T U."""
    damped = hessian + damping * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def prune_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Iterable[Any],
    pattern: Pattern,
    *,
    images: int,
    damping: float,
    progress: Progress | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(Updated weight, mask) of layers by their Hessians over calibration images; the model is not changed.

    Layers have no parametrizations; at most `images` images are used.
    """
    progress = progress or NoProgress()
    inputs = calibration_inputs(model, batches, images)
    work = own_copy(model)
    results: dict[str, tuple[Tensor, Tensor]] = {}
    rounds = list(_rounds(layers))
    progress.start("hessian", len(rounds) * len(inputs) + len(layers))
    for paths in rounds:
        copies = {path: work.get_submodule(path) for path in paths}
        hessians = _measure(work, copies, inputs, progress)
        missing = [path for path in paths if path not in hessians]
        if missing:
            raise SparsityError(
                f"these layers never ran on the calibration images: {', '.join(missing)}; disable them with rules, or "
                "use saliency 'magnitude'"
            )
        for path, layer in copies.items():
            try:
                weight, mask = _prune_layer(layer, hessians.pop(path), pattern, damping)
            except SparsityError as error:
                raise SparsityError(f"layer {path}: {error}") from error
            with torch.no_grad():
                weight_of(layer).copy_(weight)
            results[path] = (weight, mask)
            progress.advance("hessian")
    progress.finish("hessian")
    return results


def calibration_inputs(model: nn.Module, batches: Iterable[Any], images: int) -> list[tuple[Tensor, ...]]:
    """The inputs of `model` for the first `images` images, batch by batch."""
    inputs = list(first_inputs(model, batches, images))
    if not inputs:
        raise SparsityError("no calibration batch was given: saliency 'hessian' needs batches of the training split")
    return inputs


def unfolded(layer: Any, x: Tensor) -> Tensor:
    """A layer's input as the vectors that the rows of its weight multiply, channels innermost as in `as_matrix`.

    (groups, vectors, kernel * in channels / groups).
    """
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2).unsqueeze(0)
    convolution: nn.Conv2d = layer
    x = _padded(convolution, x)
    axes = range(2, x.ndim)
    for axis, kernel, stride, dilation in zip(
        axes, convolution.kernel_size, convolution.stride, convolution.dilation, strict=True
    ):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    # (N, C, out..., kernel...) -> (groups, N * out, kernel * C / groups)
    x = x.unflatten(1, (convolution.groups, -1)).movedim(2, -1).movedim(1, 0)
    return x.flatten(1, 1 + len(axes)).flatten(2)


def as_matrix(weight: Tensor, groups: int) -> Tensor:
    """(out, in, kernel...) as (groups, out / groups, kernel * in), input channels innermost."""
    return weight.movedim(1, -1).flatten(1).unflatten(0, (groups, -1))


def _padded(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    pads: list[int] = []
    for axis in reversed(range(len(convolution.kernel_size))):
        if convolution.padding == "same":
            total = convolution.dilation[axis] * (convolution.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        else:
            pads += [0, 0] if convolution.padding == "valid" else [int(convolution.padding[axis])] * 2
    return F.pad(x, pads, mode="constant" if convolution.padding_mode == "zeros" else convolution.padding_mode)


def _rounds(layers: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Paths in order, in groups whose Hessians fit in memory together."""
    group: list[str] = []
    used = 0
    for path, layer in layers.items():
        weight = weight_of(layer)
        size = 4 * getattr(layer, "groups", 1) * weight[0].numel() ** 2
        if group and used + size > MEMORY_BYTES:
            yield group
            group, used = [], 0
        group.append(path)
        used += size
    if group:
        yield group


def _measure(
    model: nn.Module, layers: dict[str, nn.Module], inputs: list[tuple[Tensor, ...]], progress: Progress
) -> dict[str, Tensor]:
    """(groups, d, d) mean of x x^T over a layer's input vectors, by path."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(path: str, layer: nn.Module, args: tuple[Tensor, ...], _output: Any) -> None:
        x = args[0]
        for image in x.split(max(1, len(x) // 8)) if x.ndim > 2 else (x,):  # unfolding multiplies memory by the kernel
            vectors = unfolded(layer, image.detach()).float()
            product = vectors.transpose(1, 2) @ vectors
            sums[path] = sums[path] + product if path in sums else product
            counts[path] = counts.get(path, 0) + vectors.shape[1]

    with hooked(layers, add), torch.no_grad():
        for batch in inputs:
            run_batch(model, batch)
            progress.advance("hessian")
    return {path: total / counts[path] for path, total in sums.items()}


def _prune_layer(layer: nn.Module, hessian: Tensor, pattern: Pattern, damping: float) -> tuple[Tensor, Tensor]:
    weight = weight_of(layer).detach()
    blocks = as_matrix(weight, len(hessian))
    pairs = [prune_by_hessian(w, h, pattern, damping=damping) for w, h in zip(blocks, hessian, strict=True)]
    updated, mask = (from_groups(torch.stack(parts), weight.shape).contiguous() for parts in zip(*pairs, strict=True))
    return updated, mask


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
        return tuple(row.layer for row in self.rows if row.eligible)

    @property
    def density(self) -> float:
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
