"""Our own INT8 engine for NVIDIA GPUs: arrays or torch tensors in and out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import (
    Arrays,
    Availability,
    BuildOptions,
    Engine,
    EngineInfo,
    GpuTimes,
    RuntimeLayer,
    array_of,
    check_inputs,
    check_shape,
    check_tensors,
    read_onnx,
    with_batch,
)
from compress.engines.cuda.executor import runtime_layer
from compress.engines.cuda.plan.graph import read_graph
from compress.engines.cuda.plan.layout import Layout, lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.program import (
    PlanFile,
    Program,
    Ways,
    faster_program,
    float_graph,
    float_network,
    machine_of,
    plan_beside,
    read_plan,
    time_program,
)
from compress.errors import CompressWarning, EngineError, EngineUnavailableError, near_misses
from compress.support.libraries import import_library, reason

NAME = "cuda"
OPTIONS = {
    "device": "GPU, such as cuda or cuda:1; or cpu: exact integer arithmetic by torch, slow, to compare with",
    "tune": "no: take the guessed kernel of every layer and measure nothing; yes by default",
    "floats": "yes, by default: layers whose results are values are computed in fp16 where that is faster, and the "
    "whole network where its integers are slower (torch compiles it, for a minute); layers: these alone; no: never",
    "plan": "plan file with the measured choices; by default MODEL.GPU.plan.json beside the model, which begins with "
    "those of other models in its folder",
    "profile": "yes: every layer can be timed, so that torch compiles no whole network; no by default",
    "jobs": "processes that compile kernels at a time; by default one for each CPU; 0: each when it is first launched",
}
PRECISIONS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
LEAST_CAPABILITY = (8, 0)
_MOST_PROGRAMS = 16
# The smallest batch that is also tried in two halves; ResNet-50 on an H200 gains from 128 images on.
_LEAST_BATCH = 64
_INSTALL = "use a Linux machine with an NVIDIA GPU of compute capability 8.0 or later, torch for CUDA, and triton"


def availability() -> Availability:
    try:
        triton = import_library("triton", "pip install triton")
    except EngineUnavailableError as error:
        return Availability(name=NAME, available=False, reason=str(error), install="pip install triton")
    found = _gpus()
    usable = tuple(f"cuda:{i} {name}" for i, (name, sm) in found.items() if sm >= LEAST_CAPABILITY)
    if usable:
        return Availability(name=NAME, available=True, version=triton.__version__, devices=usable)
    problem = "; ".join(too_old(name, sm) for name, sm in found.values()) or _no_gpu()
    return Availability(name=NAME, available=False, version=triton.__version__, reason=problem, install=_INSTALL)


def _gpus() -> dict[int, tuple[str, tuple[int, int]]]:
    if not torch.cuda.is_available():
        return {}
    return {
        i: (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    }


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"


def too_old(name: str, capability: tuple[int, int]) -> str:
    return f"{name} has compute capability {capability[0]}.{capability[1]}, and 8.0 or later is needed"


def load(path: Path | str, build: BuildOptions) -> CudaEngine:
    """Plan an ONNX file; with a batch size, or for a file of fixed shapes, also choose its kernels."""
    if build.precision is not None and build.precision not in PRECISIONS:
        raise EngineError(
            f"cuda: precision is {build.precision!r}{near_misses(build.precision, PRECISIONS)} "
            f"(one of: {', '.join(PRECISIONS)}, or None for f16)"
        )
    return CudaEngine(Path(path), _device(build.options.get("device", "cuda")), build)


def _device(name: str) -> torch.device:
    kind, _, number = name.partition(":")
    if kind not in {"cuda", "cpu"} or (number and not number.isdigit()):
        raise EngineError(f"cuda: device is {name!r}: it must be cuda, cuda:0, cuda:1, ... or cpu")
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number or 0)
    found = _gpus()
    if index not in found:
        here = ", ".join(f"cuda:{i} {name}" for i, (name, _) in found.items()) or _no_gpu()
        raise EngineUnavailableError(f"cuda: no device {name!r} ({here}); {_INSTALL}, or device='cpu'")
    if found[index][1] < LEAST_CAPABILITY:
        raise EngineUnavailableError(f"cuda: {too_old(*found[index])}; {_INSTALL}")
    return torch.device("cuda", index)


class CudaEngine(Engine):
    """An ONNX file on one GPU; made by `load`. On the CPU, steps are computed in exact arithmetic."""

    takes_tensors = True

    def __init__(self, path: Path, device: torch.device, build: BuildOptions) -> None:
        file = read_onnx(path)
        precision = build.precision or ("f32" if device.type == "cpu" else "f16")
        self.metadata = file.metadata
        self.inputs = with_batch(file.inputs, build.batch_size, where=str(path))
        self.outputs = file.outputs
        if build.batch_size is not None:
            self.outputs = tuple(
                tensor.with_batch(build.batch_size) if name and name in file.batch_names else tensor
                for tensor, name in zip(file.outputs, file.output_batch_names, strict=True)
            )
        self._path, self._device, self._dtype = path, device, PRECISIONS[precision]
        if precision == "f16" and file.largest > torch.finfo(torch.float16).max:
            warnings.warn(
                f"cuda: values of {path.name} reach {file.largest:,.0f}, and float16 ends at 65,504: results may be "
                "wrong; give precision='bf16' (or 'f32')",
                CompressWarning,
                stacklevel=4,
            )
        jobs = build.options.get("jobs", str(os.cpu_count() or 1))
        if not jobs.isdigit():
            raise EngineError(f"cuda: jobs is {jobs!r}: it must be a number of 0 or more")
        self._jobs = int(jobs)
        floats = _one_of("floats", build.options.get("floats", "yes"), ("yes", "layers", "no"))
        self._float_network = floats == "yes" and build.options.get("profile") != "yes"
        self._ways = _ways(device, floats=floats != "no")
        names = [tensor.shape[0] if tensor.shape else 0 for tensor in (*file.inputs, *file.outputs)]
        self._divisible = bool(file.batch_names) and all(size == -1 for size in names)
        self._programs: dict[tuple[tuple[int, ...], ...], Program] = {}
        self._last: tuple[Program, dict[str, Tensor]] | None = None
        self._closed = False
        machine = machine_of(device)
        self._plan: PlanFile | None = None
        tune = _one_of("tune", build.options.get("tune", "yes"), ("yes", "no"))
        if tune == "yes" and device.type == "cuda":
            named = build.options.get("plan")
            self._plan = plan_beside(path, machine) if named is None else read_plan(Path(named), machine)
        self.info = EngineInfo(
            engine=NAME,
            label=f"cuda ({precision if device.type == 'cuda' else 'exact'})",
            version=machine.triton,
            device=machine.gpu if device.type == "cuda" else "CPU",
            float_precision=precision,
            options={"tune": "no" if self._plan is None else "yes"},
            path=str(path),
        )
        if all(size >= 1 for tensor in self.inputs for size in tensor.shape):
            self.program({tensor.name: tensor.shape for tensor in self.inputs})
        elif all(size >= 1 for tensor in self.inputs for size in tensor.shape[1:]):
            make_plan(path, batch_size=1, dtype=self._dtype)  # refuses here what no batch can run

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """The time includes the copies to the GPU and back."""
        self._check_open()
        checked = check_inputs(inputs, self.inputs, label=self.info.label)
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in checked.items()}
        results = self._run(tensors)
        return {tensor.name: array_of(results[tensor.name]) for tensor in self.outputs}

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs may have any strides, channels_last among them."""
        self._check_open()
        check_tensors(inputs, self.inputs, self._device, label=self.info.label)
        for tensor in self.inputs:
            check_shape(tensor, tuple(inputs[tensor.name].shape), label=self.info.label)
        return self._run(inputs)

    def gpu_times(
        self, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int = 10, runs: int = 100
    ) -> GpuTimes | None:
        self._check_open()
        if self._device.type != "cuda":
            return None
        checked = check_inputs(inputs, self.inputs, label=self.info.label)
        program = self.program({name: array.shape for name, array in checked.items()})
        with torch.cuda.device(self._device):
            return time_program(program, checked, warmup=warmup, runs=runs)

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        """Those of the last run, or of one image where nothing has run."""
        program, _ = self._any_program()
        layout = program.layout
        return tuple(
            runtime_layer(step, layout, kernel) for step, kernel in zip(layout.steps, program.kernels, strict=True)
        )

    def layer_times_ms(self) -> dict[str, float]:
        """Each layer is timed alone, on the inputs of the last run."""
        program, inputs = self._any_program()
        if program.floats:
            raise EngineError(
                f"{self.info.label}: the network runs in floating point, and torch's compiler has joined its layers; "
                "load it with profile='yes' (or floats='layers') to time them"
            )
        return dict(zip((step.name for step in program.layout.steps), program.step_ms(inputs), strict=True))

    def close(self) -> None:
        self._programs.clear()
        self._last, self._closed = None, True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.info.label}: the engine is closed")

    def _any_program(self) -> tuple[Program, dict[str, Tensor]]:
        self._check_open()
        if self._last is None:
            shapes = {t.name: tuple(1 if size < 1 else size for size in t.shape) for t in self.inputs}
            program = self.program(shapes)
            self._last = program, program.empty_inputs()
        return self._last

    def _run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        program = self.program({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        self._last = program, dict(inputs)
        try:
            if self._device.type == "cpu":
                return program.run(inputs)
            with torch.cuda.device(self._device):
                return program.run(inputs)
        except RuntimeError as error:
            raise EngineError(f"{self.info.label} failed to run {self._path}: {reason(error)}") from error

    def program(self, shapes: Mapping[str, tuple[int, ...]]) -> Program:
        key = tuple(tuple(shapes[tensor.name]) for tensor in self.inputs)
        if key not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))  # the oldest
            program = faster_program(self._layout(shapes), self._half(shapes), self._program, self._plan)
            if self._float_network and self._plan is not None:
                program.in_floats_if_faster(
                    lambda: float_network(float_graph(read_graph(self._path, shapes)), self._dtype, self._device),
                    self._plan,
                )
            self._programs[key] = program
        return self._programs[key]

    def _layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        return lay_out(make_plan(self._path, shapes, dtype=self._dtype))

    def _half(self, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], Layout] | None:
        """The layout of half the batch; None where it is small, odd, or no dimension of all tensors."""
        (size, *others) = {shape[0] if shape else 0 for shape in shapes.values()}
        if not self._divisible or others or size < _LEAST_BATCH or size % 2:
            return None
        return partial(self._layout, {name: (size // 2, *shape[1:]) for name, shape in shapes.items()})

    def _program(self, layout: Layout, parts: int) -> Program:
        return Program(
            layout,
            self._device,
            candidates=None if self._ways is None else self._ways(),
            plan=self._plan,
            jobs=self._jobs,
            parts=parts,
            beside=self._ways,
        )


def _ways(device: torch.device, *, floats: bool) -> Callable[[], Ways] | None:
    """The ways to compute a step, each time with a workspace of its own; weights are packed once."""
    if device.type != "cuda":
        return None
    import_library("triton", "pip install triton")  # says how to get it
    from compress.engines.cuda.bind import Bindings, candidates  # optional: its kernels need triton

    bindings = Bindings(device, {}, floats)
    return lambda: partial(candidates, bindings=replace(bindings, workspaces={}))


def _one_of(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise EngineError(f"cuda: {name} is {text!r}: it must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return text
