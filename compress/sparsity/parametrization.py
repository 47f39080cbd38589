"""Masks on a model, and the schedule by which they grow or are chosen.

Masks are boolean tensors of a weight's shape, True where the weight stays, in a parametrization of `weight` that
deep-copies, pickles and compiles. An n:m mask keeps n of every m consecutive *input channels* (axis 1), each group at
one kernel position, as NVIDIA's sparse tensor cores read a weight (Mishra et al., arXiv 2104.08378).

Schedules depend on the model's state and the step alone. `gradual` removes 1 - (1 - t)^3 of the pattern's elements at
time t in [0, 1], smallest magnitudes first (Zhu and Gupta, arXiv 1710.01878, equation 1). `sr-ste` recomputes the mask
from dense weights; masked ones decay, w -= lr * decay * w (Zhou et al., arXiv 2102.04010, equation 9). `gumbel` trains
the choice of each n:m group by the step's gradients (MaskLLM, Fang et al., arXiv 2409.17481): call `after_step` before
`zero_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import SparsityError, near_misses
from compress.graph.modules import bake, register_picklable
from compress.graph.ops import tensor_of
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec, parse_pattern

# Standard deviation of the first logits, and of how many deviations the mask by magnitude is ahead.
DEVIATION, STRENGTH = 0.01, 3.0
TEMPERATURE, SCALE = (4.0, 0.05), (100.0, 500.0)  # first and last value, between which each moves linearly
# How far Adam can move a logit in all; the mask by magnitude begins 0.06 ahead of the one that shares none of it.
TRAVEL = 0.2
# Of the squared weights that a mask keeps, which the loss is lowered by, so that gradients do not vanish.
REGULARIZATION = 1e-5
BETAS, EPSILON = (0.9, 0.999), 1e-12


def patterns(n: int, m: int, device: torch.device | None = None) -> Tensor:
    """All masks that keep n of m, float (C(m, n), m).

    >>> patterns(1, 3)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    kept = torch.tensor(list(combinations(range(m), n)), device=device)
    return torch.zeros(len(kept), m, device=device).scatter_(1, kept, 1.0)


def as_groups(weight: Tensor, m: int) -> Tensor:
    """A weight (out, in, ...) as (groups, m): m consecutive input channels at one kernel position."""
    return weight.movedim(1, -1).reshape(-1, m)


def from_groups(groups: Tensor, shape: Sequence[int]) -> Tensor:
    out, channels, *kernel = shape
    return groups.reshape(out, *kernel, channels).movedim(-1, 1)


def first_logits(mask: Tensor, masks: Tensor, noise: Tensor) -> Tensor:
    """Logits (groups, C) that prefer a mask: the paper's prior, noise + strength * deviation * similarity.

    `mask` is (groups, m), `masks` (C, m), `noise` (groups, C), standard normal.
    """
    shared = mask.to(masks.dtype) @ masks.T
    return DEVIATION * (noise + STRENGTH * (shared - shared.mean(1, keepdim=True)))


def gumbel_softmax(logits: Tensor, noise: Tensor, scale: float | Tensor, temperature: float | Tensor) -> Tensor:
    """Shares of the patterns in the soft mask, softmax((scale * logits + noise) / temperature); all (groups, C).

    `noise` is standard Gumbel; probabilities of the patterns are softmax(scale * logits). Low temperatures bring the
    shares near to 0 and 1.
    """
    return ((scale * logits + noise) / temperature).softmax(1)


def logit_gradient(shares: Tensor, masks: Tensor, gradient: Tensor, factor: float | Tensor) -> Tensor:
    """Gradient of the logits, (groups, C), from that (groups, m) of the soft mask; `factor` is scale / temperature."""
    worth = gradient @ masks.T
    return factor * shares * (worth - (shares * worth).sum(1, keepdim=True))


