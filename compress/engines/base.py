"""The interface of an engine, which imports its library on first use, and the ONNX files that engines read.

Checks of arrays and times by a GPU's clock are the same for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from compress.errors import EngineError, EngineUnavailableError, near_misses
from compress.files import path_of
from compress.onnx_graph import MOVED_OVER, OnnxGraph, inputs_of, lacks, mend, opset_of, tensors_of
from compress.support.libraries import library_errors

Arrays = dict[str, NDArray[np.generic]]
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Availability of an engine on this machine; `reason` and `install` say why it is not and what makes it so."""

    name: str
    available: bool
    version: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""
    install: str = ""


def cpu_availability(name: str, package: str, library: Callable[[], object], install: str) -> Availability:
    """Availability of an engine that runs on every CPU once `package` is installed."""
    try:
        library()
    except EngineUnavailableError as error:
        return Availability(name=name, available=False, reason=str(error), install=install)
    return Availability(name=name, available=True, version=version(package), devices=("CPU",))


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """An input or output of an engine. A dynamic dimension is -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def with_batch(self, batch_size: int) -> TensorInfo:
        return replace(self, shape=(batch_size, *self.shape[1:]))

    def with_sides(self, sides: Sequence[int]) -> TensorInfo:
        """Return the tensor with open dimensions after the batch filled in, in their order."""
        fixed = len(self.shape) == 4 and -1 not in self.shape[1:]
        if fixed and len(sides) == 2 and tuple(sides) not in (self.shape[2:], self.shape[1:3]):  # NCHW, NHWC
            raise EngineError(
                f"{self.name!r} is fixed to {self.shape}, and {sides[0]} x {sides[1]} is asked for: leave --size "
                "(sides=) out, or export a file for that size"
            )
        numbers = iter(sides)
        return replace(self, shape=(*self.shape[:1], *(next(numbers, -1) if n == -1 else n for n in self.shape[1:])))


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Description of an engine, shown beside every figure that is measured on it.

    Attributes:
        label: name of the row in tables, such as `openvino (f32)`.
        float_precision: type of the part that is not quantized, as the engine reports it; else "unknown".
        path: the model file; None for a module in memory.
    """

    engine: str
    label: str
    version: str
    device: str
    float_precision: str
    options: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options that an engine is built with; None is the file's batch and the library's own choice.

    Attributes:
        precision: of the part that is not quantized (`f32`, `bf16`, `f16`).
        options: of this engine, by name.
    """

    batch_size: int | None = None
    threads: int | None = None
    precision: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise EngineError(f"{name} is {value!r}: it must be an integer of 1 or more, or None")


def cpu_info(name: str, package: str, build: BuildOptions, path: Path) -> EngineInfo:
    """The description of an engine on the CPU that computes in float32 what is not quantized."""
    if build.precision not in (None, "f32"):
        raise EngineError(f"{name}: precision is {build.precision!r}; it runs what is not quantized in f32")
    return EngineInfo(
        engine=name,
        label=name,
        version=version(package),
        device="CPU",
        float_precision="f32",
        options={"num_threads": str(build.threads or 1)},
        path=str(path),
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeLayer:
    """One layer that an engine runs, as the engine reports it.

    Attributes:
        precision: type in which it computes, such as `u8`, `bf16` or `f32`.
        original_names: nodes of the ONNX file that were fused into it, in no order.
        inputs, outputs, constants: of an operator of a file for phones; () elsewhere.
    """

    name: str
    kind: str
    precision: str
    output_precisions: tuple[str, ...] = ()
    kernel: str = ""
    original_names: tuple[str, ...] = ()
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    constants: tuple[TensorInfo, ...] = ()


_SHORT = {"float32": "f32", "float16": "f16", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32"}


def operator(
    kind: str,
    kernel: str,
    inputs: Sequence[TensorInfo] = (),
    outputs: Sequence[TensorInfo] = (),
    constants: Sequence[TensorInfo] = (),
) -> RuntimeLayer:
    """An operator of a file for phones; its type is that of its first input that is no list of sizes, or of its result.

    `kernel`: `XNNPACK`, or the engine's own.
    """
    kinds = [_SHORT.get(tensor.dtype, tensor.dtype) for tensor in (*inputs, *constants, *outputs)]
    names = tuple(tensor.name for tensor in outputs[:1])
    return RuntimeLayer(
        name=names[0] if names else kind,
        kind=kind,
        precision=next((one for one in kinds if one not in {"i32", "int64"}), "unknown"),
        output_precisions=tuple(kinds[len(kinds) - len(outputs) :]),
        kernel=kernel,
        original_names=names,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants=tuple(constants),
    )


@dataclass(frozen=True, kw_only=True)
class GpuTimes:
    """Times of one batch by the GPU's own clock, in ms, one number for each run; copies are of pinned memory."""

    batch_size: int
    copy_in_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    copy_out_ms: tuple[float, ...]
    total_ms: tuple[float, ...]

    @property
    def images_per_s(self) -> float:
        """From the median time without transfers."""
        return self.batch_size / float(np.median(self.compute_ms)) * 1e3


