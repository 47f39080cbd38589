"""Runs one build by the library's own builder: parse, strongly typed network, configuration, serialized engine."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from compress.engines.onnx_file import OnnxFile
from compress.engines.tensorrt.library import Library, Log
from compress.engines.tensorrt.options import Profile, TensorRTOptions
from compress.errors import EngineError, EngineUnavailableError
from compress.files import replacing
from compress.support.progress import Progress

Made = TypeVar("Made")

UNITS = 100
"""Steps of the bar."""


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class PhaseMeter:
    """Combines nested phases into one share that never falls."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase of `steps` steps inside `parent`."""
        above = parent
        while above in self._phases and above != name:
            above = self._phases[above].parent
        if above != name:  # a phase inside itself is ignored
            self._phases[name] = _Phase(parent=parent, steps=max(1, steps))

    def step(self, name: str, index: int) -> None:
        """Complete step `index` of a phase, counted from 0."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = max(phase.done, index + 1)

    def finish(self, name: str) -> None:
        """End a phase; the part of its parent's step that it fills stays until that step is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = phase.steps

    def share(self) -> float:
        """Return the share of the whole that is done, 0 to 1."""
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        self._share = max([self._share, *(self._of(name) for name in roots)])
        return self._share

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inside = [self._of(child) for child, other in self._phases.items() if other.parent == name]
        running = max((part for part in inside if part < 1), default=0.0)
        return min(1.0, (phase.done + running) / phase.steps)


class BuildProgress:
    """Moves one bar of `UNITS` steps as phases begin and end."""

    def __init__(self, listener: Progress, task: str) -> None:
        self._listener, self._task, self._shown = listener, task, 0
        self.meter = PhaseMeter()
        listener.start(task, UNITS)

    def update(self) -> None:
        """Show the progress of the build."""
        reached = int(UNITS * self.meter.share())
        if reached > self._shown:
            self._listener.advance(self._task, reached - self._shown)
            self._shown = reached

    def finish(self, *, whole: bool) -> None:
        """End the bar; a build that succeeded fills it."""
        if whole and self._shown < UNITS:
            self._listener.advance(self._task, UNITS - self._shown)
        self._listener.finish(self._task)


if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True, kw_only=True)
class TimingCache:
    """File that times are written to after the build."""

    path: Path


def default_cache_path(version: str, gpu: str) -> Path:
    """Return the file in the user's cache folder for a version and a GPU."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{version}-{gpu}").strip("-")
    return base / "compress" / f"tensorrt-{name}.timing"


def use_timing_cache(
    library: Library, config: tensorrt.IBuilderConfig, path: Path | None, *, gpu: str
) -> tuple[TimingCache | None, tuple[str, ...]]:
    """Give a builder's configuration the times that are stored in `path`; None = the default file.

    Returns:
        The file to write the times to afterwards (None if the library has none), and notes; a cache of another version
        or GPU is not used.

    Raises:
        EngineError: `path` is a folder.
    """
    if not library.flavour.timing_cache:
        return None, ()
    chosen = path or default_cache_path(library.version, gpu)
    if chosen.is_dir():
        raise EngineError(f"timing_cache {chosen} is a folder; name a file")
    held = chosen.read_bytes() if chosen.is_file() else b""
    cache = config.create_timing_cache(held)
    if cache is not None and config.set_timing_cache(cache, False):
        return TimingCache(path=chosen), ()
    config.set_timing_cache(config.create_timing_cache(b""), False)
    note = (
        f"timing cache {chosen} is of another version or GPU, or damaged, and was not used; delete it or name another"
    )
    return None, (note,)


def keep_timing_cache(cache: TimingCache, config: tensorrt.IBuilderConfig) -> None:
    """Write the times after a build."""
    with replacing(cache.path) as temporary:
        temporary.write_bytes(bytes(config.get_timing_cache().serialize()))


if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a build depends on."""

    library: Library
    file: OnnxFile
    options: TensorRTOptions
    sms: tuple[int, ...]
    profiles: Mapping[str, Profile]
    sparse: bool
    gpu: str


