"""ExecuTorch with XNNPACK on the CPU: runs a .pte file that `export_executorch` wrote."""

from __future__ import annotations

import json
import re
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import (
    Arrays,
    BuildOptions,
    Engine,
    RuntimeLayer,
    TensorInfo,
    check_inputs,
    cpu_info,
    existing_file,
    operator,
    with_batch,
)
from compress.errors import EngineError
from compress.support.libraries import import_library, library_errors

NAME = PACKAGE = "executorch"
INSTALL = "pip install 'compress-vision[executorch]'"
# The method of a file that returns names of inputs and outputs, and metadata, as the bytes of a JSON text.
INFORMATION = "information"
_ALIVE: weakref.WeakSet[ExecuTorchEngine] = weakref.WeakSet()
# ATen's numbers of types, by which ExecuTorch names them.
_ATEN = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 11: "bool"}
_DATATYPES = {"fp32": "float32", "fp16": "float16", "qint8": "int8", "qcint8": "int8", "qcint32": "int32"}


def imported(module: str) -> ModuleType:
    """Import a module of ExecuTorch.

    Raises:
        EngineUnavailableError: it is not installed.
    """
    return import_library(module, INSTALL)


def load(path: Path | str, build: BuildOptions) -> ExecuTorchEngine:
    """Load a .pte file; for an ONNX file the one beside it.

    Raises:
        EngineUnavailableError: ExecuTorch is not here.
        EngineError: it does not take the file or the precision.
    """
    library()
    program = Path(path).with_suffix(".pte")
    if Path(path).exists() and not program.exists():
        raise EngineError(
            f"executorch: {path} is no .pte file; write one: compress build onnx {path} --engine executorch"
        )
    return ExecuTorchEngine(existing_file(program), build)


class ExecuTorchEngine(Engine):
    """A program with fixed shapes, which runs a larger batch in parts; made by `load`."""

    def __init__(self, path: Path, build: BuildOptions) -> None:
        self.info = cpu_info(NAME, PACKAGE, build, path)
        _set_threads(build.threads or 1)
        self._content = path.read_bytes()
        with library_errors(EngineError, f"{path}: not an ExecuTorch file, or a truncated one (", "); export it again"):
            self._program = library().load_program(self._content)
            told = self._program.load_method(INFORMATION).execute([])[0]
            written = json.loads(bytes(told.numpy()))
            self._method = self._program.load_method("forward")
        _ALIVE.add(self)
        shown = self._method.metadata
        tensors = [
            [
                TensorInfo(name=name, dtype=_ATEN[meta.dtype()], shape=tuple(meta.sizes()))
                for name, meta in zip(written[key], metas, strict=True)
            ]
            for key, metas in (
                ("inputs", [shown.input_tensor_meta(i) for i in range(shown.num_inputs())]),
                ("outputs", [shown.output_tensor_meta(i) for i in range(shown.num_outputs())]),
            )
        ]
        self._inputs, outputs = tensors
        self._part = self._inputs[0].shape[0]
        self.inputs, self.outputs = tuple(map(_open, self._inputs)), tuple(map(_open, outputs))
        self.inputs = with_batch(self.inputs, build.batch_size, where=str(path))
        if build.batch_size is not None:
            self.outputs = with_batch(self.outputs, build.batch_size, where=str(path))
        self.metadata: Mapping[str, str] = written["metadata"]

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """See `Engine.run`; a batch of several times the file's size runs in parts of it."""
        arrays = list(check_inputs(inputs, self.inputs, label=self.info.label).values())
        size = arrays[0].shape[0] if arrays[0].ndim else self._part
        if size % self._part:
            raise EngineError(f"executorch: {size} images; {self.info.path} takes a multiple of {self._part}")
        parts = []
        with library_errors(EngineError, f"{self.info.label} failed to run {self.info.path}: "):
            for start in range(0, size, self._part):
                given = [torch.from_numpy(array[start : start + self._part]) for array in arrays]
                parts.append([value.numpy().copy() for value in self._method.execute(given)])
        columns = zip(*parts, strict=True)
        return {t.name: np.concatenate(c) if len(c) > 1 else c[0] for t, c in zip(self.outputs, columns, strict=True)}

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        """See `Engine.runtime_layers`; kernel is `XNNPACK`, or `ExecuTorch` for its own, slower operators.

        ExecuTorch has no public reader of what it wrote; this is how its own tests read it (1.5).
        """
        parsed = imported("executorch.exir._serialize._program").deserialize_pte_binary(self._content)
        program = getattr(parsed, "program", parsed)
        plan = next(plan for plan in program.execution_plan if plan.name == "forward")
        found: list[RuntimeLayer] = []
        for instruction in plan.chains[0].instructions:
            step = instruction.instr_args
            if hasattr(step, "delegate_index"):
                place = plan.delegates[step.delegate_index].processed.index
                found += _delegated(program.backend_delegate_data[place].data, step.delegate_index)
            elif hasattr(step, "op_index"):
                found.append(operator(plan.operators[step.op_index].name, "ExecuTorch"))
        return tuple(replace(layer, name=f"{layer.kind}_{i}", original_names=()) for i, layer in enumerate(found))

    def close(self) -> None:
        """Free the program."""
        self._program = self._method = None
        _ALIVE.discard(self)