class Engine(ABC):
    """A model that is ready to run. `close` frees it; an engine is also a context manager that closes it.

    Examples:
        >>> with compress.build_engine("float.onnx", "onnxruntime") as engine:
        ...     engine.run({"input": images.numpy()})["logits"].shape
        (16, 4)
    """

    # True if `run_tensors` works.
    takes_tensors: ClassVar[bool] = False
    # True if `layer_runs_ms` returns the times of every run; it is called once, after the last.
    remembers_runs: ClassVar[bool] = False

    info: EngineInfo
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]

    @abstractmethod
    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Run once, with an array for each of `self.inputs` by name.

        Raises:
            EngineError: an input is missing, unknown or of another type or shape, or the library fails.
        """

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        """Return the layers that run after fusion, in their order; constants are left out.

        Raises:
            EngineError: this engine does not report its layers.
        """
        raise EngineError(
            f"{self.info.engine} does not report which layers it runs; build the file with 'openvino', or with "
            "'onnxruntime' and profile='yes'"
        )

    def layer_times_ms(self) -> dict[str, float]:
        """Return the milliseconds that each of `runtime_layers` took in the last run, by name.

        Raises:
            EngineError: this engine does not report times, or was not built to measure them.
        """
        raise EngineError(
            f"{self.info.engine} does not report how long its layers take; build the file with 'openvino' or "
            "'onnxruntime', profile='yes'"
        )

    def layer_runs_ms(self) -> list[dict[str, float]]:
        """Return `layer_times_ms` of each run that the engine remembers, the last one last.

        Raises:
            EngineError: as `layer_times_ms`.
        """
        return [self.layer_times_ms()]

    def gpu_times(
        self, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int = 10, runs: int = 100
    ) -> GpuTimes | None:
        """Time a batch with and without copies; None without access to a GPU's clock.

        Raises:
            EngineError: a number is out of range, or as in `run`.
        """
        return None

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run on tensors of this GPU, on torch's current stream, without a copy; does not wait for the result.

        Calls belong on one stream: they share one execution context.

        Raises:
            EngineError: this engine takes arrays alone, or a tensor is of another device, type, shape or layout.
        """
        raise EngineError(f"{self.info.label} takes arrays, not tensors of a GPU; use run")

    def held(self, part: Part | None) -> Part:
        """Return a part that `close` frees (EngineError: the engine is closed)."""
        if part is None:
            raise EngineError(f"{self.info.label}: the engine is closed")
        return part

    def close(self) -> None:  # noqa: B027  (most engines have nothing to free)
        """Free what the engine holds."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_engine(given: object) -> None:
    if not isinstance(given, Engine):
        what = given if isinstance(given, (str, Path)) else f"a {type(given).__name__}"
        raise EngineError(f"{what} is no engine: give compress.build_engine(FILE, NAME), or a TorchEngine of a model")


def check_inputs(inputs: Mapping[str, NDArray[np.generic]], expected: Sequence[TensorInfo], *, label: str) -> Arrays:
    """Refuse inputs that do not fit; return them contiguous, in the engine's order. -1 takes any size from 1."""
    names = [tensor.name for tensor in expected]
    if not isinstance(inputs, Mapping):
        raise EngineError(f"{label}: inputs is a {type(inputs).__name__}: give arrays by name ({', '.join(names)})")
    for name in inputs:
        if name not in names:
            raise EngineError(f"{label}: unknown input {name!r}{near_misses(name, names)} (inputs: {', '.join(names)})")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise EngineError(f"{label}: missing input {', '.join(missing)}; got {', '.join(inputs) or 'none'}")
    checked: Arrays = {}
    for tensor in expected:
        array = inputs[tensor.name]
        if not isinstance(array, np.ndarray):
            raise EngineError(f"{label}: input {tensor.name!r} is a {type(array).__name__}; give a numpy array")
        if array.dtype.name != tensor.dtype:
            raise EngineError(f"{label}: input {tensor.name!r} is {array.dtype.name}; the engine takes {tensor.dtype}")
        check_shape(tensor, array.shape, label=label)
        checked[tensor.name] = np.ascontiguousarray(array).reshape(array.shape)  # a number stays one
    return checked


