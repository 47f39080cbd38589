"""Latency, accuracy, parity and sizes, measured on engines. Here: the `bench` section of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from compress.errors import RecipeError, near_misses
from compress.support.validation import AtLeastOne, BatchSize, NotNegativeInt, Positive, Threads, validate

# The rows of `compress.engines.registry.ENGINES`, so that a recipe is read without importing an engine.
EngineName = Literal[
    "openvino",
    "onnxruntime",
    "litert",
    "executorch",
    "coreml",
    "cuda",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-lean",
]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """Timing of every variant on every engine, all in turn.

    Attributes:
        engines: names of engines; one that is not here is reported as unavailable, with the reason.
        batch_sizes: images of one run, each measured on its own.
        warmup: runs of each variant that are not timed, before the first turn.
        runs: largest number of timed runs of each variant.
        seconds: longest time for each variant and batch size; the round that is under way is finished.
        threads: CPU threads of one run; None = each engine's own choice.
        sm: compute capabilities that TensorRT-RTX engines are built for, without the point (89 for 8.9); () = that of
            the GPU here, or Ampere and later (80, 86, 89, 120) without one.
        end_to_end: time evaluation images from decoding to classes too, stage by stage; drawn in the report.

    Examples:
        >>> bench = compress.BenchSpec(runs=3, warmup=1)
        >>> engine = compress.TorchEngine(model, (3, 16, 16))
        >>> [row.runs for row in compress.measure_latency([engine], runs=bench.runs, warmup=bench.warmup)]
        [3]
    """

    engines: tuple[str, ...] = ("openvino", "onnxruntime")
    batch_sizes: tuple[BatchSize, ...] = (1, 32)
    warmup: NotNegativeInt = 5
    runs: AtLeastOne = 50
    seconds: Positive = 3.0
    threads: Threads | None = None
    sm: tuple[Annotated[int, Field(ge=10, le=9999)], ...] = ()
    end_to_end: bool = False


def check_bench_spec(spec: BenchSpec) -> None:
    validate(spec, BenchSpec, section="bench", error=RecipeError, rules=bench_contradictions)


def bench_contradictions(spec: BenchSpec) -> Iterator[str]:
    """Yield a line for each unknown engine and each list with a repeated entry."""
    for name in spec.engines:
        if name not in ENGINE_NAMES:
            yield f"bench.engines holds {name!r}{near_misses(name, ENGINE_NAMES)} (any of: {', '.join(ENGINE_NAMES)})"
    for key, kind in (("engines", "names"), ("batch_sizes", "numbers"), ("sm", "numbers")):
        values = getattr(spec, key)
        if len(set(values)) < len(values):
            yield f"bench.{key} is {values!r}: it must hold {kind} that differ"


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
