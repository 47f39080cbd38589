"""From an ONNX file to a TensorRT engine: parse, strongly typed network, profiles, build, write.

TensorRT-RTX builds on any machine, for compute capabilities that are named; TensorRT builds on the GPU that will run
the engine. Beside `model.engine` stand `model.engine.json` (`EngineMetadata`) and `model.engine.log`, all that the
builder said at its most talkative: that log lists the engine's layers, which the audit reads.

The build runs in a thread of its own while this one waits for Ctrl-C: the library holds on to the thread that calls it;
a build that is to stop does so at its next step, and no file is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.engines.onnx_file import OnnxFile, read_onnx
from compress.engines.tensorrt_library import Flavour, Library, Log, gpu, gpu_problem, tensorrt_library
from compress.engines.tensorrt_metadata import (
    EngineMetadata,
    check_fresh,
    check_whole,
    log_path,
    metadata_path,
    model_sha256,
    read_metadata,
    sha256,
)
from compress.engines.tensorrt_options import DEFAULT_BATCH, Profile, TensorRTOptions, choose_sms, profiles_of
from compress.engines.tensorrt_progress import BuildProgress
from compress.engines.tensorrt_timing_cache import keep_timing_cache, use_timing_cache
from compress.errors import EngineError, EngineUnavailableError
from compress.files import replacing, write_json, write_text
from compress.progress import NoProgress, Progress

_QUIET = NoProgress()
_DEFAULTS = TensorRTOptions()


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine file and what stands beside it.

    Attributes:
        path: the engine; `log_path(path)` and `metadata_path(path)` name the other two.
        metadata: what the `.json` holds.
        log: what the builder said.
        reused: it was there already, from the same file with the same options.
    """

    path: Path
    metadata: EngineMetadata
    log: str
    reused: bool = False


@dataclass(frozen=True, kw_only=True)
class _Request:
    """All that a build is made of."""

    library: Library
    file: OnnxFile
    options: TensorRTOptions
    sms: tuple[int, ...]
    profiles: Mapping[str, Profile]
    sparse: bool
    gpu: str


def default_engine_path(onnx: Path, engine: str, sms: tuple[int, ...], options: TensorRTOptions) -> Path:
    """`ptq.tensorrt-rtx.sm89-120.engine` beside `ptq.onnx`; `.b8` before the end where one batch alone is admitted."""
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
        onnx: the model; its types are the engine's.
        engine: `tensorrt-rtx`, or `tensorrt`, which needs the GPU that will run the engine.
        options: shapes, compute capabilities, effort.
        out: engine file; None = `default_engine_path` beside the model.
        reuse: take the engine that `out` holds, if it was built from this very file, version and options.
        progress: hears how far the build is.

    Raises:
        EngineError: a file, node, shape or option that the library does not take, too little memory, or no engine; an
            `out` that is the model itself.
        EngineUnavailableError: the library, or a GPU that it needs, is not here.
        KeyboardInterrupt: Ctrl-C; no file is left behind.
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
        blob, notes = _build(request, log, bar)
    seconds = time.perf_counter() - begin
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    metadata = _metadata(request, path, digest, seconds, notes + _unused(request))
    write_text(log_path(path), log.text())
    write_json(metadata_path(path), metadata.to_dict())
    return BuiltEngine(path=path, metadata=metadata, log=log.text())


def _request(file: OnnxFile, library: Library, options: TensorRTOptions) -> _Request:
    """Everything checked that can be checked before the builder starts."""
    flavour, here = library.flavour, gpu(options.device)
    sm = here[1] if here else None
    if flavour.portable:
        sms = choose_sms(options, library.sms(), sm, title=flavour.title)
        _check_portable(flavour, options, has_gpu=here is not None)
    else:
        problem = gpu_problem(flavour, options.device)
        if problem or sm is None:
            raise EngineUnavailableError(
                f"{flavour.title} builds on the GPU that will run the engine, and {problem or 'none is here'}; "
                "--engine tensorrt-rtx builds without one, and --commands prints what to type on the other"
            )
        if options.sms and options.sms != (sm,):
            asked = ", ".join(map(str, options.sms))
            raise EngineError(
                f"sm is {asked}, but {flavour.title} builds for the GPU of this machine (SM {sm}); build on that other "
                "machine, or for several GPUs with hardware=ampere-plus"
            )
        sms = (sm,)
    variant = file.metadata.get("compress.variant", "")
    return _Request(
        library=library,
        file=file,
        options=options,
        sms=sms,
        profiles=profiles_of(file.inputs, options, where=str(file.path)),
        sparse=variant.startswith("sparse") if options.sparse is None else options.sparse,
        gpu=here[0] if here else "",
    )


def _check_portable(flavour: Flavour, options: TensorRTOptions, *, has_gpu: bool) -> None:
    """Refuse what TensorRT-RTX lacks, which it would ignore or fail at with a word about something else."""
    lacks = (
        ("timing_cache", options.timing_cache is not None, "it times nothing while it builds"),
        ("hardware", options.hardware != "none", "name the compute capabilities with sm"),
        ("version_compatible", options.version_compatible, "its engines run with the version that built them"),
        ("refit", options.refit and not has_gpu, "it compiles refittable engines on a GPU, and none is here"),
    )
    for name, asked, why in lacks:
        if asked:
            raise EngineError(f"{flavour.title} does not take {name} here: {why}; leave it out")


