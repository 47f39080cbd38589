"""ONNX Runtime: runs an ONNX file in the types that it holds, on the CPU or another execution provider."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.engines.base import (
    Arrays,
    Availability,
    BuildOptions,
    Engine,
    EngineInfo,
    OnnxFile,
    RuntimeLayer,
    TensorInfo,
    check_inputs,
    load_onnx,
    read_onnx,
    with_batch,
)
from compress.errors import CompressWarning, EngineError, EngineUnavailableError, near_misses
from compress.export.onnxruntime import weights_to_unsigned
from compress.files import parse_json
from compress.support.libraries import import_library, library_errors
from compress.support.process import sums_bytes_in_16_bits, thread_count

_KERNEL, _END = "_kernel_time", "model_run"
_TYPES = {"float": "f32", "float16": "f16", "bfloat16": "bf16", "uint8": "u8", "int8": "i8", "int32": "i32"}
# What ONNX Runtime adds to a node's name where it makes the node anew, to move channels last for example.
_COPY = re.compile(r"_token_\d+$")

# Each node of the optimized graph, and its time in a run in ms, by name in the order of execution.
Profile = Mapping[str, tuple[RuntimeLayer, float]]


def read_profile(text: str) -> list[Profile]:
    try:
        events = parse_json(text)
    except ValueError as error:
        raise EngineError(f"onnxruntime wrote a profile that cannot be read: {error}") from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise EngineError("onnxruntime wrote a profile that is no list of events")
    return list(_runs(events))


def _runs(events: list[Mapping[str, Any]]) -> Iterator[Profile]:
    nodes: dict[str, tuple[RuntimeLayer, float]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            layer = _layer(name.removesuffix(_KERNEL), event.get("args", {}))
            nodes[layer.name] = layer, float(event.get("dur", 0.0)) / 1e3
        elif name == _END and nodes:
            yield nodes
            nodes = {}


def _layer(name: str, facts: Mapping[str, Any]) -> RuntimeLayer:
    read, written = _types(facts.get("input_type_shape")), _types(facts.get("output_type_shape"))
    return RuntimeLayer(
        name=name,
        kind=str(facts.get("op_name", "")),
        precision=read[0] if read else "unknown",
        output_precisions=written,
        original_names=(_COPY.sub("", name),),
    )


def _types(shapes: Any) -> tuple[str, ...]:
    """Each tensor is a mapping of its type to its shape."""
    return tuple(_TYPES.get(key, key) for shape in shapes or () for key in shape)


NAME = "onnxruntime"
CPU = "CPUExecutionProvider"
OPTIONS = {
    "provider": f"execution provider; {CPU} by default",
    "fuse": "no: run every node as the file has it, Q/DQ pairs included; by default all optimizations (for files with "
    "FP8, those that leave Q/DQ pairs alone)",
    "ops": "a library of operators that the file needs, such as lib.so; several are separated by colons",
    "profile": "yes: time every layer of a run, for layer_times_ms; this takes some time itself",
}
_INSTALL = "pip install onnxruntime"
_ERRORS_ONLY = 3
# Optimizers that quantize biases with the product of two scales, which may underflow in float16. Measured on one
# ResNet-50: 6 dB of signal to noise with it, 29 without; that underflow is the cause is likely, not proven.
_HARMFUL_IN_HALF = ["WeightBiasQuantization"]
# It leaves out a Clip whose bounds are within float32's epsilon of those of the integers, an absolute difference that
# is many steps of a smaller scale: a ReLU6 before zero point 0 passes negative values (1.31).
_HARMFUL_BELOW_EPSILON = ["ClipQuantRewrite"]
_EPSILON = 2.0**-23
# It ends the process where an If or Loop reads the result of an operation over which it moves a pair (1.31).
_HARMFUL_WITHIN = ["QDQPropagationTransformer"]

# First opset whose QuantizeLinear may name its output type. ONNX Runtime 1.31 turns INT8 activations into UINT8 and
# does not change that name in its own nodes (`output_dtype INT8 does not match y_zero_point type UINT8`), unless an
# option makes it leave INT8 alone.
_TYPED_OPSET = 21


def availability() -> Availability:
    try:
        ort = import_library(NAME, _INSTALL)
    except EngineUnavailableError as error:
        return Availability(name=NAME, available=False, reason=str(error), install=_INSTALL)
    return Availability(
        name=NAME, available=True, version=ort.__version__, devices=tuple(ort.get_available_providers())
    )


def load(path: Path | str, build: BuildOptions) -> ONNXRuntimeEngine:
    ort = import_library(NAME, _INSTALL)
    provider = build.options.get("provider", CPU)
    allowed = ort.get_available_providers()
    if provider not in allowed:
        raise EngineUnavailableError(
            f"onnxruntime: no provider {provider!r} here{near_misses(provider, allowed)} (there is: "
            f"{', '.join(allowed)}); install the onnxruntime package that holds it"
        )
    return ONNXRuntimeEngine(ort, read_onnx(path), provider, build)


class ONNXRuntimeEngine(Engine):
    """A session; made by `load`."""

    remembers_runs = True

    def __init__(self, ort: Any, file: OnnxFile, provider: str, build: BuildOptions) -> None:
        precision = "f32" if provider == CPU and file.float_types <= {"f32"} else "unknown"
        if build.precision not in (None, precision):
            raise EngineError(
                f"onnxruntime: precision {build.precision!r} was asked of {file.path}, which runs in {precision!r}: "
                "ONNX Runtime takes the types of the file; export it in that precision, or leave it out"
            )
        self.inputs = with_batch(file.inputs, build.batch_size, where=str(file.path))
        self.outputs = _outputs(file, build.batch_size)
        self.metadata = file.metadata
        self._profiles: list[Profile] = []
        self._ran = False
        self._folder = TemporaryDirectory() if _yes(build.options, "profile", "no") else None
        session_options, options = _session_options(ort, file, build)
        form = _form(file)
        if isinstance(form, bytes):
            options["weights"] = "u8"
        if self._folder is not None:
            session_options.enable_profiling = True
            session_options.profile_file_prefix = str(Path(self._folder.name) / "profile")
        with library_errors(EngineError, f"onnxruntime cannot load {file.path}: "):
            self._session = ort.InferenceSession(
                form,
                session_options,
                providers=[provider],
                disabled_optimizers=_harmful(file),
            )
        used = self._session.get_providers()[0]
        if used != provider:
            raise EngineError(f"onnxruntime: {provider} was asked of {file.path}, but it fell back to {used}")
        device = provider.removesuffix("ExecutionProvider")
        self.info = EngineInfo(
            engine=NAME,
            label=_label(device if provider != CPU else "", file),
            version=ort.__version__,
            device=device,
            float_precision=precision,
            options={"provider": provider, **options},
            path=str(file.path),
        )

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        session = self.held(self._session)
        checked, self._ran = check_inputs(inputs, self.inputs, label=self.info.label), True
        with library_errors(EngineError, f"{self.info.label} failed to run {self.info.path}: "):
            results = session.run([tensor.name for tensor in self.outputs], checked)
        return {tensor.name: np.asarray(result) for tensor, result in zip(self.outputs, results, strict=True)}

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        return tuple(layer for layer, _ in self._profiled()[-1].values())

    def layer_times_ms(self) -> dict[str, float]:
        return self.layer_runs_ms()[-1]

    def layer_runs_ms(self) -> list[dict[str, float]]:
        """Later runs are not timed: a session writes its profile once."""
        return [{name: ms for name, (_, ms) in run.items() if ms} for run in self._profiled()]

    def _profiled(self) -> list[Profile]:
        if self._folder is None or self._session is None:
            raise EngineError(
                f"{self.info.label} does not report its layers: it was not built to time them; give build_engine "
                "profile='yes'"
            )
        if not self._profiles:
            if not self._ran:
                self.run({one.name: np.zeros([max(1, size) for size in one.shape], one.dtype) for one in self.inputs})
            self._profiles = read_profile(Path(self._session.end_profiling()).read_text(encoding="utf-8"))
        return self._profiles

    def close(self) -> None:
        self._session = None
        if self._folder is not None:
            self._folder.cleanup()


def _harmful(file: OnnxFile) -> list[str]:
    harmful = [*_HARMFUL_IN_HALF] if file.float_types & {"f16", "bf16"} else []
    name = file.path.name
    if file.read_within:
        harmful += _HARMFUL_WITHIN
        what = f"an If or Loop of {name} reads a dequantized tensor after a Reshape or the like"
        _warn_of(f"{what}, at which ONNX Runtime 1.31 ends the process by default", _HARMFUL_WITHIN)
    if file.clipped_scale < _EPSILON:
        harmful += _HARMFUL_BELOW_EPSILON
        what = f"{name} has a Clip before a scale of {file.clipped_scale:.1g}, which ONNX Runtime leaves out by default"
        _warn_of(f"{what}. Here it is computed", _HARMFUL_BELOW_EPSILON)
    return harmful


def _warn_of(what: str, harmful: list[str]) -> None:
    warnings.warn(f"{what}; give sessions of your own disabled_optimizers={harmful}", CompressWarning, stacklevel=5)


def _form(file: OnnxFile) -> str | bytes:
    """The file's path; its bytes with unsigned weights where sums of products of u8 and i8 saturate."""
    # ONNX Runtime's own option for that, `x64quantprecision`, does not load files in which a weight is read twice
    # (1.31).
    if not file.quantized_types or not sums_bytes_in_16_bits():
        return str(file.path)
    model = load_onnx(file.path, weights=True)
    weights_to_unsigned(model)
    changed: bytes = model.SerializeToString()
    return changed