def run_program(content: bytes, inputs: Sequence[Tensor]) -> list[NDArray[np.generic]]:
    """Return the outputs of a file in memory for tensors of its own shapes."""
    outputs = library().load_program(content).load_method("forward").execute(list(inputs))
    return [value.numpy().copy() for value in outputs]


def loaded() -> ModuleType:
    # The library in C++ alone: its Python form imports the exporter, for ten seconds.
    return imported("executorch.extension.pybindings._C")


@cache
def library() -> Any:
    return imported("executorch.runtime").Runtime.get()


def _set_threads(threads: int) -> None:
    """Set the number of threads that all programs of the process share, which a loaded program keeps using."""
    shared = imported("executorch.extension.pybindings.portable_lib")
    if shared._threadpool_get_thread_count() == threads:
        return
    if _ALIVE:
        raise EngineError(
            f"executorch: {threads} threads are asked for, and another engine of this process is open with "
            f"{shared._threadpool_get_thread_count()}: its programs share their threads; close it first"
        )
    shared._unsafe_reset_threadpool(threads)


def _open(tensor: TensorInfo) -> TensorInfo:
    return tensor.with_batch(-1) if tensor.shape else tensor


def _delegated(payload: bytes, place: int) -> list[RuntimeLayer]:
    """Return the operators of an XNNPACK graph, whose tensors have numbers; `place` is that of the graph."""
    serialization = imported("executorch.backends.xnnpack.serialization")
    header = imported("executorch.backends.xnnpack.serialization.xnnpack_graph_serialize").XNNHeader
    written = header.from_bytes(payload[: header.EXPECTED_LENGTH])
    with tempfile.TemporaryDirectory() as folder:
        schema, graph = Path(folder, "schema.fbs"), Path(folder, "graph.bin")
        schema.write_bytes(resources.files(serialization).joinpath("schema.fbs").read_bytes())
        graph.write_bytes(payload[written.flatbuffer_offset :][: written.flatbuffer_size])
        imported("executorch.exir._serialize._flatbuffer")._flatc_decompile(folder, str(schema), str(graph))
        text = graph.with_suffix(".json").read_text()
    shown = json.loads(re.sub(r"(:\s*)(-?inf|nan)\b", r'\1"\2"', text))  # limits of no activation
    tensors, constant = {}, set()
    for value in shown["xvalues"]:
        tensor = value["xvalue_union"].get("tensor_value", value["xvalue_union"])
        number, kind = tensor["id_out"], tensor["datatype"].rpartition("_")[2]
        name = f"{place}.{number}"
        tensors[number] = TensorInfo(name=name, dtype=_DATATYPES.get(kind, kind), shape=tuple(tensor["dims"]))
        constant |= {number} if tensor["constant_buffer_idx"] else set()
    rows = []
    for node in shown["xnodes"]:
        step = {key: value for key, value in node["xnode_union"].items() if "id" in key.split("_") and value in tensors}
        read = [value for key, value in step.items() if not key.startswith("output")]
        inputs, constants = ([tensors[n] for n in read if (n in constant) == held] for held in (False, True))
        written = [tensors[value] for key, value in step.items() if key.startswith("output")]
        rows.append(operator(node["xnode_union_type"].removeprefix("XNN"), "XNNPACK", inputs, written, constants))
    return rows
