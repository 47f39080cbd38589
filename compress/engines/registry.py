"""All engines, one row each: whether it works here, how it loads a file, which options it takes.

Another engine is another file with an `availability` and a `load` function, and a row in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from compress.engines import onnxruntime_engine, openvino_engine, tensorrt_engine, torch_engine
from compress.engines.base import Availability, BuildOptions, Engine
from compress.engines.tensorrt_library import FLAVOURS, tensorrt_availability
from compress.engines.tensorrt_options import OPTIONS as TENSORRT_OPTIONS
from compress.errors import EngineError, EngineUnavailableError, near_misses


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One engine.

    Attributes:
        availability: whether it works on this machine; never raises.
        load: makes an engine of a file; None for one that does not.
        options: name and meaning of each option that `build_engine` passes on.
        instead: for an engine without `load`: why, and what to do.
        in_memory: it runs modules, so it is of use without `load`.
    """

    availability: Callable[[], Availability]
    load: Callable[[Path | str, BuildOptions], Engine] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""
    in_memory: bool = False


ENGINES: dict[str, EngineEntry] = {
    "openvino": EngineEntry(
        availability=openvino_engine.availability, load=openvino_engine.load, options=openvino_engine.OPTIONS
    ),
    "onnxruntime": EngineEntry(
        availability=onnxruntime_engine.availability, load=onnxruntime_engine.load, options=onnxruntime_engine.OPTIONS
    ),
    "torch": EngineEntry(
        availability=torch_engine.availability,
        instead="it runs modules, not files: use TorchEngine(module, ...)",
        in_memory=True,
    ),
    **{
        name: EngineEntry(
            availability=partial(tensorrt_availability, name),
            load=partial(tensorrt_engine.load, engine=name),
            options=TENSORRT_OPTIONS,
        )
        for name in FLAVOURS
    },
}


def build_engine(
    path: Path | str,
    engine: str = "openvino",
    *,
    batch_size: int | None = None,
    threads: int | None = None,
    precision: str | None = None,
    **options: str,
) -> Engine:
    """Load an ONNX file into an engine.

    Args:
        path: the file; for TensorRT also an engine file that was built before.
        engine: `openvino`, `onnxruntime`, `tensorrt` or `tensorrt-rtx`; `engine_availability` lists all,
            and which work here.
        batch_size: fixes the batch, which is faster; None keeps the file's own, dynamic or not.
        threads: CPU threads of one run; None = the engine's own choice.
        precision: of what is not quantized: `f32`, `bf16` or `f16`; None = the engine's own choice, which
            `Engine.info.float_precision` tells.
        options: of that engine: `device` (openvino), `provider` (onnxruntime), those of
            `compress.engines.tensorrt_options.OPTIONS` (tensorrt, tensorrt-rtx).

    Raises:
        EngineError: an unknown engine or option; a file that is missing, truncated, not ONNX or not to the engine's
            liking; a precision that the engine did not take.
        EngineUnavailableError: the engine is not on this machine; says what to install.
    """
    if engine not in ENGINES:
        raise EngineError(f"unknown engine {engine!r}{near_misses(engine, ENGINES)} (one of: {', '.join(ENGINES)})")
    entry = ENGINES[engine]
    if entry.load is None:
        raise EngineUnavailableError(f"{engine} loads no file here: {entry.instead}")
    for name in options:
        if name not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise EngineError(f"{engine}: unknown option {name!r}{near_misses(name, entry.options)} (options: {known})")
    build = BuildOptions(batch_size=batch_size, threads=threads, precision=precision, options=options)
    return entry.load(path, build)


def engine_availability() -> tuple[Availability, ...]:
    """For every engine that compress knows: whether it works on this machine, and if not, why and what to do."""
    return tuple(map(_availability, ENGINES.values()))


def _availability(entry: EngineEntry) -> Availability:
    told = entry.availability()
    usable = entry.load is not None or entry.in_memory
    return told if usable or not told.available else replace(told, available=False, reason=entry.instead)