def gumbel_noise(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel numbers, -log(-log(u))."""
    return -torch.empty(shape, device=device).exponential_(generator=generator).log()


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A time of the selection, the `count`-th update; each value may be a tensor () instead.

    `lr` is of the logits; `noise` is its factor: 0 draws the best pattern.
    """

    count: float | Tensor
    lr: float | Tensor
    scale: float | Tensor
    temperature: float | Tensor
    noise: float | Tensor = 1.0

    @classmethod
    def at(cls, share: float, *, count: int, updates: float) -> Moment:
        temperature, scale = (first + share * (last - first) for first, last in (TEMPERATURE, SCALE))
        return cls(count=count, lr=TRAVEL / max(1.0, updates), scale=scale, temperature=temperature)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """State of the selection, each (groups, C); `advance` changes it in place.

    Attributes:
        mean, square: Adam's moments of the logits' gradients (Kingma and Ba, arXiv 1412.6980).
        shares: of the patterns in the soft mask that was drawn last.
    """

    logits: Tensor
    mean: Tensor
    square: Tensor
    shares: Tensor

    def advance(self, weight: Tensor, gradient: Tensor, masks: Tensor, noise: Tensor, now: Moment) -> Tensor:
        """Move the logits against their gradient; return the mask drawn, boolean (groups, m).

        A gradient (groups, m), of the loss with respect to the mask, counts as zero where it is not finite; `noise`,
        (groups, C), is standard Gumbel.
        """
        drawn = masks[self.shares.argmax(1)]
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0) - 2 * REGULARIZATION * weight.square() * drawn
        slope = logit_gradient(self.shares, masks, gradient, now.scale / now.temperature)
        self.mean.lerp_(slope, 1 - BETAS[0])
        self.square.lerp_(slope.square(), 1 - BETAS[1])
        mean, square = (
            part / (1 - beta**now.count) for part, beta in zip((self.mean, self.square), BETAS, strict=True)
        )
        self.logits.sub_(now.lr * mean / (square.sqrt() + EPSILON))
        self.shares.copy_(gumbel_softmax(self.logits, now.noise * noise, now.scale, now.temperature))
        return masks[self.shares.argmax(1)] > 0


def nm_mask(weight: Tensor, n: int, m: int, *, scores: Tensor | None = None) -> Tensor:
    """Keep the n best of every m consecutive input channels; of equal scores the lower channel.

    The weight is (out, in, ...), the scores have its shape (None = magnitudes); `m` divides the input channels.

    >>> nm_mask(torch.tensor([[0.1, -3.0, 2.0, 0.5]]), 2, 4)
    tensor([[False,  True,  True, False]])
    """
    if not 1 <= n < m:
        raise SparsityError(f"pattern {n}:{m} keeps {n} of every {m}: n must be at least 1 and below m")
    if weight.ndim < 2 or weight.shape[1] % m:
        raise SparsityError(
            f"pattern {n}:{m} needs input channels (axis 1) that are a multiple of {m}, and the weight is "
            f"{tuple(weight.shape)}: leave this layer dense"
        )
    groups = _scores(weight, scores).movedim(1, -1).unflatten(-1, (-1, m))  # (out, ..., in / m, m)
    # The rank is the number of better elements, which needs no sort; of equal elements the lower channel is better.
    rank = torch.zeros(groups.shape, dtype=torch.int16, device=weight.device)
    index = torch.arange(m, device=weight.device)
    for j in range(m):
        other = groups[..., j : j + 1]
        rank += (other > groups) | ((other == groups) & (j < index))
    return (rank < n).flatten(-2).movedim(-1, 1).contiguous()


def unstructured_mask(weight: Tensor, ratio: float, *, scores: Tensor | None = None) -> Tensor:
    """Remove the share `ratio`, rounded to whole elements, with the smallest scores (None = magnitudes)."""
    if not 0 <= ratio <= 1:
        raise SparsityError(f"the share taken away is {ratio}: it must be between 0 and 1")
    order = _scores(weight, scores).flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[order[: weight.numel() - round(ratio * weight.numel())]] = True
    return mask.view(weight.shape)


def pattern_mask(weight: Tensor, pattern: Pattern, *, scores: Tensor | None = None) -> Tensor:
    """Mask of `weight` by an n:m or unstructured pattern; errors as in those functions, or for a channel pattern."""
    if pattern.kind == "nm":
        return nm_mask(weight, pattern.n, pattern.m, scores=scores)
    if pattern.kind == "unstructured":
        return unstructured_mask(weight, pattern.ratio, scores=scores)
    raise SparsityError(f"pattern {pattern} removes whole channels and has no mask: call compress.prune_channels")


def partial_mask(weight: Tensor, mask: Tensor, level: float) -> Tensor:
    """A step on the way to `mask`: it removes only the share `level` of its elements, smallest magnitudes first."""
    masked = int(mask.numel() - mask.sum())
    spared = masked - round(level * masked)
    order = weight.detach().abs().masked_fill(mask, -1.0).flatten().sort(descending=True, stable=True).indices
    partial = mask.clone().flatten()
    partial[order[:spared]] = True
    return partial.view(mask.shape)


