"""OpenVINO, the default engine: it runs on every x86 and ARM CPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper

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
    existing_file,
    load_onnx,
    read_onnx,
    with_batch,
)
from compress.errors import CompressWarning, EngineError, EngineUnavailableError, near_misses
from compress.export.openvino import extremes_apart, joins_signed, orders_in_two, to_unsigned
from compress.onnx_graph import OnnxGraph, may_saturate
from compress.support.libraries import import_library, keep_signal_stack, library_errors, reason
from compress.support.process import NO_VNNI, sums_bytes_in_16_bits

NAME = "openvino"
OPTIONS = {
    "device": "device that it runs on, such as CPU or GPU; CPU by default",
    "profile": "yes: time every layer of a run, for layer_times_ms; this takes some time itself",
}
PRECISIONS = ("f32", "bf16", "f16")
_INSTALL = "pip install openvino"


def availability() -> Availability:
    try:
        ov = import_library(NAME, _INSTALL)
        with keep_signal_stack():
            devices = tuple(ov.Core().available_devices)
    except EngineUnavailableError as error:
        return Availability(name=NAME, available=False, reason=str(error), install=_INSTALL)
    except RuntimeError as error:
        return Availability(name=NAME, available=False, reason=reason(error), install="reinstall openvino")
    if not devices:
        return Availability(
            name=NAME, available=False, version=_version(ov), reason="it finds no device", install="reinstall openvino"
        )
    return Availability(name=NAME, available=True, version=_version(ov), devices=devices)


def load(path: Path | str, build: BuildOptions) -> OpenVINOEngine:
    if build.precision is not None and build.precision not in PRECISIONS:
        raise EngineError(
            f"openvino: precision is {build.precision!r}{near_misses(build.precision, PRECISIONS)} "
            f"(one of: {', '.join(PRECISIONS)}, or None for OpenVINO's own choice)"
        )
    ov = import_library(NAME, _INSTALL)
    with keep_signal_stack():
        core = ov.Core()
        device = build.options.get("device", "CPU")
        if device.split(".")[0] not in {seen.split(".")[0] for seen in core.available_devices}:
            raise EngineUnavailableError(
                f"openvino: no device {device!r} on this machine (there is: {', '.join(core.available_devices)})"
            )
        return OpenVINOEngine(ov, core, existing_file(path), device, build)


class OpenVINOEngine(Engine):
    """A compiled model with one infer request; made by `load`."""

    def __init__(self, ov: Any, core: Any, path: Path, device: str, build: BuildOptions) -> None:
        model, file = _read(core, path)
        inexact = device == "CPU" and file is not None and bool(file.quantized_types) and sums_bytes_in_16_bits()
        if inexact and any(map(may_saturate, load_onnx(path, weights=True).graph.initializer)):
            warnings.warn(f"{path.name}: {NO_VNNI}", CompressWarning, stacklevel=4)
        self.metadata = file.metadata if file else {}
        found = _tensors(model.inputs, file.inputs if file else None, where=str(path))
        self.inputs = with_batch(found, build.batch_size, where=str(path))
        options = _options(build)
        with library_errors(EngineError, f"openvino cannot compile {path}: "):
            if build.batch_size is not None:
                model.reshape({tensor.name: list(tensor.shape) for tensor in self.inputs})
            self._compiled = core.compile_model(model, device, options)
            self._request = self._compiled.create_infer_request()
        self.outputs = _tensors(self._compiled.outputs, file.outputs if file else None, where=str(path))
        precision = _float_precision(self._compiled)
        if build.precision not in (None, precision):
            raise EngineError(
                f"openvino: precision {build.precision!r} was asked of {path}, but {device} runs it in {precision!r}; "
                "choose another, or leave it out for OpenVINO's own choice"
            )
        place = "" if device == "CPU" else f"{device}, "
        self.info = EngineInfo(
            engine=NAME,
            label=f"openvino ({place}{precision})",
            version=_version(ov),
            device=device,
            float_precision=precision,
            options=options,
            path=str(path),
        )

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        request, checked = self.held(self._request), check_inputs(inputs, self.inputs, label=self.info.label)
        with library_errors(EngineError, f"{self.info.label} failed to run {self.info.path}: "):
            results = request.infer(checked, share_inputs=True)
        return {tensor.name: np.asarray(results[tensor.name]) for tensor in self.outputs}

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        operators = self.held(self._compiled).get_runtime_model().get_ops()
        rows = [(op.get_friendly_name(), _texts(op.get_rt_info())) for op in operators]
        rows = sorted(
            (row for row in rows if row[1].get("layerType") != "Const"), key=lambda row: int(row[1].get("execOrder", 0))
        )
        return tuple(
            RuntimeLayer(
                name=name,
                kind=facts.get("layerType", ""),
                precision=facts.get("runtimePrecision", "unknown"),
                output_precisions=_split(facts.get("outputPrecisions", "")),
                kernel=facts.get("primitiveType", ""),
                original_names=_split(facts.get("originalLayersNames", "")),
            )
            for name, facts in rows
        )

    def layer_times_ms(self) -> dict[str, float]:
        request = self.held(self._request)
        if "PERF_COUNT" not in self.info.options:
            raise EngineError(f"{self.info.label} was not built to time its layers; give build_engine profile='yes'")
        timed = [row for row in request.get_profiling_info() if row.real_time]
        return {row.node_name: row.real_time.total_seconds() * 1e3 for row in timed}

    def close(self) -> None:
        self._request = self._compiled = None


def _options(build: BuildOptions) -> dict[str, str]:
    options = {"PERFORMANCE_HINT": "LATENCY"}
    if build.threads is not None:
        options["INFERENCE_NUM_THREADS"] = str(build.threads)
    if build.options.get("profile", "no") == "yes":
        options["PERF_COUNT"] = "YES"
    if build.precision is not None:
        options["INFERENCE_PRECISION_HINT"] = build.precision
    return options


def _read(core: Any, path: Path) -> tuple[Any, OnnxFile | None]:
    file = None if path.suffix == ".xml" else read_onnx(path)
    changed = None
    with library_errors(EngineError, f"openvino cannot read {path}: "):
        if file is not None:
            form, folder = load_onnx(path), str(path.parent)
            for tensor in OnnxGraph(form.graph).constants.values():
                read = tensor.data_type in {TensorProto.INT32, TensorProto.INT64} or math.prod(tensor.dims) == 1
                if read and external_data_helper.uses_external_data(tensor):
                    external_data_helper.load_external_data_for_tensor(tensor, folder)
            signed = "i8" in file.quantized_types and joins_signed(form)
            if signed:
                to_unsigned(form)
            if extremes_apart(form) + orders_in_two(form) + signed:  # only then are weights read, maybe gigabytes
                external_data_helper.load_external_data_for_model(form, folder)
                changed = form.SerializeToString()
        return core.read_model(changed or str(path)), file


def _tensors(ports: Any, declared: tuple[TensorInfo, ...] | None, *, where: str) -> tuple[TensorInfo, ...]:
    if declared is None:
        return tuple(_tensor(port, port.get_any_name()) for port in ports)
    by_name = {name: port for port in ports for name in port.get_names()}
    lost = [tensor.name for tensor in declared if tensor.name not in by_name]
    if lost:
        raise EngineError(f"openvino dropped {', '.join(lost)} of {where}: remove what the model does not use")
    return tuple(_tensor(by_name[tensor.name], tensor.name) for tensor in declared)


def _tensor(port: Any, name: str) -> TensorInfo:
    shape = tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())
    return TensorInfo(name=name, dtype=port.get_element_type().to_dtype().name, shape=shape)


def _float_precision(compiled: Any) -> str:
    name = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
    return name if name in PRECISIONS else "unknown"


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value.astype(str)) if hasattr(value, "astype") else str(value) for key, value in facts.items()}


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _version(ov: Any) -> str:
    return str(ov.__version__).split("-")[0]
