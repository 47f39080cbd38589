"""The interface of an engine; an engine imports its library on first use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Availability of an engine on this machine.

    Attributes:
        version: of its library; "" if that is missing.
        devices: such as ("CPU",).
        reason: why it is not available; "" if it is.
        install: what makes it available; "" if it is.
    """

    name: str
    available: bool
    version: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""
    install: str = ""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """An input or output of an engine. A dynamic dimension is -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def with_batch(self, batch_size: int) -> TensorInfo:
        """Return the tensor with another first dimension."""
        return replace(self, shape=(batch_size, *self.shape[1:]))

    def with_sides(self, sides: Sequence[int]) -> TensorInfo:
        """Return the tensor with open dimensions after the batch filled in, in their order.

        Raises:
            EngineError: the tensor holds images of another size, and has no open dimension.
        """
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
        device: such as `CPU`.
        float_precision: type of the part that is not quantized (`f32`, `bf16`, `f16`), as the engine reports it; else
            "unknown".
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
    """Options that an engine is built with.

    Attributes:
        batch_size: first dimension of every input; None leaves it as the file has it.
        threads: CPU threads of one run; None = the library's own choice.
        precision: of the part that is not quantized (`f32`, `bf16`, `f16`); None = the library's own choice.
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


@dataclass(frozen=True, kw_only=True)
class RuntimeLayer:
    """One layer that an engine runs, as the engine reports it.

    Attributes:
        kind: such as `Convolution`.
        precision: type in which it computes, such as `u8`, `bf16` or `f32`.
        kernel: implementation chosen; "" if the engine does not report it.
        original_names: nodes of the ONNX file that were fused into it, in no order.
    """

    name: str
    kind: str
    precision: str
    output_precisions: tuple[str, ...] = ()
    kernel: str = ""
    original_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuTimes:
    """Times of one batch by the GPU's own clock, in ms, one number for each run.

    Attributes:
        copy_in_ms, copy_out_ms: between pinned memory and the GPU.
        compute_ms: the network alone.
        total_ms: all three in one stream, measured as one.
    """

    batch_size: int
    copy_in_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]
    copy_out_ms: tuple[float, ...]
    total_ms: tuple[float, ...]

    @property
    def images_per_s(self) -> float:
        """Batch over the median time without transfers."""
        return self.batch_size / float(np.median(self.compute_ms)) * 1e3


class Engine(ABC):
    """A model that is ready to run. `close` frees it; an engine is also a context manager that closes it.

    Examples:
        >>> with compress.build_engine("float.onnx", "onnxruntime") as engine:
        ...     engine.run({"input": images.numpy()})["logits"].shape
        (16, 4)
    """

    takes_tensors: ClassVar[bool] = False
    """True if `run_tensors` works."""
    remembers_runs: ClassVar[bool] = False
    """True if `layer_runs_ms` returns the times of every run; it is called once, after the last."""

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

    def close(self) -> None:  # noqa: B027  (most engines have nothing to free)
        """Free what the engine holds."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
