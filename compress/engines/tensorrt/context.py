"""One TensorRT execution context with its own stream, pinned memory, buffers on the GPU and CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import Arrays, GpuTimes
from compress.engines.tensorrt.metadata import EngineMetadata
from compress.errors import EngineError

if TYPE_CHECKING:
    import tensorrt

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
"""torch's type for each type that an ONNX input or output can have."""


class ExecutionContext:
    """An execution context with memory of its own.

    Args:
        metadata: names, types and profiles of inputs and outputs.
        cuda_graph: capture a run of each new shape and replay it.
    """

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
        """Wait for the last batch, and return its outputs."""
        self._done.synchronize()
        return {name: _numpy(tensor) for name, tensor in self._pinned_out.items()}

    def copy_in(self) -> None:
        """Queue the copies from pinned memory to the GPU."""
        with torch.cuda.stream(self.stream):
            for name, pinned in self._pinned_in.items():
                self._inputs[name].copy_(pinned, non_blocking=True)

    def compute(self) -> None:
        """Queue the network on the inputs that are on the GPU."""
        if self._graph is not None:
            with torch.cuda.stream(self.stream):
                self._graph.replay()
            return
        self._enqueue(self.stream)

    def copy_out(self) -> None:
        """Queue the copies from the GPU to pinned memory."""
        with torch.cuda.stream(self.stream):
            for name, pinned in self._pinned_out.items():
                pinned.copy_(self._outputs[name], non_blocking=True)

    def run_tensors(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run on the caller's tensors, on torch's current stream; see `TensorRTEngine.run_tensors`."""
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


def _numpy(tensor: Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return array


def time_context(context: ExecutionContext, batch_size: int, *, warmup: int, runs: int) -> GpuTimes:
    """Time the batch whose inputs an execution context holds on the GPU.

    Raises:
        EngineError: a number is out of range.
    """
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    for _ in range(warmup):
        context.compute()
    steps = (context.copy_in, context.compute, context.copy_out)
    marks = [_marked(context, steps) for _ in range(runs)]
    context.stream.synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    copy_in, compute, copy_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=batch_size,
        copy_in_ms=copy_in,
        compute_ms=compute,
        copy_out_ms=copy_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )


def _marked(context: ExecutionContext, steps: tuple[Callable[[], None], ...]) -> list[torch.cuda.Event]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record(context.stream)
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record(context.stream)
    return events


def best_batch(times: Mapping[int, GpuTimes]) -> int:
    """Return the batch size of the highest throughput without transfers; the smaller one of two that are equal.

    Raises:
        EngineError: there are none.
    """
    if not times:
        raise EngineError("best_batch: there are no times to choose from")
    return max(sorted(times), key=lambda batch: times[batch].images_per_s)
