"""Learned selection of n:m masks by the Gumbel softmax (MaskLLM, Fang et al., arXiv 2409.17481); weights train too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

DEVIATION, STRENGTH = 0.01, 3.0
"""Standard deviation of the first logits, and of how many deviations the mask by magnitude is ahead."""
TEMPERATURE, SCALE = (4.0, 0.05), (100.0, 500.0)
"""First and last value, between which each moves linearly."""
TRAVEL = 0.2
"""How far Adam can move a logit in all; the mask by magnitude begins 0.06 ahead of the one that shares none of it."""
REGULARIZATION = 1e-5
"""Of the squared weights that a mask keeps, which the loss is lowered by, so that gradients do not vanish."""
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
    """The inverse of `as_groups`."""
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
        """The values at a share (0 to 1) of so many updates."""
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
