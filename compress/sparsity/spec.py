"""What sparsity a recipe asks for: its `sparsity` section."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from compress.errors import SparsityError, near_misses

Saliency = Literal["magnitude", "hessian"]
Schedule = Literal["one-shot", "gradual", "sr-ste"]
Kernels = Literal["tensorrt", "any"]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        kind: `nm` (n values kept of every m along the input channels), `unstructured` (zeros anywhere) or `channel`
            (whole channels removed).
        n, m: of kind `nm`, else 0.
        ratio: share taken away: of the weights (`nm`, `unstructured`) or of the macs (`channel`).
    """

    kind: Literal["nm", "unstructured", "channel"]
    ratio: float
    n: int = 0
    m: int = 0

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.kind == "nm" else f"{self.kind}:{self.ratio:g}"


@dataclass(frozen=True, kw_only=True)
class SparsityRule:
    """Says of the layers that `match` names whether they are masked. The last rule that matches a layer wins.

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
        saliency: what is taken away: the smallest `magnitude`, or what a second-order model of the layer's output
            error finds cheapest (`hessian`, SparseGPT, arXiv 2301.00774), which also updates the weights that stay.
        permute: search channel permutations first, which keep the network's function and raise what n:m can keep.
        permute_seconds: time for that search, over the whole network.
        schedule: `one-shot` masks at once and holds the masks; `gradual` masks step by step during training;
            `sr-ste` recomputes the masks from dense weights during training (arXiv 2102.04010).
        begin, end: shares of the training steps between which masks change (`gradual`, `sr-ste`).
        update_steps: optimizer steps between changes; None = every step for `sr-ste`, a hundred times in all for
            `gradual`.
        sr_ste_decay: how strongly masked weights are drawn to zero in `sr-ste`, times the learning rate.
        calibration_images: images of the training split that `hessian` is measured on.
        damping: share of the Hessian's mean diagonal that is added to it.
        kernels: `tensorrt` leaves layers alone whose shape its sparse kernels do not take; `any` asks only that m
            divides the input channels.
        rules: exceptions, in order, the last match wins; one that matches nothing is an error.
        seed: of the permutation search.
    """

    pattern: str = "2:4"
    saliency: Saliency = "magnitude"
    permute: bool = False
    permute_seconds: float = 60.0
    schedule: Schedule = "one-shot"
    begin: float = 0.0
    end: float = 0.8
    update_steps: int | None = None
    sr_ste_decay: float = 2e-4
    calibration_images: int = 128
    damping: float = 0.01
    kernels: Kernels = "tensorrt"
    rules: tuple[SparsityRule, ...] = ()
    seed: int = 0


def parse_pattern(text: str) -> Pattern:
    """Read `n:m`, `unstructured:R` or `channel:R`.

    Raises:
        SparsityError: anything else, n not between 1 and m - 1, or R not between 0 and 1.

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
    """Refuse values that cannot be, or that contradict each other, and return the parsed pattern.

    Raises:
        SparsityError: names the key, what was got and what is allowed.
    """
    pattern = parse_pattern(spec.pattern)
    for key, allowed in (("saliency", Saliency), ("schedule", Schedule), ("kernels", Kernels)):
        got = getattr(spec, key)
        if got not in get_args(allowed):
            names = ", ".join(get_args(allowed))
            raise SparsityError(
                f"sparsity.{key} is {got!r}{near_misses(str(got), get_args(allowed))} (one of: {names})"
            )
    for key, fits, words in _ranges(spec):
        if not fits:
            raise SparsityError(f"sparsity.{key} is {getattr(spec, key)!r}: it must be {words}")
    if spec.saliency == "hessian" and spec.schedule != "one-shot":
        raise SparsityError(
            f"sparsity.saliency 'hessian' updates the weights once, so it goes with schedule 'one-shot', not "
            f"{spec.schedule!r}: choose saliency 'magnitude' or schedule 'one-shot'"
        )
    if spec.permute and pattern.kind != "nm":
        raise SparsityError(f"sparsity.permute helps n:m patterns only, not {spec.pattern!r}: set it to false")
    if pattern.kind == "channel" and (spec.saliency, spec.schedule) != ("magnitude", "one-shot"):
        raise SparsityError(
            f"pattern {spec.pattern!r} removes channels once, by magnitude: saliency must be 'magnitude' and schedule "
            f"'one-shot', not {spec.saliency!r} and {spec.schedule!r}"
        )
    return pattern


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _ranges(spec: SparsitySpec) -> tuple[tuple[str, bool, str], ...]:
    """(key, whether it is in range, the range in words) for each number."""
    return (
        ("permute_seconds", math.isfinite(spec.permute_seconds) and spec.permute_seconds > 0, "a number above 0"),
        ("begin", 0 <= spec.begin < 1, "at least 0 and below 1"),
        ("end", spec.begin < spec.end <= 1, "above sparsity.begin and at most 1"),
        ("update_steps", spec.update_steps is None or spec.update_steps >= 1, "1 or more, or null"),
        ("sr_ste_decay", math.isfinite(spec.sr_ste_decay) and spec.sr_ste_decay >= 0, "a finite number, 0 or more"),
        ("calibration_images", spec.calibration_images >= 1, "1 or more"),
        ("damping", math.isfinite(spec.damping) and spec.damping > 0, "a finite number above 0"),
        ("seed", spec.seed >= 0, "0 or more"),
    )