def serialized_engine(request: Request, log: Log, bar: BuildProgress) -> tuple[bytes, tuple[str, ...]]:
    """Build an engine, and return its bytes and notes on the build.

    Raises:
        EngineError: the library does not take a node, memory is short, or no engine is made.
        EngineUnavailableError: the library does not start.
        KeyboardInterrupt: Ctrl-C, once the builder has stopped.
    """
    stop = threading.Event()

    def work() -> tuple[bytes, tuple[str, ...]]:
        library = request.library
        trt = library.trt
        _use_device(request)
        builder = _created(trt.Builder, library, log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        _parse(request, network)
        config = _config(request, builder, network)
        config.progress_monitor = monitor = _monitor(trt, bar, stop)
        cache, notes = use_timing_cache(library, config, request.options.timing_cache, gpu=request.gpu)
        blob = builder.build_serialized_network(network, config)
        del monitor  # the builder holds no reference of its own
        if blob is None and not stop.is_set():
            raise EngineError(_failure(request, log))
        if blob is not None and cache is not None:
            keep_timing_cache(cache, config)
        return bytes(blob) if blob is not None else b"", notes

    try:
        blob, notes = _interruptible(work, stop)
    except BaseException:
        bar.finish(whole=False)
        raise
    bar.finish(whole=True)
    return blob, notes


def _use_device(request: Request) -> None:
    if request.gpu:
        torch.cuda.set_device(request.options.device)


def _created(make: Callable[[tensorrt.ILogger], tensorrt.Builder], library: Library, log: Log) -> tensorrt.Builder:
    """Make a builder; without a working driver its constructor returns nothing or raises."""
    try:
        made = make(library.logger)
    except (TypeError, RuntimeError) as error:
        raise EngineUnavailableError(f"{library.flavour.title} does not start: {log.errors() or error}") from None
    if made is None:
        raise EngineUnavailableError(f"{library.flavour.title} does not start: {log.errors() or 'no reason given'}")
    return made


def _interruptible(work: Callable[[], Made], stop: threading.Event) -> Made:
    """Run `work` in a thread; on Ctrl-C set `stop`, wait, and raise KeyboardInterrupt."""
    with ThreadPoolExecutor(1, thread_name_prefix="tensorrt-build") as pool:  # its end waits for the thread
        future = pool.submit(work)
        try:
            while not future.done():
                wait([future], timeout=0.1)
        except KeyboardInterrupt:
            stop.set()
            raise
        return future.result()


def _monitor(trt: Any, bar: BuildProgress, stop: threading.Event) -> tensorrt.IProgressMonitor:
    """Make the object that the builder reports its phases to; it stops the build at `stop`."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            bar.meter.start(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            bar.meter.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            bar.meter.step(phase_name, step)
            bar.update()
            return not stop.is_set()

    return Monitor()


def _parse(request: Request, network: tensorrt.INetworkDefinition) -> None:
    trt = request.library.trt
    path = request.file.path
    parser = trt.OnnxParser(network, request.library.logger)
    if parser.parse_from_file(str(path)):
        return
    problems = [parser.get_error(i) for i in range(parser.num_errors)]
    lines = list(dict.fromkeys(map(_parser_error, problems)))
    title = f"{request.library.flavour.title} {request.library.version}"
    text = "; ".join(lines) or "it gives no reason"
    if "zero point" in text.lower():
        text += "; files for the targets openvino and onnxruntime hold zero points: quantize with target: tensorrt"
    raise EngineError(f"{title} cannot take {path}: {text}")


def _parser_error(error: tensorrt.ParserError) -> str:
    name, operator = error.node_name(), error.node_operator()
    what = f"node {name!r} ({operator})" if operator else "the file"
    code = str(getattr(error.code(), "name", error.code())).lower().replace("_", " ")
    said = " ".join(str(error.desc()).split())
    return f"{what}: {code}" + (f" ({said})" if said and said != "false" else "")


def _config(
    request: Request, builder: tensorrt.Builder, network: tensorrt.INetworkDefinition
) -> tensorrt.IBuilderConfig:
    """Return the builder's configuration; precisions are those of the ONNX file."""
    trt = request.library.trt
    options = request.options
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.library.flavour.portable:
        _name_capabilities(request, config)
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware != "none":
        level = options.hardware.upper().replace("-", "_")
        if not hasattr(trt.HardwareCompatibilityLevel, level):
            raise EngineError(f"hardware {options.hardware!r} is not known to {request.library.version}; update it")
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    _set_flags(config, request)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        shapes = request.profiles[network.get_input(index).name]
        profile.set_shape(network.get_input(index).name, *map(trt.Dims, (shapes.min, shapes.opt, shapes.max)))
    config.add_optimization_profile(profile)
    return config


def _name_capabilities(request: Request, config: Any) -> None:
    """Tell TensorRT-RTX the compute capabilities; TensorRT itself has no such members."""
    rtx: Any = request.library.trt
    config.num_compute_capabilities = len(request.sms)
    for index, sm in enumerate(request.sms):
        if not config.set_compute_capability(getattr(rtx.ComputeCapability, f"SM{sm}"), index):
            raise EngineError(f"{request.library.flavour.title} refuses SM {sm} beside {request.sms}")


def _set_flags(config: tensorrt.IBuilderConfig, request: Request) -> None:
    flags = request.library.trt.BuilderFlag
    options = request.options
    wanted = {
        "SPARSE_WEIGHTS": request.sparse,
        "REFIT": options.refit,
        "VERSION_COMPATIBLE": options.version_compatible,
    }
    for name in (name for name, want in wanted.items() if want):
        if not hasattr(flags, name):
            raise EngineError(
                f"{request.library.flavour.title} {request.library.version} has no {name.lower()}; leave it out"
            )
        config.set_flag(getattr(flags, name))
    if not options.tf32:
        config.clear_flag(flags.TF32)


def _failure(request: Request, log: Log) -> str:
    said = log.errors() or "it gives no reason"
    lower = said.lower()
    advice = ""
    if "workspace" in lower:
        advice = "; raise workspace_mib, or leave it out"
    elif "outofmemory" in lower.replace(" ", "") or "mem_alloc" in lower:
        advice = "; memory ran out: lower workspace_mib or the largest batch, or free the GPU"
    elif "driver version is insufficient" in lower:
        advice = "; the driver is too old for this library: update it"
    library = request.library
    return f"{library.flavour.title} {library.version} built no engine of {request.file.path}: {said}{advice}"