def check_shape(tensor: TensorInfo, shape: tuple[int, ...], *, label: str) -> None:
    alike = len(shape) == len(tensor.shape)
    if not alike or any(n != m and (m != -1 or n < 1) for n, m in zip(shape, tensor.shape, strict=True)):
        raise EngineError(
            f"{label}: input {tensor.name!r} has shape {shape}; the engine takes {shape_text(tensor.shape)}"
        )


def shape_text(shape: Iterable[int]) -> str:
    """Return `(any, 3, 224, 224)` for (-1, 3, 224, 224)."""
    return f"({', '.join('any' if size == -1 else str(size) for size in shape)})"


def with_batch(inputs: Sequence[TensorInfo], batch_size: int | None, *, where: str) -> tuple[TensorInfo, ...]:
    if batch_size is None:
        return tuple(inputs)
    for tensor in inputs:
        if not tensor.shape or tensor.shape[0] not in (-1, batch_size):
            raise EngineError(
                f"{where}: batch_size is {batch_size} but input {tensor.name!r} is fixed to "
                f"{shape_text(tensor.shape)}; export it with a dynamic batch, or leave batch_size out"
            )
    return tuple(tensor.with_batch(batch_size) for tensor in inputs)


def with_open_batch(tensors: Sequence[TensorInfo], batch_size: int | None) -> tuple[TensorInfo, ...]:
    return tuple(t.with_batch(batch_size) if batch_size is not None and t.shape[:1] == (-1,) else t for t in tensors)


@dataclass(frozen=True, kw_only=True)
class OnnxFile:
    """The interface of an ONNX model.

    Attributes:
        inputs: those that are not initializers; a dimension without a number is -1.
        batch_names: symbols of the first dimension of the inputs, such as {"batch"}.
        output_batch_names: symbol of the first dimension of each output; "" if it has none.
        float_types: types of floating-point weights and activations: `f32`, `f16`, `bf16`, `f64`.
        quantized_types: types that its QuantizeLinear nodes write: `i8`, `u8`, `fp8`.
        clipped_scale: least scale that integers after a Clip have; infinity without one.
        largest: magnitude that quantized tensors reach at least.
        read_within: an If or Loop reads a dequantized tensor after operations of `MOVED_OVER`.
        weight_files: files beside it that hold its weights, sorted; () if it holds them itself.
    """

    path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    batch_names: frozenset[str]
    output_batch_names: tuple[str, ...]
    float_types: frozenset[str]
    opset: int
    quantized_types: frozenset[str]
    metadata: Mapping[str, str]
    clipped_scale: float = math.inf
    largest: float = 0.0
    read_within: bool = False
    weight_files: tuple[Path, ...] = ()


# Endings of files that TensorRT and TensorRT-RTX have built.
ENGINE_SUFFIXES = (".engine", ".plan")


def existing_file(path: Path | str) -> Path:
    path = path_of(path)
    if not path.is_file():
        there = "is a folder, not a model file" if path.is_dir() else "is no regular file"
        raise EngineError(f"{path}: {there if path.exists() else 'no such file'}")
    return path


def load_onnx(path: Path | str, *, weights: bool = False) -> onnx.ModelProto:
    path = existing_file(path)
    if path.suffix in ENGINE_SUFFIXES:
        raise EngineError(f"{path} is a built TensorRT engine; give the ONNX file that it was built from")
    with library_errors(EngineError, f"{path}: not an ONNX model, or a truncated one (", "); export it again"):
        return onnx.load(str(path), load_external_data=weights)


def read_onnx(path: Path | str) -> OnnxFile:
    """Read the interface of an ONNX file; weights in other files are not read."""
    return read_interface(path_of(path), load_onnx(path))


def _is_moved(name: str, view: OnnxGraph) -> bool:
    passed = list(view.before(name, MOVED_OVER))
    return len(passed) > 1 and passed[-1] is not None and passed[-1].op_type == "DequantizeLinear"


