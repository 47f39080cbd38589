"""Runs a built TensorRT engine: arrays or torch tensors in and out, streams, CUDA graphs, overlapping batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import (
    ENGINE_SUFFIXES,
    Arrays,
    BuildOptions,
    Engine,
    EngineInfo,
    GpuTimes,
    array_of,
    check_inputs,
    existing_file,
    time_batch,
    with_open_batch,
)
from compress.engines.base import check_tensors as check_given
from compress.engines.tensorrt.build import build_tensorrt
from compress.engines.tensorrt.library import (
    FLAVOURS,
    Library,
    gpu,
    gpu_problem,
    sm_problem,
    start_runtime,
    tensorrt_library,
)
from compress.engines.tensorrt.metadata import (
    EngineMetadata,
    check_fresh,
    check_runnable,
    check_whole,
    layers_path,
    metadata_path,
    read_metadata,
)
from compress.engines.tensorrt.options import TensorRTOptions, check_admitted, parse_options, yes_or_no
from compress.errors import EngineError, EngineUnavailableError
from compress.files import write_bytes, write_text
from compress.support.libraries import reason

if TYPE_CHECKING:
    import tensorrt

# torch's type for each type that an ONNX input or output can have.
TORCH_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


class ExecutionContext:
    """An execution context with memory of its own; with `cuda_graph`, a run of each new shape is replayed."""

    def __init__(
        self,
        context: tensorrt.IExecutionContext,
        metadata: EngineMetadata,
        *,
        device: torch.device,
        cuda_graph: bool = False,
    ) -> None:
        self._context, self._metadata, self._device, self._cuda_graph = context, metadata, device, cuda_graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pinned_in: dict[str, Tensor] = {}
        self._pinned_out: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    def submit(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Queue a batch: copy in, compute, copy out. Its result must be taken before the next batch is queued."""
        self._bind({name: array.shape for name, array in arrays.items()})
        for name, array in arrays.items():
            self._pinned_in[name].copy_(torch.from_numpy(array))
        self.copy_in()
        self.compute()
        self.copy_out()
        self._done.record(self.stream)

    def result(self) -> Arrays:
        self._done.synchronize()
        return {name: array_of(tensor).copy() for name, tensor in self._pinned_out.items()}

    def copy_in(self) -> None:
        with torch.cuda.stream(self.stream):
            for name, pinned in self._pinned_in.items():
                self._inputs[name].copy_(pinned, non_blocking=True)

    def compute(self) -> None:
        if self._graph is not None:
            with torch.cuda.stream(self.stream):
                self._graph.replay()
            return
        self._enqueue(self.stream)

    def copy_out(self) -> None:
        with torch.cuda.stream(self.stream):
            for name, pinned in self._pinned_out.items():
                pinned.copy_(self._outputs[name], non_blocking=True)

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._release()
        for name, tensor in inputs.items():
            self._context.set_input_shape(name, tuple(tensor.shape))
            self._context.set_tensor_address(name, tensor.data_ptr())
        outputs = self._new_outputs(pinned=False)
        for name, tensor in outputs.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        self._enqueue(torch.cuda.current_stream(self._device))
        return outputs

    def _bind(self, shapes: dict[str, tuple[int, ...]]) -> None:
        if shapes == self._shapes:
            return
        self._release()
        types = {tensor.name: TORCH_TYPES[tensor.dtype] for tensor in self._metadata.inputs}
        for name, shape in shapes.items():
            self._pinned_in[name] = torch.empty(shape, dtype=types[name], pin_memory=True)
            self._inputs[name] = torch.empty(shape, dtype=types[name], device=self._device)
            self._context.set_input_shape(name, shape)
        self._outputs = self._new_outputs(pinned=False)
        self._pinned_out = self._new_outputs(pinned=True)
        for name, tensor in (*self._inputs.items(), *self._outputs.items()):
            self._context.set_tensor_address(name, tensor.data_ptr())
        self._shapes = shapes
        if self._cuda_graph:
            self._capture()

    def _new_outputs(self, *, pinned: bool) -> dict[str, Tensor]:
        place: dict[str, Any] = {"pin_memory": True} if pinned else {"device": self._device}
        outputs = {}
        for tensor in self._metadata.outputs:
            dims = self._context.get_tensor_shape(tensor.name)
            shape = tuple(dims[i] for i in range(len(dims)))
            outputs[tensor.name] = torch.empty(shape, dtype=TORCH_TYPES[tensor.dtype], **place)
        return outputs

    def _release(self) -> None:
        self.stream.synchronize()
        self._shapes, self._graph = {}, None
        for tensors in (self._pinned_in, self._pinned_out, self._inputs, self._outputs):
            tensors.clear()

    def _capture(self) -> None:
        self._enqueue(self.stream)  # not recorded: the first run with a shape may allocate
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._enqueue(self.stream)
        self._graph = graph

    def _enqueue(self, stream: torch.cuda.Stream) -> None:
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("execute_async_v3 refused the batch; the library's log holds the reason")


