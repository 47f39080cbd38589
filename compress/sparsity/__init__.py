"""Sparsity: n:m and unstructured masks, channel permutation, channel pruning; through training to a plain model.

Here: the `sparsity` section of a recipe, which is also an argument of `compress.sparsify`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from compress.errors import SparsityError, near_misses
from compress.support.validation import AtLeastOne, NotNegative, Positive, Seed, Share, ShareBelowOne, validate

Saliency = Literal["magnitude", "hessian"]
Schedule = Literal["one-shot", "gradual", "sr-ste", "gumbel"]
Kernels = Literal["tensorrt", "any"]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A parsed pattern; `ratio` is the share taken away of the weights or (`channel`) macs; n and m are of `nm`."""

    kind: Literal["nm", "unstructured", "channel"]
    ratio: float
    n: int = 0
    m: int = 0

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.kind == "nm" else f"{self.kind}:{self.ratio:g}"


@dataclass(frozen=True, kw_only=True)
class SparsityRule:
    """An exception for some layers: they are masked, or stay dense. The last rule that matches a layer wins.

    Attributes:
        match: module path or glob (`fc`, `layer1.*`, `*.downsample.0`).
        enable: False leaves the layer dense; True masks it even where the defaults would not (first and last layer,
            grouped convolutions, channel counts that no sparse kernel takes).
    """

    match: str
    enable: bool = True


@dataclass(frozen=True, kw_only=True)
class SparsitySpec:
    """Sparsity of a network.

    Attributes:
        pattern: `n:m` keeps n values of every m along the input channels (`2:4` is what NVIDIA's sparse tensor cores
            run); `unstructured:0.5` takes away that share of each layer's weights; `channel:0.5` removes whole channels
            until that share of the network's macs is gone.
        saliency: rule that chooses the weights to take away: the smallest `magnitude`, or the cheapest under a
            second-order model of the layer's output error (`hessian`, SparseGPT, arXiv 2301.00774), which also updates
            the weights that stay.
        permute: first search channel permutations, which keep the network's function and raise the magnitude that n:m
            can keep.
        permute_seconds: time for that search, over the whole network.
        schedule: `one-shot` masks at once and holds the masks; `gradual` masks step by step during training;
            `sr-ste` recomputes the masks from dense weights during training (arXiv 2102.04010); `gumbel` trains the
            choice of each n:m group by a Gumbel softmax (MaskLLM, arXiv 2409.17481).
        begin, end: first and last share of the training steps between which masks change (`gradual`, `sr-ste`,
            `gumbel`).
        update_steps: optimizer steps between changes; None = every step for `sr-ste` and `gumbel`, a hundred times in
            all for `gradual`.
        sr_ste_decay: decay that draws masked weights to zero in `sr-ste`, times the learning rate.
        calibration_images: images of the training split that `hessian` is measured on.
        damping: share of the Hessian's mean diagonal that is added to it.
        kernels: `tensorrt` leaves layers alone whose shape its sparse kernels do not take; `any` asks only that m
            divides the input channels.
        rules: exceptions, in order, the last match wins; one that matches nothing is an error.
        seed: seed of the permutation search and of the draws of `gumbel`.

    Examples:
        >>> network = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3)))
        >>> report = compress.sparsify(network, compress.SparsitySpec(pattern="2:4"))
        >>> round(report.density, 2)  # one layer of three has half of its weights
        0.83
    """

    pattern: str = "2:4"
    saliency: Saliency = "magnitude"
    permute: bool = False
    permute_seconds: Positive = 60.0
    schedule: Schedule = "one-shot"
    begin: ShareBelowOne = 0.0
    end: Share = 0.8
    update_steps: AtLeastOne | None = None
    sr_ste_decay: NotNegative = 2e-4
    calibration_images: AtLeastOne = 128
    damping: Positive = 0.01
    kernels: Kernels = "tensorrt"
    rules: tuple[SparsityRule, ...] = ()
    seed: Seed = 0


def parse_pattern(text: str) -> Pattern:
    """Read `n:m`, `unstructured:R` or `channel:R`.

    >>> parse_pattern("2:4")
    Pattern(kind='nm', ratio=0.5, n=2, m=4)
    >>> str(parse_pattern("unstructured:0.75"))
    'unstructured:0.75'
    """
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = int(match[1]), int(match[2])
        if not 1 <= n < m:
            raise SparsityError(f"pattern {text!r} keeps {n} of every {m}: n must be at least 1 and below m (2:4, 1:4)")
        return Pattern(kind="nm", n=n, m=m, ratio=1 - n / m)
    name, _, number = text.partition(":")
    kinds: dict[str, Literal["unstructured", "channel"]] = {"unstructured": "unstructured", "channel": "channel"}
    if name in kinds:
        ratio = _number(number)
        if not 0 < ratio < 1:
            raise SparsityError(f"pattern {text!r}: the share taken away must be above 0 and below 1 ({name}:0.5)")
        return Pattern(kind=kinds[name], ratio=ratio)
    hint = near_misses(name, kinds)
    raise SparsityError(f"pattern {text!r} is unknown{hint} (allowed: n:m such as 2:4, unstructured:0.5, channel:0.5)")


def check_sparsity_spec(spec: SparsitySpec) -> Pattern:
    """Refuse a specification that cannot be followed, and return the parsed pattern."""
    validate(spec, SparsitySpec, section="sparsity", error=SparsityError, rules=sparsity_contradictions)
    return parse_pattern(spec.pattern)


def sparsity_contradictions(spec: SparsitySpec) -> Iterator[str]:
    try:
        pattern = parse_pattern(spec.pattern)
    except SparsityError as error:
        yield str(error)
        return
    if spec.end <= spec.begin:
        yield f"sparsity.end is {spec.end!r}: it must be above sparsity.begin, which is {spec.begin!r}"
    if spec.saliency == "hessian" and spec.schedule != "one-shot":
        yield (
            f"sparsity.saliency 'hessian' updates the weights once, so it goes with schedule 'one-shot', not "
            f"{spec.schedule!r}: choose saliency 'magnitude' or schedule 'one-shot'"
        )
    if spec.permute and pattern.kind != "nm":
        yield f"sparsity.permute helps n:m patterns only, not {spec.pattern!r}: set it to false"
    if spec.schedule == "gumbel" and pattern.kind == "unstructured":
        yield f"sparsity.schedule 'gumbel' chooses masks of n:m groups, and {spec.pattern!r} has none: set 2:4"
    if pattern.kind == "channel" and (spec.saliency, spec.schedule) != ("magnitude", "one-shot"):
        yield (
            f"pattern {spec.pattern!r} removes channels once, by magnitude: saliency must be 'magnitude' and schedule "
            f"'one-shot', not {spec.saliency!r} and {spec.schedule!r}"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
