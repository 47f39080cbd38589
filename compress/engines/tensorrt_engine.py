"""A built TensorRT engine that runs: torch tensors in and out, streams, CUDA graphs, batches that overlap.

One execution context runs one batch at a time. A `Lane` is a context with a stream of its own, pinned memory for inputs
and outputs, and buffers on the GPU; while one lane computes, the next one copies. `run_tensors` takes tensors that are
on the GPU already, runs on torch's current stream and copies nothing.

What an engine file may not do here (another GPU, version or model, a truncated file) is refused before it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.arrays import check_inputs, reason
from compress.engines.base import Arrays, BuildOptions, Engine, EngineInfo, TensorInfo
from compress.engines.onnx_file import ENGINE_SUFFIXES, existing_file
from compress.engines.tensorrt_build import build_tensorrt
from compress.engines.tensorrt_lane import Lane
from compress.engines.tensorrt_library import FLAVOURS, Library, gpu, gpu_problem, sm_problem, tensorrt_library
from compress.engines.tensorrt_metadata import (
    EngineMetadata,
    check_fresh,
    check_runnable,
    check_whole,
    layers_path,
    metadata_path,
    read_metadata,
)
from compress.engines.tensorrt_options import TensorRTOptions, check_admitted, parse_options, yes_or_no
from compress.errors import EngineError, EngineUnavailableError
from compress.files import replacing, write_text


def load(path: Path | str, build: BuildOptions, *, engine: str) -> TensorRTEngine:
    """An engine of a `.engine` file, or of an ONNX file, which is built first where that was not done yet.

    Args:
        path: the file.
        build: `threads` has no meaning here; `precision` must be that of the file, whose types the engine runs.
        engine: `tensorrt` or `tensorrt-rtx`.

    Raises:
        EngineUnavailableError: the library or a GPU is not here; names the engine that was built for another machine.
        EngineError: a bad file or option, or an engine that is foreign, stale or truncated.
    """
    path = existing_file(path)
    given = {"tf32": "no", **build.options} if build.precision == "f32" else build.options
    options = parse_options(given, batch_size=build.batch_size)
    graph = yes_or_no("cuda_graph", build.options.get("cuda_graph", "no"))
    built = path.suffix in ENGINE_SUFFIXES
    told = checked_metadata(path, engine) if built else None
    library = tensorrt_library(engine)
    problem = gpu_problem(library.flavour, options.device)
    problem = problem or sm_problem(library.flavour, library.sms(), gpu(options.device))
    if problem:
        raise EngineUnavailableError(cannot_run(path, engine, problem))
    made = build_tensorrt(path, engine, options=options) if told is None else None
    if made is not None:
        path, told = made.path, made.metadata
    assert told is not None
    if build.precision not in (None, told.float_precision):
        raise EngineError(
            f"{engine}: precision {build.precision!r} was asked of {path}, whose types are {told.float_precision!r}: "
            "it is strongly typed and runs the types of the ONNX file; export it in that precision, or leave it out"
        )
    loaded = TensorRTEngine(library, path, told, options=options, cuda_graph=graph)
    if made is not None and not made.reused and not library.flavour.portable:
        write_text(layers_path(path), loaded.inspector_json())  # TensorRT tells its layers here, RTX in its log
    return loaded


def checked_metadata(path: Path, engine: str) -> EngineMetadata:
    """The metadata of an engine file that is whole, of this kind, and not older than its model.

    Raises:
        EngineError: it is not.
    """
    told = read_metadata(path)
    if told.engine != engine:
        raise EngineError(
            f"{path} was built with {told.engine}; load it as {told.engine!r}, or build it for {engine!r}"
        )
    check_whole(path, told)
    onnx = path.with_name(told.onnx)
    if onnx.is_file():
        check_fresh(path, told, onnx)
    return told


def cannot_run(path: Path, engine: str, problem: str) -> str:
    """Why a file cannot run here, and what there is or what to do for another machine."""
    built = [path] if path.suffix in ENGINE_SUFFIXES else sorted(path.parent.glob(f"{path.stem}.{engine}.sm*.engine"))
    sms = {file.name: read_metadata(file).sms for file in built if metadata_path(file).is_file()}
    if not sms:
        advice = f"python -m compress build --onnx {path} --engine {engine}"
        more = f"{advice} builds it for another machine" if FLAVOURS[engine].portable else "use a machine with that GPU"
        return f"{engine} cannot run here: {problem}; {more}"
    told = ", ".join(f"{name} for SM {', '.join(map(str, of))}" for name, of in sms.items())
    return f"built {told}, but it cannot be run here: {problem}; copy it and its .json to a machine with such a GPU"


class TensorRTEngine(Engine):
    """An engine file on one GPU; made by `load`.

    Args:
        library: TensorRT or TensorRT-RTX.
        path: the engine file.
        told: its metadata, already checked against the file.
        options: `device` is the GPU; `batch` of equal numbers fixes the batch of `inputs`.
        cuda_graph: replay a run as one CUDA graph. It pays for small batches, whose launches take
            longer than their work.
        lanes: execution contexts that `run_many` overlaps.

    Raises:
        EngineError: another GPU or version than it was built for, a file that the library refuses, too little memory.
    """

    def __init__(
        self,
        library: Library,
        path: Path,
        told: EngineMetadata,
        *,
        options: TensorRTOptions,
        cuda_graph: bool = False,
        lanes: int = 2,
    ) -> None:
        here = gpu(options.device)
        if here is None:
            raise EngineUnavailableError(cannot_run(path, told.engine, gpu_problem(library.flavour, options.device)))
        check_runnable(path, told, version=library.version, gpu=here[0], sm=here[1])
        self._library, self._told, self._device = library, told, torch.device("cuda", options.device)
        fixed = options.batch[0] if len(set(options.batch)) == 1 else None
        self.metadata = told.onnx_metadata
        self.inputs = _with_batch(told.inputs, fixed)
        self.outputs = _with_batch(told.outputs, fixed)
        self.info = EngineInfo(
            engine=told.engine,
            label=f"{told.engine} ({told.float_precision})",
            version=library.version,
            device=here[0],
            float_precision=told.float_precision,
            options={"cuda_graph": "yes" if cuda_graph else "no", "sms": ",".join(map(str, told.sms))},
            path=str(path),
        )
        self._cache_path = path.with_name(f"{path.name}.runtime-cache")
        self._cuda_graph, self._lane_count = cuda_graph, lanes
        self._runtime, self._engine = self._deserialize(path)
        self._config, self._cache = self._runtime_config()
        self._lanes: list[Lane] = []

    def _deserialize(self, path: Path) -> tuple[Any, Any]:
        with self._library.listening() as log, torch.cuda.device(self._device):
            runtime = self._library.trt.Runtime(self._library.logger)
            if self._told.options.get("version_compatible"):
                runtime.engine_host_code_allowed = True  # such an engine brings a runtime of its own
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(f"{self.info.label} refuses {path}: {log.errors() or 'no reason given'}; build it again")
        return runtime, engine

    def _runtime_config(self) -> tuple[Any, Any]:
        """TensorRT-RTX compiles kernels when it first runs; what it compiled is kept beside the engine."""
        if not self._library.flavour.portable or not hasattr(self._engine, "create_runtime_config"):
            return None, None
        trt, config = self._library.trt, self._engine.create_runtime_config()
        if self._cuda_graph and hasattr(trt, "CudaGraphStrategy"):
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        cache = config.create_runtime_cache()
        if self._cache_path.is_file():
            cache.deserialize(self._cache_path.read_bytes())  # of another driver or GPU: refused, and compiled anew
        config.set_runtime_cache(cache)
        return config, cache

    def _lane(self, index: int) -> Lane:
        if self._engine is None:
            raise EngineError(f"{self.info.label}: the engine is closed")
        while len(self._lanes) <= index:
            with self._library.listening() as log, torch.cuda.device(self._device):
                arguments = () if self._config is None else (self._config,)
                context = self._engine.create_execution_context(*arguments)
            if context is None:
                raise EngineError(
                    f"{self.info.label}: no execution context ({log.errors() or 'no reason given'}); free memory of "
                    "the GPU, or build with a smaller largest batch"
                )
            own_graph = self._cuda_graph and self._config is None  # RTX captures by itself
            lane = Lane(self._library.trt, context, self._told, device=self._device, cuda_graph=own_graph)
            self._lanes.append(lane)
        return self._lanes[index]

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """See `Engine.run`. The time of a run holds the copies to the GPU and back."""
        lane = self._lane(0)
        self._submit(lane, inputs)
        return self._result(lane)

    def run_many(self, batches: Iterable[Mapping[str, NDArray[np.generic]]]) -> Iterator[Arrays]:
        """Run batches one after another, each copied in while the one before computes; results come in order.

        Raises:
            EngineError: as in `run`.
        """
        waiting: list[Lane] = []
        for index, inputs in enumerate(batches):
            if len(waiting) == self._lane_count:
                yield self._result(waiting.pop(0))
            lane = self._lane(index % self._lane_count)
            self._submit(lane, inputs)
            waiting.append(lane)
        for lane in waiting:
            yield self._result(lane)

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run on tensors of this GPU, on torch's current stream, without a copy; does not wait for the result.

        Calls belong on one stream: they share one execution context.

        Args:
            inputs: contiguous tensors by name, of the types and shapes that the engine takes.

        Returns:
            New tensors, filled when the current stream has come that far.

        Raises:
            EngineError: a tensor of another device, type or shape, or one that is not contiguous.
        """
        check_tensors(inputs, self._told, self._device, label=self.info.label)
        with self._failing():
            return self._lane(0).run_tensors(inputs)

    def warm(self, inputs: Mapping[str, NDArray[np.generic]]) -> Lane:
        """A lane whose inputs are on the GPU: what timing without transfers starts from.

        Raises:
            EngineError: as in `run`.
        """
        lane = self._lane(0)
        self._submit(lane, inputs)
        self._result(lane)
        return lane

    def inspector_json(self) -> str:
        """Layers of the engine as its inspector tells them, in JSON.

        Raises:
            EngineError: the engine is closed, or the inspector tells nothing.
        """
        if self._engine is None:
            raise EngineError(f"{self.info.label}: the engine is closed")
        with self._library.listening() as log:
            inspector = self._engine.create_engine_inspector()
            text = inspector.get_engine_information(self._library.trt.LayerInformationFormat.JSON)
        if not text:
            raise EngineError(f"{self.info.label}: the inspector tells nothing ({log.errors() or 'no reason given'})")
        return str(text)

    def _submit(self, lane: Lane, inputs: Mapping[str, NDArray[np.generic]]) -> None:
        checked = check_inputs(inputs, self.inputs, label=self.info.label)
        for name, array in checked.items():
            check_admitted(name, array.shape, self._told.profiles[name], label=self.info.label)
        with self._failing():
            lane.submit(checked)

    def _result(self, lane: Lane) -> Arrays:
        with self._failing():
            return lane.result()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Name the engine in what CUDA or the library raises, with what the library says beside it."""
        with self._library.listening() as log:
            try:
                yield
            except RuntimeError as error:
                told = log.errors() or reason(error)
                raise EngineError(f"{self.info.label} failed to run {self.info.path}: {told}") from error

    def close(self) -> None:
        """Keep what was compiled at run time, and free the GPU's memory."""
        if self._engine is not None and self._cache is not None and self._lanes:
            with replacing(self._cache_path) as temporary:
                temporary.write_bytes(bytes(self._cache.serialize()))
        self._lanes.clear()
        self._config = self._cache = self._engine = self._runtime = None