def _reusable(path: Path, request: _Request, digest: str) -> BuiltEngine | None:
    """The engine that is there already, if it is what would be built now."""
    try:
        told = read_metadata(path)
        check_whole(path, told)
        check_fresh(path, told, request.file.path)
        log = log_path(path).read_text(encoding="utf-8")
    except (EngineError, OSError):
        return None
    same = (
        told.engine == request.library.flavour.name
        and told.version == request.library.version
        and told.sms == request.sms
        and (request.library.flavour.portable or told.gpu == request.gpu)
        and told.onnx_sha256 == digest
        and dict(told.options) == _options_told(request)
    )
    return BuiltEngine(path=path, metadata=told, log=log, reused=True) if same else None


def _options_told(request: _Request) -> dict[str, Any]:
    return {**request.options.to_dict(), "sms": list(request.sms), "sparse": request.sparse}


def _build(request: _Request, log: Log, bar: BuildProgress) -> tuple[bytes, tuple[str, ...]]:
    """The engine's bytes, and what is to be said of the build."""
    stop = threading.Event()

    def work() -> tuple[bytes, tuple[str, ...]]:
        trt, library = request.library.trt, request.library
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


def _use_device(request: _Request) -> None:
    """Make the GPU that is meant current in this thread."""
    if request.gpu:
        import torch

        torch.cuda.set_device(request.options.device)


def _created(make: Callable[[Any], Any], library: Library, log: Log) -> Any:
    """A builder or a runtime; without a working driver their constructors return nothing or raise."""
    try:
        made = make(library.logger)
    except (TypeError, RuntimeError) as error:
        raise EngineUnavailableError(f"{library.flavour.title} does not start: {log.errors() or error}") from None
    if made is None:
        raise EngineUnavailableError(f"{library.flavour.title} does not start: {log.errors() or 'no reason given'}")
    return made


def _interruptible(work: Callable[[], Any], stop: threading.Event) -> Any:
    """Run `work` in a thread; Ctrl-C sets `stop`, waits for the thread to see it, and goes on as KeyboardInterrupt."""
    done: dict[str, Any] = {}

    def run() -> None:
        try:
            done["value"] = work()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=run, name="tensorrt-build", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        stop.set()
        if thread.is_alive():
            thread.join()
        raise
    if "error" in done:
        raise done["error"]
    return done["value"]


def _monitor(trt: Any, bar: BuildProgress, stop: threading.Event) -> Any:
    """What the builder tells of its phases; a false answer stops it."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            bar.meter.start(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            bar.meter.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            bar.meter.step(phase_name, step)
            bar.tell()
            return not stop.is_set()

    return Monitor()


def _parse(request: _Request, network: Any) -> None:
    """Fill a network from the ONNX file.

    Raises:
        EngineError: names every node that the library does not take.
    """
    trt, path = request.library.trt, request.file.path
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


def _parser_error(error: Any) -> str:
    name, operator = error.node_name(), error.node_operator()
    what = f"node {name!r} ({operator})" if operator else "the file"
    code = str(getattr(error.code(), "name", error.code())).lower().replace("_", " ")
    said = " ".join(str(error.desc()).split())
    return f"{what}: {code}" + (f" ({said})" if said and said != "false" else "")


def _config(request: _Request, builder: Any, network: Any) -> Any:
    """The builder's configuration. Nothing here is about precision: that is what the ONNX file says."""
    trt, options = request.library.trt, request.options
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.library.flavour.portable:
        config.num_compute_capabilities = len(request.sms)
        for index, sm in enumerate(request.sms):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index):
                raise EngineError(f"{request.library.flavour.title} refuses SM {sm} beside {request.sms}")
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware != "none":
        level = options.hardware.upper().replace("-", "_")
        if not hasattr(trt.HardwareCompatibilityLevel, level):
            raise EngineError(f"hardware {options.hardware!r} is not known to {request.library.version}; update it")
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    flags = (
        ("SPARSE_WEIGHTS", request.sparse),
        ("REFIT", options.refit),
        ("VERSION_COMPATIBLE", options.version_compatible),
    )
    for name, wanted in flags:
        if wanted and not hasattr(trt.BuilderFlag, name):
            raise EngineError(
                f"{request.library.flavour.title} {request.library.version} has no {name.lower()}; leave it out"
            )
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        shapes = request.profiles[network.get_input(index).name]
        profile.set_shape(network.get_input(index).name, shapes.min, shapes.opt, shapes.max)
    config.add_optimization_profile(profile)
    return config


def _failure(request: _Request, log: Log) -> str:
    """Why there is no engine, with what to do where that is known."""
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


def _unused(request: _Request) -> tuple[str, ...]:
    """What was asked and had no effect, in words."""
    batches = {tensor.shape[0] for tensor in request.file.inputs if tensor.shape}
    if request.options.batch == DEFAULT_BATCH or -1 in batches:
        return ()
    fixed, asked = (", ".join(map(str, sizes)) for sizes in (sorted(batches), dict.fromkeys(request.options.batch)))
    return (f"the model's batch is fixed at {fixed}: batch {asked} was not used; export it with an open one",)


def _metadata(request: _Request, path: Path, digest: str, seconds: float, notes: tuple[str, ...]) -> EngineMetadata:
    file = request.file
    return EngineMetadata(
        engine=request.library.flavour.name,
        version=request.library.version,
        parser_version=str(request.library.trt.get_nv_onnx_parser_version()),
        gpu=request.gpu,
        sms=request.sms,
        recipe=file.metadata.get("compress.recipe", ""),
        variant=file.metadata.get("compress.variant", ""),
        onnx=file.path.name,
        onnx_sha256=digest,
        engine_bytes=path.stat().st_size,
        engine_sha256=sha256(path),
        options=_options_told(request),
        profiles=dict(request.profiles),
        inputs=file.inputs,
        outputs=file.outputs,
        float_types=tuple(sorted(file.float_types)),
        onnx_metadata=dict(file.metadata),
        build_seconds=round(seconds, 3),
        notes=notes,
    )