def load(path: Path | str, build: BuildOptions, *, engine: str) -> TensorRTEngine:
    """Load an engine file, or an ONNX file, from which the engine is built first if there is none yet.

    The lean runtime runs the engine that TensorRT built.
    """
    file = existing_file(path)
    given = {"tf32": "no", **build.options} if build.precision == "f32" else build.options
    options = parse_options(given, batch_size=build.batch_size)
    graph = yes_or_no("cuda_graph", build.options.get("cuda_graph", "no"))
    if FLAVOURS[engine].runs and file.suffix not in ENGINE_SUFFIXES:
        file = engine_beside(file, engine)
    built = file.suffix in ENGINE_SUFFIXES
    metadata = checked_metadata(file, engine) if built else None
    library = tensorrt_library(engine)
    problem = gpu_problem(library.flavour, options.device)
    problem = problem or sm_problem(library.flavour, library.sms(), gpu(options.device))
    if problem:
        raise EngineUnavailableError(cannot_run(file, engine, problem))
    made = build_tensorrt(file, engine, options=options) if metadata is None else None
    if made is not None:
        file, metadata = made.path, made.metadata
    assert metadata is not None
    if build.precision not in (None, metadata.float_precision):
        raise EngineError(
            f"{engine}: precision {build.precision!r} was asked of {file}, whose types are "
            f"{metadata.float_precision!r}: it is strongly typed and runs the types of the ONNX file; export it in "
            "that precision, or leave it out"
        )
    loaded = TensorRTEngine(library, file, metadata, options=options, cuda_graph=graph)
    if made is not None and not made.reused and not library.flavour.portable:
        write_text(layers_path(file), loaded.inspector_json())  # TensorRT-RTX writes its layers into the build log
    return loaded


def checked_metadata(path: Path, engine: str) -> EngineMetadata:
    metadata = read_metadata(path)
    wanted = FLAVOURS[engine].runs or engine
    if metadata.engine != wanted:
        raise EngineError(
            f"{path} was built with {metadata.engine}; load it as {metadata.engine!r}, or build it for {wanted!r}"
        )
    if wanted != engine and not metadata.options.get("version_compatible"):
        raise EngineError(
            f"{path} is no version-compatible engine, and {engine} runs no other; load it as {wanted!r}, or build it "
            f"with {COMPATIBLE}"
        )
    check_whole(path, metadata)
    onnx = path.with_name(metadata.onnx)
    if onnx.is_file():
        check_fresh(path, metadata, onnx)
    return metadata


# The command that builds an engine for the lean runtime.
COMPATIBLE = "--engine tensorrt --option version_compatible=yes"


def engine_beside(onnx: Path, engine: str) -> Path:
    """The one version-compatible engine of TensorRT that was built from a model and lies beside it."""
    files = sorted(onnx.parent.glob(f"{onnx.stem}.{FLAVOURS[engine].runs}.sm*.engine"))
    found = [file for file in files if read_metadata(file).options.get("version_compatible")]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise EngineUnavailableError(f"{engine}: {names} were built from {onnx}; name one of them")
    raise EngineUnavailableError(
        f"{engine} has no builder, and beside {onnx} is no version-compatible engine of it: build one where TensorRT "
        f"is (python -m compress build onnx {onnx} {COMPATIBLE}), copy it and its .json here, and name it"
    )


def cannot_run(path: Path, engine: str, problem: str) -> str:
    built = [path] if path.suffix in ENGINE_SUFFIXES else sorted(path.parent.glob(f"{path.stem}.{engine}.sm*.engine"))
    sms = {file.name: read_metadata(file).sms for file in built if metadata_path(file).is_file()}
    if not sms:
        advice = f"python -m compress build onnx {path} --engine {engine}"
        more = f"{advice} builds it for another machine" if FLAVOURS[engine].portable else "use a machine with that GPU"
        return f"{engine} cannot run here: {problem}; {more}"
    names = ", ".join(f"{name} for SM {', '.join(map(str, of))}" for name, of in sms.items())
    return f"built {names}, but it cannot be run here: {problem}; copy it and its .json to a machine with such a GPU"