def kept_magnitude(weight: Tensor, mask: Tensor) -> float:
    magnitudes = weight.detach().abs().double()
    total = magnitudes.sum().item()
    return (magnitudes * mask).sum().item() / total if total else 1.0


def verify_nm(weight: np.ndarray[Any, Any], n: int, m: int, *, axis: int = 1) -> int:
    """Count the groups of m consecutive values along `axis` with more than n non-zeros; 0 = the pattern holds.

    Integer weights must have zero point 0. `axis` is that of the input channels: 1 for Conv, and Gemm with transB; 0
    for MatMul's right operand.
    """
    if not -weight.ndim <= axis < weight.ndim or weight.shape[axis] % m:
        raise SparsityError(f"{n}:{m} needs a multiple of {m} along axis {axis}, and the weight is {weight.shape}")
    nonzero = np.moveaxis(weight != 0, axis, -1)
    groups = nonzero.reshape(*nonzero.shape[:-1], -1, m)
    return int((groups.sum(axis=-1) > n).sum())


def _scores(weight: Tensor, scores: Tensor | None) -> Tensor:
    chosen = weight.detach().abs() if scores is None else scores.detach()
    if chosen.shape != weight.shape:
        raise SparsityError(f"scores of {tuple(chosen.shape)} do not fit a weight of {tuple(weight.shape)}")
    if not bool(torch.isfinite(chosen).all()):
        raise SparsityError("the weight (or its scores) holds NaN or infinite values, which have no rank")
    return chosen


_PREFIX = "parametrizations.weight."


class NMMask(nn.Module):
    """The mask of one weight, which becomes original * mask.

    `mask` is a boolean buffer of the weight's shape, True = kept; `straight_through` passes the gradient to masked
    elements too.
    """

    mask: Tensor

    def __init__(self, mask: Tensor, *, pattern: str = "", straight_through: bool = False) -> None:
        super().__init__()
        if mask.dtype != torch.bool:
            raise SparsityError(f"a mask must be boolean, got {mask.dtype}")
        self.register_buffer("mask", mask)
        self.pattern = pattern
        self.straight_through = straight_through

    def forward(self, weight: Tensor) -> Tensor:
        masked = torch.where(self.mask, weight, 0.0)
        # The second term is zero and has the gradient of the elements that the first one leaves out.
        return masked + torch.where(self.mask, 0.0, weight - weight.detach()) if self.straight_through else masked

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        return f"{self.pattern or 'mask'}, density={self.mask.float().mean().item():.3f}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *args: Any
    ) -> None:
        layer = prefix.removesuffix(_PREFIX + "0.")
        if f"{prefix}mask" not in state_dict and strict:
            raise SparsityError(
                f"the checkpoint is of a dense model and {layer.removesuffix('.') or 'the model'} is masked: load it "
                "before sparsify, or into a model whose masks were squashed"
            )
        got = state_dict.get(f"{prefix}mask")
        if isinstance(got, Tensor) and got.shape != self.mask.shape:
            raise SparsityError(
                f"{layer}weight: the checkpoint's mask is {tuple(got.shape)} and the model's {tuple(self.mask.shape)}"
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *args)


class LearnedMask(NMMask):
    """An n:m mask whose choice is trained (`selection`), by `MaskSchedule`.

    Attributes:
        probe: parameter that is zero in every forward pass, and whose gradient is the mask's; the schedule zeroes it.
        choices: (C, m), all masks of a group.
        logits, mean, square, shares: see `Selection`; (groups, C).
    """

    choices: Tensor
    logits: Tensor
    mean: Tensor
    square: Tensor
    shares: Tensor

    def __init__(self, mask: Tensor, *, pattern: str, generator: torch.Generator) -> None:
        super().__init__(mask, pattern=pattern)
        known = parse_pattern(pattern)
        choices, groups = patterns(known.n, known.m, mask.device), as_groups(mask, known.m)
        noise = torch.randn(len(groups), len(choices), generator=generator).to(mask.device)
        self.probe = nn.Parameter(torch.zeros(mask.shape, device=mask.device))
        self.register_buffer("choices", choices, persistent=False)
        self.register_buffer("logits", first_logits(groups, choices, noise))
        self.register_buffer("mean", torch.zeros_like(noise))
        self.register_buffer("square", torch.zeros_like(noise))
        self.register_buffer("shares", gumbel_softmax(self.logits, torch.zeros_like(noise), SCALE[0], TEMPERATURE[0]))

    @property
    def selection(self) -> Selection:
        return Selection(logits=self.logits, mean=self.mean, square=self.square, shares=self.shares)

    def forward(self, weight: Tensor) -> Tensor:
        return super().forward(weight) + weight.detach() * self.probe


