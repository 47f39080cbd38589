"""How engines are timed: a recipe's `bench` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.engines.registry import ENGINES
from compress.errors import RecipeError, near_misses


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """Timing of every variant on every engine, all in turn.

    Attributes:
        engines: by name; one that is not here is reported as unavailable, with the reason.
        batch_sizes: images of one run, each measured on its own.
        warmup: runs of each variant that are not timed, before the first turn.
        runs: timed runs of each variant, at most.
        seconds: time for each variant and batch size, at most; the round that is under way is finished.
        threads: CPU threads of one run; None = each engine's own choice.
        sm: compute capabilities that TensorRT-RTX engines are built for, 89 for 8.9; () = that of the GPU here, or
            Ampere and later (80, 86, 89, 120) without one.
        end_to_end: time evaluation images from decoding to classes too, stage by stage; drawn in the report.
    """

    engines: tuple[str, ...] = ("openvino", "onnxruntime")
    batch_sizes: tuple[int, ...] = (1, 32)
    warmup: int = 5
    runs: int = 50
    seconds: float = 3.0
    threads: int | None = None
    sm: tuple[int, ...] = ()
    end_to_end: bool = False


def check_bench_spec(spec: BenchSpec) -> None:
    """Refuse a value that cannot be measured with.

    Raises:
        RecipeError: names the key, what was got and what is allowed.
    """
    for name in spec.engines:
        if name not in ENGINES:
            known = ", ".join(ENGINES)
            raise RecipeError(f"bench.engines holds {name!r}{near_misses(name, ENGINES)} (any of: {known})")
    threads = spec.threads
    ranges = (
        ("engines", len(set(spec.engines)) == len(spec.engines), "names that differ"),
        ("batch_sizes", all(size >= 1 for size in spec.batch_sizes), "numbers of 1 or more"),
        ("batch_sizes", len(set(spec.batch_sizes)) == len(spec.batch_sizes), "numbers that differ"),
        ("warmup", spec.warmup >= 0, "0 or more"),
        ("runs", spec.runs >= 1, "1 or more"),
        ("seconds", math.isfinite(spec.seconds) and spec.seconds > 0, "a finite number above 0"),
        ("sm", len(set(spec.sm)) == len(spec.sm), "numbers that differ"),
        ("sm", all(sm >= 10 for sm in spec.sm), "compute capabilities without the point, such as 89 for 8.9"),
        ("threads", threads is None or threads >= 1, "1 or more, or null"),
    )
    for key, fits, allowed in ranges:
        if not fits:
            raise RecipeError(f"bench.{key} is {getattr(spec, key)!r}: it must be {allowed}")
