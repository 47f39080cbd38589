"""The table of engines; a new engine is a row in `ENGINES`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from compress.engines import coreml as coreml_engine
from compress.engines import executorch as executorch_engine
from compress.engines import litert as litert_engine
from compress.engines import onnxruntime as onnxruntime_engine
from compress.engines import openvino as openvino_engine
from compress.engines import torch as torch_engine
from compress.engines.base import Availability, BuildOptions, Engine, cpu_availability
from compress.engines.cuda import engine as cuda_engine
from compress.engines.tensorrt import engine as tensorrt_engine
from compress.engines.tensorrt.library import FLAVOURS, tensorrt_availability
from compress.engines.tensorrt.options import OPTIONS as TENSORRT_OPTIONS
from compress.errors import EngineError, EngineUnavailableError, near_misses
from compress.files import path_of
from compress.quantization import Target


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One engine.

    Attributes:
        load: makes an engine from a file; None for an engine that runs modules in memory.
        options: meaning of each option that `build_engine` passes on, by name.
        instead: for an engine without `load`: the reason, and how to use it.
        target: the target whose files suit it; None for an engine that takes any placement.
    """

    availability: Callable[[], Availability]
    load: Callable[[Path | str, BuildOptions], Engine] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""
    target: Target | None = None


ENGINES: dict[str, EngineEntry] = {
    "openvino": EngineEntry(
        availability=openvino_engine.availability,
        load=openvino_engine.load,
        options=openvino_engine.OPTIONS,
        target="openvino",
    ),
    "onnxruntime": EngineEntry(
        availability=onnxruntime_engine.availability,
        load=onnxruntime_engine.load,
        options=onnxruntime_engine.OPTIONS,
        target="onnxruntime",
    ),
    **{
        engine.NAME: EngineEntry(
            availability=partial(cpu_availability, engine.NAME, engine.PACKAGE, loaded, engine.INSTALL),
            load=engine.load,
            target="litert",
        )
        for engine, loaded in ((litert_engine, litert_engine.library), (executorch_engine, executorch_engine.loaded))
    },
    "coreml": EngineEntry(availability=coreml_engine.availability, instead=coreml_engine.INSTEAD, target="litert"),
    "cuda": EngineEntry(
        availability=cuda_engine.availability,
        load=cuda_engine.load,
        options=cuda_engine.OPTIONS,
        target="tensorrt",
    ),
    "torch": EngineEntry(
        availability=torch_engine.availability,
        instead="it runs modules, not files: use TorchEngine(module, ...)",
    ),
    **{
        name: EngineEntry(
            availability=partial(tensorrt_availability, name),
            load=partial(tensorrt_engine.load, engine=name),
            options={
                o: text for o, text in TENSORRT_OPTIONS.items() if not flavour.runs or o in {"device", "cuda_graph"}
            },
            target="tensorrt",
        )
        for name, flavour in FLAVOURS.items()
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
        path: for TensorRT also an engine file that was built before.
        engine: such as `openvino`, `onnxruntime`, `cuda`, `tensorrt`, `tensorrt-rtx` or `tensorrt-lean`;
            `engine_availability` lists those that work here.
        batch_size: fixes the batch; None keeps the file's own.
        threads: CPU threads of one run; None = the engine's own choice.
        precision: of the part that is not quantized: `f32`, `bf16` or `f16`; None = the engine's own choice.
        options: of that engine: `device` (openvino), `provider` (onnxruntime), ...

    Raises:
        EngineError: the engine or an option is unknown, or the engine did not take the file or the precision.
        EngineUnavailableError: the engine is not on this machine; the message says what to install.

    Examples:
        >>> with compress.build_engine("int8.onnx", "openvino", batch_size=16, precision="f32") as engine:
        ...     engine.run({"input": images.numpy()})["logits"].shape
        (16, 4)
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
    return entry.load(path_of(path), build)


def require_engine(engine: str) -> None:
    found = ENGINES[engine].availability()
    if not found.available:
        raise EngineUnavailableError("; ".join(filter(None, (f"{engine}: {found.reason}", found.install))))


def target_of(engine: str) -> Target | None:
    """Return the target whose files suit an engine; None for torch, which takes any, and for unknown names.

    >>> target_of("tensorrt-rtx"), target_of("torch")
    ('tensorrt', None)
    """
    entry = ENGINES.get(engine)
    return entry.target if entry else None


def suits(engine: str, targets: Collection[str]) -> bool:
    """Return True if files whose quantizers are placed for these targets suit an engine.

    >>> suits("tensorrt-rtx", ["tensorrt"]), suits("openvino", ["tensorrt"]), suits("openvino", ["any"])
    (True, False, True)
    """
    target = target_of(engine)
    return target is None or target in targets or "any" in targets


def engine_availability() -> tuple[Availability, ...]:
    """Report for every engine if it works on this machine, and if not, why and what to do.

    Examples:
        >>> [engine.available for engine in compress.engine_availability() if engine.name == "onnxruntime"]
        [True]
    """
    return tuple(entry.availability() for entry in ENGINES.values())