def _session_options(ort: Any, file: OnnxFile, build: BuildOptions) -> tuple[Any, dict[str, str]]:
    options = ort.SessionOptions()
    level = "none" if not _yes(build.options, "fuse", "yes") else "basic" if "fp8" in file.quantized_types else "all"
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        "none": levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "all": levels.ORT_ENABLE_ALL,
    }[level]
    options.log_severity_level = _ERRORS_ONLY
    options.inter_op_num_threads = 1
    # threads that spin on after a run would slow down the engine that is measured next
    entries = {"session.force_spinning_stop": "1"}
    if file.opset >= _TYPED_OPSET and "i8" in file.quantized_types:
        entries["session.qdqisint8allowed"] = "1"
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    texts = {"graph_optimization_level": level, **entries}
    for library in filter(None, build.options.get("ops", "").split(os.pathsep)):
        with library_errors(EngineError, f"onnxruntime: {library} is no library of operators that it loads: "):
            options.register_custom_ops_library(library)
        texts["ops"] = build.options["ops"]
    if threads := build.threads or thread_count():
        options.intra_op_num_threads = threads
        texts["intra_op_num_threads"] = str(threads)
    if build.batch_size is not None:
        for name in file.batch_names:
            options.add_free_dimension_override_by_name(name, build.batch_size)
    return options, texts


def _yes(options: Mapping[str, str], name: str, default: str) -> bool:
    value = options.get(name, default)
    if value not in {"yes", "no"}:
        raise EngineError(f"onnxruntime: {name} is {value!r}: it must be yes or no")
    return value == "yes"


def _label(device: str, file: OnnxFile) -> str:
    words = [device] if device else []
    if "fp8" in file.quantized_types:
        words.append("FP8 computed in float")
    return f"{NAME} ({', '.join(words)})" if words else NAME


def _outputs(file: OnnxFile, batch_size: int | None) -> tuple[TensorInfo, ...]:
    if batch_size is None:
        return file.outputs
    return tuple(
        tensor.with_batch(batch_size) if name in file.batch_names else tensor
        for tensor, name in zip(file.outputs, file.output_batch_names, strict=True)
    )
