"""Masks that change during training, as a function of the model's state and the step alone.

* `gradual`: removes 1 - (1 - t)^3 of the pattern's elements at time t in [0, 1], smallest magnitudes first (Zhu and
  Gupta, arXiv 1710.01878, equation 1).
* `sr-ste`: recomputes the mask from dense weights; masked ones decay, w -= lr * decay * w after the step (Zhou
  et al., arXiv 2102.04010, equation 9).
* `gumbel`: trains the choice of each n:m group (`selection`) by the step's gradients: call `after_step` before
  `zero_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import SparsityError
from compress.sparsity.parametrization import (
    LearnedMask,
    MaskedLayer,
    Moment,
    as_groups,
    from_groups,
    gumbel_noise,
    masked_layers,
    partial_mask,
    pattern_mask,
)
from compress.sparsity.spec import SparsitySpec, check_sparsity_spec

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
    """Set a learned mask to each group's most probable pattern."""
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
