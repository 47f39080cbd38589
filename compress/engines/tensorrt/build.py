"""Builds a TensorRT engine file, or reuses one of the same file and options; writes commands that do so elsewhere."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from compress.engines.base import OnnxFile, read_onnx
from compress.engines.tensorrt.library import Flavour, Library, Log, gpu, gpu_problem, tensorrt_library
from compress.engines.tensorrt.metadata import (
    EngineMetadata,
    check_fresh,
    check_whole,
    log_path,
    metadata_path,
    model_sha256,
    read_metadata,
    sha256,
)
from compress.engines.tensorrt.options import (
    DEFAULT_BATCH,
    PORTABLE_SMS,
    Profile,
    Shape,
    TensorRTOptions,
    choose_sms,
    profiles_of,
)
from compress.errors import EngineError, EngineUnavailableError
from compress.export.names import RECIPE_KEY, VARIANT_KEY, is_sparse
from compress.files import cache_folder, write_bytes, write_json, write_text
from compress.support.progress import NoProgress, Progress

if TYPE_CHECKING:
    import tensorrt

Made = TypeVar("Made")

# Steps of the bar.
UNITS = 100


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
        above = parent
        while above in self._phases and above != name:
            above = self._phases[above].parent
        if above != name:  # a phase inside itself is ignored
            self._phases[name] = _Phase(parent=parent, steps=max(1, steps))

    def step(self, name: str, index: int) -> None:
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = max(phase.done, index + 1)

    def finish(self, name: str) -> None:
        """End a phase; the part of its parent's step that it fills stays until that step is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = phase.steps

    def share(self) -> float:
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
        reached = int(UNITS * self.meter.share())
        if reached > self._shown:
            self._listener.advance(self._task, reached - self._shown)
            self._shown = reached

    def finish(self, *, whole: bool) -> None:
        if whole and self._shown < UNITS:
            self._listener.advance(self._task, UNITS - self._shown)
        self._listener.finish(self._task)


