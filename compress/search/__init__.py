"""Search over precision, 2:4 sparsity, width and depth under measured latency. Here: a recipe's section `search`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from compress.errors import SearchError
from compress.support.validation import AtLeastOne, BatchSize, NotNegativeInt, Positive, Seed, Share, Threads, validate

Format = Literal["float", "int8", "int4"]
Criterion = Literal["magnitude", "batchnorm", "taylor", "fisher", "reconstruction"]


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Space and effort of a search.

    Attributes:
        widths: shares of the channels of a group that may be kept, besides all of them; () leaves every width alone.
        multiple: kept channels are a multiple of it, and a group of no more channels stays whole; null = the block that
            the engine computes at a time (measured on CPUs, 8, 16 or 32; 16 on GPUs).
        formats: formats that the weights of a block may have: `float`, `int8`, `int4`.
        sparsity: let blocks be 2:4 sparse; null = where the engine has kernels for it (TensorRT).
        blocks: let residual blocks be left out.
        criterion: which channels of a group go first: those of the least `magnitude`, the least scale of `batchnorm`,
            the least change of the loss by first order (`taylor`) or second order (`fisher`), or those that the next
            layers' outputs need least (`reconstruction`, as in ThiNet).
        images: images of the training split that the search looks at, without their labels; a quarter of them is kept
            for measuring.
        reconstruction_steps: optimizer steps by which a candidate's layers learn the float network's outputs again,
            before it is judged; 0 = BatchNorm's statistics are measured again and that is all.
        networks: whole networks that are timed to fit the latency model, at least; a third as many more, which it has
            not seen, check it.
        trials: configurations that are built and measured on the engine.
        hours: no trial but the first three, and those that a bound still needs, begins after so long; null = no limit.
        batch_size: images of one timed run.
        precision: of what is not quantized, on the engine; null = its own choice.
        threads: CPU threads of a run; null = the engine's own choice.
        attempts: networks of the front that are fine-tuned at most until one keeps the bound.
        seed: of everything random.

    Examples:
        >>> spec = compress.SearchSpec(trials=16, widths=(0.5, 0.75))
        >>> front = compress.search(model, images, batches, latency=0.5, spec=spec)  # doctest: +SKIP
    """

    widths: tuple[Share, ...] = (0.75, 0.5, 0.25)
    multiple: AtLeastOne | None = None
    formats: tuple[Format, ...] = ("float", "int8")
    sparsity: bool | None = None
    blocks: bool = True
    criterion: Criterion = "taylor"
    images: AtLeastOne = 256
    reconstruction_steps: NotNegativeInt = 10
    networks: AtLeastOne = 12
    trials: AtLeastOne = 32
    hours: Positive | None = None
    batch_size: BatchSize = 1
    precision: str | None = None
    threads: Threads | None = None
    attempts: AtLeastOne = 3
    seed: Seed = 0


def check_search_spec(spec: SearchSpec) -> None:
    validate(spec, SearchSpec, section="search", error=SearchError, rules=search_contradictions)


def search_contradictions(spec: SearchSpec) -> Iterator[str]:
    if not spec.formats:
        yield "search.formats is empty: name at least one of float, int8, int4"
    for key in ("widths", "formats"):
        values = getattr(spec, key)
        if len(set(values)) < len(values):
            yield f"search.{key} is {values!r}: it names one value twice"
    if any(not 0 < share < 1 for share in spec.widths):
        yield f"search.widths is {spec.widths!r}: each must be above 0 and below 1; all channels are always allowed"


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