def apply_masks(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    pattern: str = "",
    straight_through: bool = False,
    learned: int | None = None,
) -> None:
    """Mask layers of a dense model, in place; the parameters stay the same objects.

    `masks` are boolean, of the weights' shapes; `pattern` is shown by `print(model)`. `learned` is the seed of the
    first logits of masks that are trained; None = masks that are given.
    """
    modules = dict(model.named_modules())
    for path, mask in masks.items():
        if path not in modules:
            raise SparsityError(f"the model has no layer {path!r}{near_misses(path, modules)}")
        _check_fits(path, modules[path], mask)
    generator = torch.Generator().manual_seed(learned or 0)
    for path, mask in masks.items():
        module = modules[path]
        own = mask.to(tensor_of(module).device, copy=True)
        if learned is None:
            part = NMMask(own, pattern=pattern, straight_through=straight_through)
        else:
            part = LearnedMask(own, pattern=pattern, generator=generator)
        register_picklable(module, "weight", part.train(module.training))


@dataclass(frozen=True, kw_only=True)
class MaskedLayer:
    """A layer, its mask module, and the trained parameter."""

    module: nn.Module
    part: NMMask
    original: nn.Parameter

    @property
    def mask(self) -> Tensor:
        return self.part.mask


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    layers = ((path, _masked(module)) for path, module in model.named_modules())
    return {path: layer for path, layer in layers if layer is not None}


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {path: layer.mask.clone() for path, layer in masked_layers(model).items()}


def squash_masks(model: nn.Module) -> dict[str, Tensor]:
    """Bake the masks in: weights become plain parameters, zero where masked; in place.

    Further training would change the zeros: hold them with `apply_masks(model, masks)`.

    Returns:
        The masks, by layer path.

    Raises:
        SparsityError: no layer is masked.

    Examples:
        >>> network = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3)))
        >>> report = compress.sparsify(network, compress.SparsitySpec())
        >>> {path: mask.float().mean().item() for path, mask in compress.squash_masks(network).items()}
        {'1': 0.5}
    """
    masks = masks_of(model)
    if not masks:
        raise SparsityError("no layer of the model is masked: call sparsify first, or leave squash_masks out")
    for path in masks:
        bake(model.get_submodule(path), "weight")
    return masks


def _masked(module: nn.Module) -> MaskedLayer | None:
    if not parametrize.is_parametrized(module, "weight"):
        return None
    chains: Any = module.parametrizations
    parts = chains["weight"]
    return MaskedLayer(module=module, part=parts[0], original=parts.original) if isinstance(parts[0], NMMask) else None


def _check_fits(path: str, module: nn.Module, mask: Tensor) -> None:
    if parametrize.is_parametrized(module):
        how = "masked" if _masked(module) is not None else "parametrized by something else"
        raise SparsityError(f"layer {path} is {how} already: call squash_masks (or remove it) before masking it")
    weight = module._parameters.get("weight")
    if weight is None:
        raise SparsityError(f"layer {path} ({type(module).__name__}) has no parameter `weight` to mask")
    if mask.dtype != torch.bool or mask.shape != weight.shape:
        raise SparsityError(
            f"layer {path}: a boolean mask of {tuple(weight.shape)} is needed, got {mask.dtype} of {tuple(mask.shape)}"
        )


GRADUAL_UPDATES = 100


