"""Masks on a model (`sparsify`), and channels removed by torch-pruning (DepGraph, Fang et al., arXiv 2301.12900)."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import ModelError, SparsityError
from compress.graph.compare import alone
from compress.graph.inputs import Inputs, KeywordInputs, as_inputs, flat_tensors, run_with
from compress.graph.layers import layers as layer_table
from compress.graph.layers import total_macs
from compress.graph.modules import modes_restored
from compress.graph.trace import check_module, trace
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec
from compress.sparsity.channel_permutation import PermutationReport, permute_channels
from compress.sparsity.eligibility import (
    Eligibility,
    check_rules,
    chosen_layers,
    eligibility,
    left_dense,
    run_order,
    weight_of,
    weighted_layers,
)
from compress.sparsity.parametrization import apply_masks, kept_magnitude, masked_layers, pattern_mask
from compress.sparsity.saliency import prune_layers
from compress.support.progress import NoProgress, Progress
from compress.version import install_hint

MULTIPLE = 8  # remaining channels are a multiple of it with kernels `tensorrt`, because tensor-core kernels need that
TRIALS = 8  # bisection steps; each halves the uncertainty of the ratio
LARGEST = 0.95  # largest share of a layer's channels that is removed


@dataclass(frozen=True, kw_only=True)
class ChannelRow:
    """A layer's path, and the shape of its weight before and after pruning."""

    layer: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ChannelReport:
    """Result of channel pruning: every convolution and linear layer, macs of the example batch, and elements."""

    pattern: str
    rows: tuple[ChannelRow, ...]
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int

    @property
    def removed(self) -> float:
        return 1 - self.macs_after / self.macs_before


@alone
def prune_channels(
    model: nn.Module, spec: SparsitySpec | None = None, *, example_inputs: Inputs, progress: Progress | None = None
) -> ChannelReport:
    """Remove channels until the share R of `channel:R` of the macs is removed; in place.

    The parameters become new objects: make the optimizer afterwards. Outputs of the last layer and of layers that a
    rule disables stay.

    Args:
        model: dense, float and traceable.
        spec: None = channel:0.5.
        example_inputs: a small batch, on the model's device.
        progress: is advanced at each step of the bisection.

    Raises:
        ModelError: `model` is no module.
        SparsityError: another pattern, a masked or quantized model, torch-pruning is not installed or cannot follow
            the model, or the macs cannot be reduced so far.

    Examples:
        >>> network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 8, 1))
        >>> spec = compress.SparsitySpec(pattern="channel:0.5", kernels="any")
        >>> round(compress.prune_channels(network, spec, example_inputs=images[:1]).removed, 1)
        0.5
    """
    check_module(model)
    spec, progress = spec or SparsitySpec(pattern="channel:0.5"), progress or NoProgress()
    pattern = _check(model, spec)
    inputs = as_inputs(example_inputs)
    before = _shapes(model)
    check_rules(spec, before)
    macs, parameters = _macs(model, inputs), _parameters(model)
    chosen = _ratio(model, inputs, (1 - pattern.ratio) * macs, spec, progress)
    _remove(model, inputs, chosen, spec)
    rows = tuple(ChannelRow(layer=path, before=before[path], after=after) for path, after in _shapes(model).items())
    return ChannelReport(
        pattern=spec.pattern,
        rows=rows,
        macs_before=macs,
        macs_after=_macs(model, inputs),
        parameters_before=parameters,
        parameters_after=_parameters(model),
    )


def _ratio(
    model: nn.Module, inputs: tuple[Tensor, ...], target: float, spec: SparsitySpec, progress: Progress
) -> float:
    """Bisect for the ratio of channels that leaves the macs nearest to `target`."""
    macs = _macs(model, inputs)
    low, high, chosen, nearest = 0.0, LARGEST, 0.0, macs
    progress.start("prune channels", TRIALS)
    for _ in range(TRIALS):
        ratio = (low + high) / 2
        trial = copy.deepcopy(model)
        _remove(trial, inputs, ratio, spec)
        got = _macs(trial, inputs)
        if abs(got - target) < abs(nearest - target):
            chosen, nearest = ratio, got
        low, high = (ratio, high) if got > target else (low, ratio)
        progress.advance("prune channels", macs_removed=1 - got / macs)
    progress.finish("prune channels")
    if abs(nearest - target) > 0.1 * macs:
        raise SparsityError(
            f"pattern {spec.pattern!r}: the nearest that whole channels reach is {1 - nearest / macs:.2f} of the macs; "
            "ask for another share, enable more layers, or set kernels to 'any', which rounds less"
        )
    return chosen


def _check(model: nn.Module, spec: SparsitySpec) -> Pattern:
    pattern = check_sparsity_spec(spec)
    if pattern.kind != "channel":
        raise SparsityError(f"pattern {spec.pattern!r} masks weights: call sparsify, or use channel:0.5")
    if any(getattr(module, "is_quantizer", False) for module in model.modules()):
        raise SparsityError("the model is quantized: remove channels of the float model, and quantize the result")
    if masked_layers(model):
        raise SparsityError("the model is masked already: call squash_masks before removing channels")
    return pattern


def _remove(model: nn.Module, inputs: tuple[Tensor, ...], ratio: float, spec: SparsitySpec) -> None:
    """Remove the weakest `ratio` of every layer's channels, in place."""
    library = _library()
    layers = weighted_layers(model)
    ignored = [layers[path] for path in layers if left_dense(path, spec)]
    ignored.append(layers[run_order(model, layers, inputs)[-1]])
    with modes_restored(model), torch.no_grad():
        shapes = [t.shape for t in flat_tensors(run_with(model.eval(), inputs))]
        try:
            with warnings.catch_warnings(), torch.enable_grad():  # torch-pruning reads the graph that autograd records
                warnings.filterwarnings("ignore", message="Unwrapped parameters", category=UserWarning)
                library.pruner.BasePruner(
                    model,
                    dict(zip(inputs.names, inputs, strict=True)) if isinstance(inputs, KeywordInputs) else inputs,
                    importance=library.importance.GroupMagnitudeImportance(p=2),
                    pruning_ratio=ratio,
                    ignored_layers=ignored,
                    round_to=MULTIPLE if spec.kernels == "tensorrt" else None,
                ).step()
            after = [t.shape for t in flat_tensors(run_with(model, inputs))]
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError) as error:
            raise SparsityError(
                f"torch-pruning cannot remove channels of {type(model).__name__}: {error}; leave out layers with rules "
                "(enable: false)"
            ) from error
    if shapes != after:
        raise SparsityError(
            f"removing channels changed the model's outputs from {[tuple(s) for s in shapes]} to "
            f"{[tuple(s) for s in after]}: leave out the layers that compute them with rules (enable: false)"
        )


def _library() -> ModuleType:
    try:
        return importlib.import_module("torch_pruning")
    except ImportError as error:
        raise SparsityError(f"channel pruning needs the torch-pruning library: {install_hint('pruning')}") from error


def _macs(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    try:
        macs, unknown = total_macs(layer_table(trace(model, inputs)))
    except ModelError as error:
        raise SparsityError(f"the model's macs cannot be counted: {error}") from error
    if unknown:
        raise SparsityError(f"the macs of these layers are unknown, so no share of them can be reached: {unknown}")
    return macs


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {path: tuple(weight_of(layer).shape) for path, layer in weighted_layers(model).items()}


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


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
