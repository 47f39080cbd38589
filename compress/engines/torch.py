"""A torch module in memory as an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.engines.base import Arrays, Availability, Engine, EngineInfo, TensorInfo, array_of, check_inputs
from compress.errors import EngineError, EngineUnavailableError, near_misses
from compress.export.names import output_names
from compress.graph.compare import own_copy
from compress.graph.inputs import named_tensors
from compress.support.libraries import library_errors, reason
from compress.support.process import restored

NAME = "torch"
PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


def availability() -> Availability:
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    return Availability(name=NAME, available=True, version=torch.__version__, devices=("cpu", *gpus))


class TorchEngine(Engine):
    """Runs a copy of `module` in evaluation and inference mode.

    Args:
        module: takes one tensor, returns a tensor (named `logits`), or a dict, a dataclass or a sequence (`output_0`,
            ...) of them.
        image_shape: without the batch dimension, such as (3, 224, 224).
        device: `cpu`, `cuda`, `cuda:1`, ...
        label: name of the row; by default `torch (cpu)`.
        precision: `bf16` or `f16` run under autocast, `f32` refuses TF32 too; None = as torch is set.
        threads: CPU threads of one run; None = as torch is set.

    Raises:
        EngineUnavailableError: there is no such device here.
        EngineError: the module does not run on a batch of one, or returns no tensors.

    Examples:
        >>> with compress.TorchEngine(model, (3, 16, 16)) as engine:
        ...     engine.run({"input": images.numpy()})["logits"].shape
        (16, 4)
    """

    def __init__(
        self,
        module: nn.Module,
        image_shape: Sequence[int],
        *,
        dtype: str = "float32",
        device: str = "cpu",
        label: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
    ) -> None:
        if precision is not None and precision not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise EngineError(f"torch: precision is {precision!r}{near_misses(precision, PRECISIONS)} ({allowed})")
        self._device = _checked_device(device)
        self._precision, self._threads = precision, threads
        self._module: nn.Module | None = own_copy(module).to(self._device)
        self.metadata = {}
        self.inputs = (TensorInfo(name="input", dtype=dtype, shape=(-1, *image_shape)),)
        place = self._device.type if precision is None else f"{self._device.type}, {precision}"
        self.info = EngineInfo(
            engine=NAME,
            label=label or f"torch ({place})",
            version=torch.__version__,
            device=str(self._device),
            float_precision=_float_precision(self._module, self._device, precision),
            options={} if threads is None else {"threads": str(threads)},
        )
        self.outputs = ()
        probe = self.run({"input": np.zeros((1, *image_shape), dtype=dtype)})
        self.outputs = tuple(
            TensorInfo(name=name, dtype=array.dtype.name, shape=(-1, *array.shape[1:])) for name, array in probe.items()
        )

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Run once, with the array of `input`."""
        module = self.held(self._module)
        (array,) = check_inputs(inputs, self.inputs, label=self.info.label).values()
        with _threads(self._threads), _precision(self._device, self._precision), torch.inference_mode():
            with library_errors(EngineError, f"{self.info.label} failed to run the module: "):
                output = module(torch.from_numpy(array).to(self._device))
            return {name: array_of(tensor) for name, tensor in _named(output)}

    def close(self) -> None:
        """Free the copy of the module."""
        self._module = None


def _checked_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"torch: {name!r} is not a device ({reason(error)}); use cpu or cuda") from None
    if device.type == "cuda" and (device.index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise EngineUnavailableError(f"torch: no device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _float_precision(module: nn.Module, device: torch.device, precision: str | None) -> str:
    if precision is not None:
        return precision
    kinds = {tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()}
    name = _NAMES.get(kinds.pop(), "unknown") if len(kinds) == 1 else "unknown" if kinds else "f32"
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return "tf32" if name == "f32" and device.type == "cuda" and tf32 else name


def _named(output: Any) -> list[tuple[str, Tensor]]:
    found = named_tensors(output)
    if not found:
        raise EngineError(f"torch: the module returned {type(output).__name__}; it must return tensors")
    names = output_names([key for key, _ in found])
    return [(name, tensor) for name, (_, tensor) in zip(names, found, strict=True)]


def _threads(count: int | None) -> AbstractContextManager[None]:
    if count is None or count == torch.get_num_threads():
        return nullcontext()
    return restored(torch.get_num_threads, torch.set_num_threads, count)


@contextmanager
def _precision(device: torch.device, precision: str | None) -> Iterator[None]:
    if precision is None:
        yield
        return
    half = precision != "f32"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with torch.autocast(device.type, dtype=PRECISIONS[precision] if half else None, enabled=half):
        if half or device.type != "cuda":
            yield
            return
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