class MaskSchedule:
    """Changes the masks of a model while it trains.

    Args:
        model: masked by `sparsify` with the same spec; it may be wrapped (DistributedDataParallel, torch.compile).

    Raises:
        SparsityError: the spec is not acceptable, or no layer of the model is masked.

    Examples:
        >>> network = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3)))
        >>> spec = compress.SparsitySpec(schedule="gradual")
        >>> report = compress.sparsify(network, spec)
        >>> schedule = compress.MaskSchedule(network, spec)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> for step in range(1, 4):  # after the loss, its backward and `optimizer.step()`
        ...     schedule.after_step(step, 3, optimizer)
        >>> (network[1].weight == 0).float().mean().item()
        0.5
    """

    def __init__(self, model: nn.Module, spec: SparsitySpec) -> None:
        self.pattern = check_sparsity_spec(spec)
        self.spec = spec
        self.model = model
        if not masked_layers(model):
            raise SparsityError("no layer of the model is masked: call sparsify before MaskSchedule")

    def after_step(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        """Update the masks and mask the optimizer's state; to be called after every optimizer step.

        Args:
            step: optimizer steps done, 1 to total_steps.
            total_steps: of the whole training.
            optimizer: made the step; its state is masked if masks change.
        """
        if self.spec.schedule == "one-shot":
            if step == 1:  # the momentum of an optimizer that is older than the masks would move masked weights
                mask_optimizer_state(optimizer, self.model)
            return
        begin, end = self.spec.begin * total_steps, self.spec.end * total_steps
        if self.spec.schedule == "sr-ste":
            _pull(self.model, optimizer, self.spec.sr_ste_decay)
            for layer in masked_layers(self.model).values():
                layer.part.straight_through = step < end
        if self.spec.schedule == "gumbel":
            self._select(step, begin, end)
        elif self._due(step, begin, end):
            time = min(1.0, max(0.0, (step - begin) / (end - begin)))
            self._change(time)
            if self.spec.schedule == "gradual":
                mask_optimizer_state(optimizer, self.model)

    def _due(self, step: int, begin: float, end: float) -> bool:
        """True if masks change; the first step at or after the end makes them final."""
        if not begin <= step < end + 1:
            return False
        return step >= end or step % self._every(end - begin) == 0

    def _every(self, steps: float) -> int:
        """Steps between two changes, of which there are `steps`."""
        if self.spec.update_steps is not None:
            return self.spec.update_steps
        return max(1, round(steps / GRADUAL_UPDATES)) if self.spec.schedule == "gradual" else 1

    def _select(self, step: int, begin: float, end: float) -> None:
        layers = masked_layers(self.model)
        learned = {path: layer.part for path, layer in layers.items() if isinstance(layer.part, LearnedMask)}
        if len(learned) < len(layers):
            raise SparsityError("schedule 'gumbel' needs masks that are learned: call sparsify with the same spec")
        if self._due(step, begin, end) and step >= end:
            for part in learned.values():
                keep_best(part)
        elif self._due(step, begin, end):
            every = self._every(end - begin)
            count = step // every - max(0, math.ceil(begin / every) - 1)
            now = Moment.at((step - begin) / (end - begin), count=count, updates=(end - begin) / every)
            device = next(iter(learned.values())).mask.device
            generator = torch.Generator(device).manual_seed(self.spec.seed * 1_000_003 + step)
            for path, layer in layers.items():
                if learned[path].probe.grad is None:
                    raise SparsityError(
                        f"the mask of {path} has no gradient: with schedule 'gumbel', call after_step after "
                        "optimizer.step() and before zero_grad()"
                    )
                select(layer, now, gumbel_noise(tuple(learned[path].logits.shape), device, generator))
        for part in learned.values():
            part.probe.detach().zero_()

    def _change(self, time: float) -> None:
        for layer in masked_layers(self.model).values():
            mask = pattern_mask(layer.original, self.pattern)
            if self.spec.schedule == "gradual":
                mask = partial_mask(layer.original, mask, 1 - (1 - time) ** 3)
            layer.mask.copy_(mask)


@torch.no_grad()
def select(layer: MaskedLayer, now: Moment, noise: Tensor) -> None:
    """Train a layer's learned mask by the gradient of its probe, and draw the next one; in place."""
    part: Any = layer.part  # a LearnedMask
    weight, gradient = (as_groups(x, part.choices.shape[1]) for x in (layer.original, part.probe.grad))
    drawn = part.selection.advance(weight, gradient, part.choices, noise, now)
    part.mask.copy_(from_groups(drawn, part.mask.shape))


@torch.no_grad()
def keep_best(part: LearnedMask) -> None:
    part.mask.copy_(from_groups(part.choices[part.logits.argmax(1)] > 0, part.mask.shape))


def mask_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Zero the optimizer's moments of masked elements; return the number of state tensors."""
    count = 0
    with torch.no_grad():
        for layer in masked_layers(model).values():
            state: Mapping[str, Any] = optimizer.state.get(layer.original, {})
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == layer.mask.shape:
                    value.mul_(layer.mask)
                    count += 1
    return count


@torch.no_grad()
def shrink_masked(layer: MaskedLayer, share: float | Tensor) -> None:
    """Shrink a layer's masked weights by a share, in place; a tensor () may vary in a CUDA graph."""
    layer.original.mul_((1.0 - share * ~layer.mask).to(layer.original.dtype))


def _pull(model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    for layer in masked_layers(model).values():
        shrink_masked(layer, rates.get(id(layer.original), 0.0) * decay)