class TensorRTEngine(Engine):
    """An engine file on one GPU; made by `load`.

    Args:
        metadata: of the engine file, already checked against it.
        options: `device` is the GPU; `batch` of equal numbers fixes the batch of `inputs`.
    """

    takes_tensors = True

    def __init__(
        self,
        library: Library,
        path: Path,
        metadata: EngineMetadata,
        *,
        options: TensorRTOptions,
        cuda_graph: bool = False,
    ) -> None:
        here = gpu(options.device)
        if here is None:
            problem = gpu_problem(library.flavour, options.device)
            raise EngineUnavailableError(cannot_run(path, metadata.engine, problem))
        check_runnable(path, metadata, version=library.version, gpu=here[0], sm=here[1])
        name = library.flavour.name
        self._library, self._engine_metadata, self._device = library, metadata, torch.device("cuda", options.device)
        fixed = options.batch[0] if len(set(options.batch)) == 1 else None
        self.metadata = metadata.onnx_metadata
        self.inputs = with_open_batch(metadata.inputs, fixed)
        self.outputs = with_open_batch(metadata.outputs, fixed)
        self.info = EngineInfo(
            engine=name,
            label=f"{name} ({metadata.float_precision})",
            version=library.version,
            device=here[0],
            float_precision=metadata.float_precision,
            options={"cuda_graph": "yes" if cuda_graph else "no", "sms": ",".join(map(str, metadata.sms))},
            path=str(path),
        )
        self._cache_path = path.with_name(f"{path.name}.runtime-cache")
        self._cuda_graph = cuda_graph
        self._runtime: tensorrt.Runtime | None
        self._engine: tensorrt.ICudaEngine | None
        self._runtime, self._engine = self._deserialize(path)
        self._config, self._cache = self._runtime_config()
        self._made: ExecutionContext | None = None

    def _deserialize(self, path: Path) -> tuple[tensorrt.Runtime, tensorrt.ICudaEngine]:
        with self._library.listening() as log, torch.cuda.device(self._device):
            runtime = start_runtime(self._library)
            if self._engine_metadata.options.get("version_compatible"):
                runtime.engine_host_code_allowed = True  # such an engine contains a runtime of its own
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(f"{self.info.label} refuses {path}: {log.errors() or 'no reason given'}; build it again")
        return runtime, engine

    def _runtime_config(self) -> tuple[Any, Any]:
        """Load the kernels that TensorRT-RTX compiled in earlier runs; they are stored beside the engine."""
        engine: Any = self._engine  # TensorRT itself has no such members
        if not self._library.flavour.portable or not hasattr(engine, "create_runtime_config"):
            return None, None
        trt, config = self._library.trt, engine.create_runtime_config()
        if self._cuda_graph and hasattr(trt, "CudaGraphStrategy"):
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        cache = config.create_runtime_cache()
        if self._cache_path.is_file():
            cache.deserialize(self._cache_path.read_bytes())  # refused if of another driver or GPU
        config.set_runtime_cache(cache)
        return config, cache

    def _context(self) -> ExecutionContext:
        engine = self.held(self._engine)
        if self._made is None:
            with self._library.listening() as log, torch.cuda.device(self._device):
                arguments = () if self._config is None else (self._config,)
                context = engine.create_execution_context(*arguments)
            if context is None:
                raise EngineError(
                    f"{self.info.label}: no execution context ({log.errors() or 'no reason given'}); free memory of "
                    "the GPU, or build with a smaller largest batch"
                )
            own_graph = self._cuda_graph and self._config is None  # TensorRT-RTX captures graphs by itself
            self._made = ExecutionContext(context, self._engine_metadata, device=self._device, cuda_graph=own_graph)
        return self._made

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        context = self._context()
        checked = check_inputs(inputs, self.inputs, label=self.info.label)
        for name, array in checked.items():
            check_admitted(name, array.shape, self._engine_metadata.profiles[name], label=self.info.label)
        with self._failing():
            context.submit(checked)
            return context.result()

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_tensors(inputs, self._engine_metadata, self._device, label=self.info.label)
        with self._failing():
            return self._context().run_tensors(inputs)

    def gpu_times(self, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int = 10, runs: int = 100) -> GpuTimes:
        self.run(inputs)  # leaves the inputs on the GPU
        context, size = self._context(), len(next(iter(inputs.values())))
        steps = (context.copy_in, context.compute, context.copy_out)
        return time_batch(*steps, context.stream, batch_size=size, warmup=warmup, runs=runs)

    def inspector_json(self) -> str:
        with self._library.listening() as log:
            inspector = self.held(self._engine).create_engine_inspector()
            text = inspector.get_engine_information(self._library.trt.LayerInformationFormat.JSON)
        if not text:
            raise EngineError(f"{self.info.label}: the inspector returns nothing ({log.errors() or 'no reason given'})")
        return str(text)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        with self._library.listening() as log:
            try:
                yield
            except RuntimeError as error:
                message = log.errors() or reason(error)
                raise EngineError(f"{self.info.label} failed to run {self.info.path}: {message}") from error

    def close(self) -> None:
        """Store the kernels that were compiled at run time, and free the GPU's memory."""
        if self._engine is not None and self._cache is not None and self._made is not None:
            write_bytes(self._cache_path, bytes(self._cache.serialize()))
        self._made = self._config = self._cache = self._engine = self._runtime = None


def check_tensors(inputs: Mapping[str, Tensor], metadata: EngineMetadata, device: torch.device, *, label: str) -> None:
    check_given(inputs, metadata.inputs, device, label=label)
    for name, given in inputs.items():
        if not given.is_contiguous():
            raise EngineError(f"{label}: input {name!r} is not contiguous in NCHW; call .contiguous() on it")
        check_admitted(name, tuple(given.shape), metadata.profiles[name], label=label)