def _with_batch(tensors: tuple[TensorInfo, ...], batch: int | None) -> tuple[TensorInfo, ...]:
    """Tensors with an open batch, fixed to `batch`."""
    if batch is None:
        return tensors
    return tuple(
        TensorInfo(name=t.name, dtype=t.dtype, shape=(batch, *t.shape[1:])) if t.shape[:1] == (-1,) else t
        for t in tensors
    )


def check_tensors(inputs: Mapping[str, Tensor], told: EngineMetadata, device: torch.device, *, label: str) -> None:
    """Refuse tensors that an engine cannot read where they lie.

    Raises:
        EngineError: names the tensor, what it is and what the engine takes.
    """
    names = [tensor.name for tensor in told.inputs]
    if set(inputs) != set(names):
        raise EngineError(f"{label}: got inputs {', '.join(inputs) or 'none'}; the engine takes {', '.join(names)}")
    for tensor in told.inputs:
        given = inputs[tensor.name]
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype != tensor.dtype:
            raise EngineError(f"{label}: input {tensor.name!r} is {dtype}; the engine takes {tensor.dtype}")
        if given.device != device:
            raise EngineError(f"{label}: input {tensor.name!r} is on {given.device}; the engine runs on {device}")
        if not given.is_contiguous():
            raise EngineError(f"{label}: input {tensor.name!r} is not contiguous in NCHW; call .contiguous() on it")
        check_admitted(tensor.name, tuple(given.shape), told.profiles[tensor.name], label=label)