def default_cache_path(version: str, gpu: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{version}-{gpu}").strip("-")
    return cache_folder() / f"tensorrt-{name}.timing"


def use_timing_cache(
    library: Library, config: tensorrt.IBuilderConfig, path: Path | None, *, gpu: str
) -> tuple[Path | None, tuple[str, ...]]:
    """Give a builder's configuration stored times; return the file to write to afterwards (or None), and notes."""
    if not library.flavour.timing_cache:
        return None, ()
    chosen = path or default_cache_path(library.version, gpu)
    if chosen.is_dir():
        raise EngineError(f"timing_cache {chosen} is a folder; name a file")
    cache = config.create_timing_cache(chosen.read_bytes() if chosen.is_file() else b"")
    if cache is not None and config.set_timing_cache(cache, False):
        return chosen, ()
    config.set_timing_cache(config.create_timing_cache(b""), False)
    note = (
        f"timing cache {chosen} is of another version or GPU, or damaged, and was not used; delete it or name another"
    )
    return None, (note,)


def keep_timing_cache(path: Path, config: tensorrt.IBuilderConfig) -> None:
    write_bytes(path, bytes(config.get_timing_cache().serialize()))


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
    """Build an engine, and return its bytes and notes on the build."""
    stop = threading.Event()

    def work() -> tuple[bytes, tuple[str, ...]]:
        library = request.library
        trt = library.trt
        if request.gpu:
            torch.cuda.set_device(request.options.device)
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


def _created(make: Callable[[tensorrt.ILogger], tensorrt.Builder], library: Library, log: Log) -> tensorrt.Builder:
    """Without a working driver the constructor returns nothing or raises."""
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


_QUIET = NoProgress()
_DEFAULTS = TensorRTOptions()


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine file with its metadata and log; `reused` if it was there already, from the same file and options."""

    path: Path
    metadata: EngineMetadata
    log: str
    reused: bool = False


def default_engine_path(onnx: Path, engine: str, sms: tuple[int, ...], options: TensorRTOptions) -> Path:
    """`ptq.tensorrt-rtx.sm89-120.engine` beside `ptq.onnx`; `.b8` is added if it admits one batch alone."""
    batch = f".b{options.batch[0]}" if len(set(options.batch)) == 1 else ""
    return onnx.with_name(f"{onnx.stem}.{engine}.sm{'-'.join(map(str, sms))}{batch}.engine")


def build_tensorrt(
    onnx: Path | str,
    engine: str = "tensorrt-rtx",
    *,
    options: TensorRTOptions = _DEFAULTS,
    out: Path | str | None = None,
    reuse: bool = True,
    progress: Progress = _QUIET,
) -> BuiltEngine:
    """Build an engine file.

    Args:
        onnx: the model; the engine computes in its types.
        engine: `tensorrt-rtx`, or `tensorrt`, which needs the GPU that will run the engine.
        options: shapes, compute capabilities, effort.
        out: engine file; None = `default_engine_path` beside the model.
        reuse: return the engine in `out` if it was built from the same file, version and options.
        progress: listener of the build.

    Raises:
        EngineError: the library does not take the file or an option, memory is short, or `out` is the model itself.
        EngineUnavailableError: the library, or a GPU that it needs, is not here.
        KeyboardInterrupt: Ctrl-C; no file is left.

    Examples:
        >>> compress.build_tensorrt("model.onnx", "tensorrt-rtx", out="model.engine")  # doctest: +SKIP
    """
    request = _request(read_onnx(onnx), tensorrt_library(engine), options)
    path = Path(out) if out is not None else default_engine_path(request.file.path, engine, request.sms, options)
    if path.resolve() in {file.resolve() for file in (request.file.path, *request.file.weight_files)}:
        raise EngineError(f"{path} is the model itself: the engine would be written over it; name another file")
    digest = model_sha256(request.file.path)
    if reuse and (found := _reusable(path, request, digest)):
        return found
    bar = BuildProgress(progress, f"build {path.name}")
    begin = time.perf_counter()
    with request.library.listening() as log:
        blob, notes = serialized_engine(request, log, bar)
    seconds = time.perf_counter() - begin
    write_bytes(path, blob)
    metadata = _metadata(request, path, digest, seconds, notes + _unused(request))
    write_text(log_path(path), log.text())
    write_json(metadata_path(path), metadata.to_dict())
    return BuiltEngine(path=path, metadata=metadata, log=log.text())


def check_builder(engine: str, options: TensorRTOptions) -> None:
    """Refuse a build for which this machine lacks the library or the GPU, before the file to build is made."""
    _capabilities(tensorrt_library(engine), options)


def _request(file: OnnxFile, library: Library, options: TensorRTOptions) -> Request:
    here = gpu(options.device)
    return Request(
        library=library,
        file=file,
        options=options,
        sms=_capabilities(library, options),
        profiles=profiles_of(file.inputs, options, where=str(file.path)),
        sparse=is_sparse(file.metadata) if options.sparse is None else options.sparse,
        gpu=here[0] if here else "",
    )


def _capabilities(library: Library, options: TensorRTOptions) -> tuple[int, ...]:
    """What is built for; refuses what cannot be built here whatever the file is."""
    flavour, here = library.flavour, gpu(options.device)
    if flavour.runs:
        raise EngineError(f"{flavour.title} has no builder: build with --engine {flavour.runs}")
    sm = here[1] if here else None
    if flavour.portable:
        sms = choose_sms(options, library.sms(), sm, title=flavour.title)
        _check_portable(flavour, options, has_gpu=here is not None)
    else:
        problem = gpu_problem(flavour, options.device)
        if problem or sm is None:
            raise EngineUnavailableError(
                f"{flavour.title} builds on the GPU that will run the engine, and {problem or 'none is here'}; "
                "--engine tensorrt-rtx builds without one, and --commands prints the commands for another machine"
            )
        if options.sms and options.sms != (sm,):
            asked = ", ".join(map(str, options.sms))
            raise EngineError(
                f"sm is {asked}, but {flavour.title} builds for the GPU of this machine (SM {sm}); build on that other "
                "machine, or for several GPUs with hardware=ampere-plus"
            )
        sms = (sm,)
    return sms


def _check_portable(flavour: Flavour, options: TensorRTOptions, *, has_gpu: bool) -> None:
    lacks = (
        ("timing_cache", options.timing_cache is not None, "it times nothing while it builds"),
        ("hardware", options.hardware != "none", "name the compute capabilities with sm"),
        ("version_compatible", options.version_compatible, "its engines run with the version that built them"),
        ("refit", options.refit and not has_gpu, "it compiles refittable engines on a GPU, and none is here"),
    )
    for name, asked, why in lacks:
        if asked:
            raise EngineError(f"{flavour.title} does not take {name} here: {why}; leave it out")


def _reusable(path: Path, request: Request, digest: str) -> BuiltEngine | None:
    try:
        metadata = read_metadata(path)
        check_whole(path, metadata)
        check_fresh(path, metadata, request.file.path)
        log = log_path(path).read_text(encoding="utf-8")
    except (EngineError, OSError):
        return None
    same = (
        metadata.engine == request.library.flavour.name
        and metadata.version == request.library.version
        and metadata.sms == request.sms
        and (request.library.flavour.portable or metadata.gpu == request.gpu)
        and metadata.onnx_sha256 == digest
        and dict(metadata.options) == _options(request)
    )
    return BuiltEngine(path=path, metadata=metadata, log=log, reused=True) if same else None


def _options(request: Request) -> dict[str, Any]:
    return {**request.options.to_dict(), "sms": list(request.sms), "sparse": request.sparse}


def _unused(request: Request) -> tuple[str, ...]:
    batches = {tensor.shape[0] for tensor in request.file.inputs if tensor.shape}
    if request.options.batch == DEFAULT_BATCH or -1 in batches:
        return ()
    fixed, asked = (", ".join(map(str, sizes)) for sizes in (sorted(batches), dict.fromkeys(request.options.batch)))
    return (f"the model's batch is fixed at {fixed}: batch {asked} was not used; export it with an open one",)


def _metadata(request: Request, path: Path, digest: str, seconds: float, notes: tuple[str, ...]) -> EngineMetadata:
    file = request.file
    return EngineMetadata(
        engine=request.library.flavour.name,
        version=request.library.version,
        parser_version=str(request.library.trt.get_nv_onnx_parser_version()),
        gpu=request.gpu,
        sms=request.sms,
        recipe=file.metadata.get(RECIPE_KEY, ""),
        variant=file.metadata.get(VARIANT_KEY, ""),
        onnx=file.path.name,
        onnx_sha256=digest,
        engine_bytes=path.stat().st_size,
        engine_sha256=sha256(path),
        options=_options(request),
        profiles=dict(request.profiles),
        inputs=file.inputs,
        outputs=file.outputs,
        float_types=tuple(sorted(file.float_types)),
        onnx_metadata=dict(file.metadata),
        build_seconds=round(seconds, 3),
        notes=notes,
    )


_HARDWARE = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}
_TARGETS = ("TensorRT 10", "TensorRT 11", "TensorRT-RTX")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line.

    Attributes:
        target: library that it is for: `TensorRT 10`, `TensorRT 11` or `TensorRT-RTX`.
        purpose: `build`, `time` or `compare`.
        words: of the command; environment variables come before the program.
    """

    target: str
    purpose: str
    words: tuple[str, ...]

    def text(self) -> str:
        parts = [word if word.isidentifier() or _is_setting(word) else shlex.quote(word) for word in self.words]
        lines, line = [], ""
        for part in parts:
            if part.startswith("-") and line:
                lines.append(line)
                line = part
            else:
                line = f"{line} {part}".strip()
        return " \\\n    ".join([*lines, line])


def _is_setting(word: str) -> bool:
    return word.partition("=")[0].isupper() and "=" in word


def build_commands(file: OnnxFile, options: TensorRTOptions, *, engine: Path | None = None) -> tuple[Command, ...]:
    """Commands that build and time the engine of an ONNX file, for TensorRT 10, 11 and TensorRT-RTX."""
    profiles = profiles_of(file.inputs, options, where=str(file.path))
    dynamic = {t.name: profiles[t.name] for t in file.inputs if -1 in t.shape}
    target = engine.name if engine else f"{file.path.stem}.engine"
    sparse = is_sparse(file.metadata) if options.sparse is None else options.sparse
    commands = []
    for name in _TARGETS:
        flags = _flags(name, target, dynamic, options, sparse)
        own, others = ([word for asked, *words in flags if asked for word in words[tool]] for tool in range(2))
        tool = (_program(name), f"--onnx={file.path.name}", f"--saveEngine={target}", *own, "--skipInference")
        polygraphy = (
            *_polygraphy_head(name),
            "convert",
            file.path.name,
            "--convert-to",
            "trt",
            "--output",
            target,
            *others,
        )
        commands += [
            Command(target=name, purpose="build", words=tool),
            Command(target=name, purpose="time", words=_timing(name, target, dynamic)),
            Command(target=name, purpose="build", words=polygraphy),
            Command(target=name, purpose="compare", words=_compare(name, file, dynamic)),
        ]
    return tuple(commands)


def _program(target: str) -> str:
    return "tensorrt_rtx" if target == "TensorRT-RTX" else "trtexec"


def _flags(
    target: str, engine: str, dynamic: Mapping[str, Profile], options: TensorRTOptions, sparse: bool
) -> list[tuple[bool, list[str], list[str]]]:
    """Whether each option is set, and the arguments that set it for trtexec and for Polygraphy."""
    rtx, sms, hardware = target == "TensorRT-RTX", options.sms or PORTABLE_SMS, options.hardware
    mib, level, times = options.workspace_mib, str(options.optimization_level), "tensorrt.timing"
    kept = [f"--timingCacheFile={times}", "--profilingVerbosity=detailed", f"--exportLayerInfo={engine}.layers.json"]
    return [
        (target == "TensorRT 10", ["--stronglyTyped"], ["--strongly-typed"]),
        *(
            (True, [f"--{bound}Shapes={_by_x(shapes)}"], [f"--trt-{bound}-shapes", *_by_list(shapes)])
            for bound, shapes in _bounds(dynamic)
        ),
        (
            rtx,
            [f"--computeCapabilities={','.join(map(str, sms))}"],
            ["--compute-capabilities", *(f"{sm // 10}.{sm % 10}" for sm in sms)],
        ),
        (mib is not None, [f"--memPoolSize=workspace:{mib}M"], ["--pool-limit", f"workspace:{mib}M"]),
        (sparse, ["--sparsity=enable"], ["--sparse-weights"]),
        (not options.tf32, ["--noTF32"], []),
        (options.tf32, [], ["--tf32"]),
        (
            options.optimization_level is not None,
            [f"--builderOptimizationLevel={level}"],
            ["--builder-optimization-level", level],
        ),
        (options.refit, ["--refit"], ["--refittable"]),
        (not rtx and options.version_compatible, ["--versionCompatible"], ["--version-compatible"]),
        (
            not rtx and hardware != "none",
            [f"--hardwareCompatibilityLevel={_HARDWARE.get(hardware, hardware)}"],
            ["--hardware-compatibility-level", hardware.replace("-", "_")],
        ),
        (not rtx, kept, ["--load-timing-cache", times, "--save-timing-cache", times]),
    ]


def _timing(target: str, engine: str, dynamic: Mapping[str, Profile]) -> tuple[str, ...]:
    shapes = [f"--shapes={_by_x((name, p.opt) for name, p in dynamic.items())}"] if dynamic else []
    graph = [] if target == "TensorRT-RTX" else ["--useCudaGraph"]
    return (_program(target), f"--loadEngine={engine}", *shapes, *graph, "--noDataTransfers", "--useSpinWait")


def _compare(target: str, file: OnnxFile, dynamic: Mapping[str, Profile]) -> tuple[str, ...]:
    shapes = ["--input-shapes", *_by_list((name, p.opt) for name, p in dynamic.items())] if dynamic else []
    strong = ["--strongly-typed"] if target == "TensorRT 10" else []
    return (*_polygraphy_head(target), "run", file.path.name, "--trt", "--onnxrt", *strong, *shapes)


def _polygraphy_head(target: str) -> tuple[str, ...]:
    return ("POLYGRAPHY_USE_TENSORRT_RTX=1", "polygraphy") if target == "TensorRT-RTX" else ("polygraphy",)


def _bounds(dynamic: Mapping[str, Profile]) -> Iterator[tuple[str, list[tuple[str, Shape]]]]:
    for bound in ("min", "opt", "max") if dynamic else ():
        yield bound, [(name, getattr(profile, bound)) for name, profile in dynamic.items()]


def _by_x(shapes: Iterable[tuple[str, Shape]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes)


def _by_list(shapes: Iterable[tuple[str, Shape]]) -> list[str]:
    return [f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes]


def commands_markdown(commands: Sequence[tuple[str, Sequence[Command]]]) -> str:
    lines = [
        "# Build these engines elsewhere",
        "",
        "The types are those of the ONNX files. TensorRT 10 needs `--stronglyTyped` for that; TensorRT 11 has no "
        "other mode, no precision flags and no calibrators. "
        "TensorRT and its engines belong to one GPU: run these commands on the machine that will run the engine. "
        "TensorRT-RTX builds on any machine for the compute capabilities that are named.",
    ]
    for name, rows in commands:
        for target in dict.fromkeys(row.target for row in rows):
            lines += ["", f"## {name}, {target}", "", "```sh"]
            lines += [f"# {row.purpose}\n{row.text()}" for row in rows if row.target == target]
            lines.append("```")
    return "\n".join(lines) + "\n"