def read_interface(path: Path, model: onnx.ModelProto) -> OnnxFile:
    graph = model.graph
    if missing := lacks(model):
        raise EngineError(f"{path}: {missing}")
    mend(model)
    view = OnnxGraph(graph)
    weights, constants = {tensor.name for tensor in graph.initializer}, view.constants
    scales = list(_scales(graph, constants))
    clipped = {node.output[0] for node in graph.node if node.op_type == "Clip"}
    inputs = [value for value in graph.input if value.name not in weights]
    return OnnxFile(
        path=path,
        inputs=tuple(map(_tensor, inputs)),
        outputs=tuple(map(_tensor, graph.output)),
        batch_names=frozenset(name for name in map(_batch_name, inputs) if name),
        output_batch_names=tuple(map(_batch_name, graph.output)),
        float_types=frozenset(_float_types(graph)),
        opset=opset_of(model),
        quantized_types=frozenset(_quantized_types(graph, constants)),
        clipped_scale=min((float(scale.min()) for name, scale in scales if name in clipped), default=math.inf),
        largest=max((127 * float(scale.max()) for _, scale in scales), default=0.0),
        read_within=any(_is_moved(name, view) for node in graph.node for name in inputs_of(node)[len(node.input) :]),
        metadata={entry.key: entry.value for entry in model.metadata_props},
        weight_files=tuple(
            sorted(
                {
                    path.parent / entry.value
                    for tensor in tensors_of(graph)
                    for entry in tensor.external_data
                    if entry.key == "location"
                }
            )
        ),
    )


def _tensor(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        raise EngineError(f"{value.name!r} is not a tensor of a known type: only models of tensors are run")
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorInfo(name=value.name, dtype=dtype.name, shape=shape)


def _batch_name(value: onnx.ValueInfoProto) -> str:
    dims = value.type.tensor_type.shape.dim
    return str(dims[0].dim_param) if dims else ""


_FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.DOUBLE: "f64",
    TensorProto.BFLOAT16: "bf16",
}


def _float_types(graph: onnx.GraphProto) -> Iterator[str]:
    numbers = [tensor.data_type for tensor in graph.initializer]
    numbers += [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    for node in graph.node:
        numbers += [a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"]
        numbers += [a.t.data_type for a in node.attribute if node.op_type == "Constant" and a.name == "value"]
    return (_FLOATS[number] for number in numbers if number in _FLOATS)


_FP8 = (
    *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ),
    *(TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ),
)
_QUANTIZED: dict[int, str] = {TensorProto.UINT8: "u8", TensorProto.INT8: "i8", **dict.fromkeys(_FP8, "fp8")}


def _scales(
    graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The tensors that are quantized when the file runs, with their scales."""
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            scale = constants.get(node.input[1])
            value = None if scale is None or scale.external_data else numpy_helper.to_array(scale)
            if value is not None and value.size:
                yield node.input[0], value


def _quantized_types(graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    points = [node.input[2] for node in graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2]
    kinds = [constants[name].data_type for name in points if name in constants]
    return (_QUANTIZED[kind] for kind in kinds if kind in _QUANTIZED)


def check_tensors(
    inputs: Mapping[str, Tensor], expected: Sequence[TensorInfo], device: torch.device, *, label: str
) -> None:
    """Refuse other names, types and devices than an engine takes."""
    names = [tensor.name for tensor in expected]
    if set(inputs) != set(names):
        raise EngineError(f"{label}: got inputs {', '.join(inputs) or 'none'}; the engine takes {', '.join(names)}")
    for tensor in expected:
        given = inputs[tensor.name]
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype != tensor.dtype:
            raise EngineError(f"{label}: input {tensor.name!r} is {dtype}; the engine takes {tensor.dtype}")
        if given.device != device:
            raise EngineError(f"{label}: input {tensor.name!r} is on {given.device}; the engine runs on {device}")


def array_of(tensor: Tensor) -> NDArray[np.generic]:
    """A tensor on the CPU, bfloat16 as float32, which numpy has."""
    tensor = tensor.detach().cpu()
    array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def time_batch(
    copy_in: Callable[[], None],
    compute: Callable[[], None],
    copy_out: Callable[[], None],
    stream: torch.cuda.Stream,
    *,
    batch_size: int,
    warmup: int,
    runs: int,
) -> GpuTimes:
    """Time a batch whose three parts are queued on `stream`."""
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    for _ in range(warmup):
        compute()
    marks = []
    for _ in range(runs):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record(stream)
        for step, event in zip((copy_in, compute, copy_out), events[1:], strict=True):
            step()
            event.record(stream)
        marks.append(events)
    stream.synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    moved_in, computed, moved_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=batch_size,
        copy_in_ms=moved_in,
        compute_ms=computed,
        copy_out_ms=moved_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )
