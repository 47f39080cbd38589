"""LiteRT with XNNPACK on the CPU: runs a .tflite file, or an ONNX file that is turned into one in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.engines.base import (
    Arrays,
    BuildOptions,
    Engine,
    RuntimeLayer,
    TensorInfo,
    check_inputs,
    cpu_info,
    existing_file,
    load_onnx,
    operator,
    read_interface,
    with_batch,
    with_open_batch,
)
from compress.errors import EngineError, ExportError
from compress.export.litert import INSTALL, convert, schema
from compress.support.libraries import import_library, library_errors

NAME = "litert"
PACKAGE = "ai-edge-litert"
# Batch sizes whose interpreters are kept; an ONNX file with an open batch has one for each.
_SIZES = 4


def load(path: Path | str, build: BuildOptions) -> LiteRTEngine:
    return LiteRTEngine(library(), existing_file(path), build)


class LiteRTEngine(Engine):
    """An interpreter for each batch size; made by `load`."""

    def __init__(self, library: ModuleType, path: Path, build: BuildOptions) -> None:
        self.info = cpu_info(NAME, PACKAGE, build, path)
        self._library, self._path, self._threads = library, path, build.threads
        self._model = None if path.suffix == ".tflite" else load_onnx(path, weights=True)
        self._interpreters: dict[tuple[tuple[int, ...], ...], tuple[bytes, Any]] = {}
        if self._model is None:
            self.inputs, self.outputs, self.metadata = _read(path)
        else:
            file = read_interface(path, self._model)
            self.inputs, self.metadata = file.inputs, file.metadata
            self.outputs = with_open_batch(file.outputs, build.batch_size)
        self.inputs = with_batch(self.inputs, build.batch_size, where=str(path))
        if all(min(tensor.shape, default=1) > 0 for tensor in self.inputs):
            self._interpreter(tuple(tensor.shape for tensor in self.inputs))  # refuses what cannot be run

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        checked = check_inputs(inputs, self.inputs, label=self.info.label)
        interpreter = self._interpreter(tuple(array.shape for array in checked.values()))
        places = {tensor["name"]: tensor["index"] for tensor in interpreter.get_input_details()}
        with library_errors(EngineError, f"{self.info.label} failed to run {self.info.path}: "):
            for name, array in checked.items():
                interpreter.set_tensor(places[name], array)
            interpreter.invoke()
            return {t["name"]: interpreter.get_tensor(t["index"]) for t in interpreter.get_output_details()}

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        """The operators of the file for one image, in their order."""
        shapes = tuple(tuple(max(1, n) for n in tensor.shape) for tensor in self.inputs)
        self._interpreter(shapes)
        apart = self._loaded(self._interpreters[shapes][0], experimental_disable_delegate_node_fusion=True)
        rows = apart._get_ops_details()  # each operator that XNNPACK takes is there again, as a DELEGATE
        tensors = {
            t["index"]: TensorInfo(
                name=str(t["name"]), dtype=np.dtype(t["dtype"]).name, shape=tuple(map(int, t["shape"]))
            )
            for t in apart.get_tensor_details()
        }
        taken = {int(place) for row in rows if row["op_name"] == "DELEGATE" for place in row["outputs"]}
        rows = [row for row in rows if row["op_name"] != "DELEGATE"]
        computed = {tensor.name for tensor in self.inputs} | {
            tensors[int(i)].name for row in rows for i in row["outputs"]
        }
        found = []
        for row in rows:
            read = [tensors[int(i)] for i in row["inputs"] if int(i) in tensors]
            constants = [tensor for tensor in read if tensor.name not in computed]
            kernel = "XNNPACK" if int(row["outputs"][0]) in taken else "LiteRT"
            written = [tensors[int(i)] for i in row["outputs"]]
            found.append(operator(row["op_name"], kernel, [t for t in read if t.name in computed], written, constants))
        return tuple(found)

    def close(self) -> None:
        self._interpreters.clear()

    def _interpreter(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        if shapes not in self._interpreters:
            if len(self._interpreters) >= _SIZES:
                self._interpreters.clear()
            content = self._content(shapes)
            self._interpreters[shapes] = content, self._loaded(content)
        return self._interpreters[shapes][1]

    def _content(self, shapes: tuple[tuple[int, ...], ...]) -> bytes:
        if self._model is None:
            return self._path.read_bytes()
        try:
            return convert(self._model, {t.name: shape for t, shape in zip(self.inputs, shapes, strict=True)})
        except ExportError as error:
            raise EngineError(f"litert: {self._path}: {error}") from error

    def _loaded(self, content: bytes, **options: bool) -> Any:
        with library_errors(EngineError, f"litert cannot load {self._path}: "):
            made = self._library.Interpreter(model_content=content, num_threads=self._threads or 1, **options)
            made.allocate_tensors()
        return made


def library() -> ModuleType:
    return import_library("ai_edge_litert.interpreter", INSTALL)


def _read(path: Path) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...], Mapping[str, str]]:
    with library_errors(EngineError, f"{path}: not a LiteRT file, or a truncated one (", "); export it again"):
        fb = schema()
        model = fb.ModelT.InitFromObj(fb.Model.GetRootAs(path.read_bytes(), 0))
        graph = model.subgraphs[0]
        names = {value: name.lower() for name, value in vars(fb.TensorType).items() if isinstance(value, int)}

        def info(place: int) -> TensorInfo:
            tensor = graph.tensors[place]
            return TensorInfo(name=tensor.name.decode(), dtype=names[tensor.type], shape=tuple(map(int, tensor.shape)))

        metadata = {
            entry.name.decode(): bytes(model.buffers[entry.buffer].data).decode(errors="replace")
            for entry in model.metadata or []
        }
        return tuple(map(info, graph.inputs)), tuple(map(info, graph.outputs)), metadata
