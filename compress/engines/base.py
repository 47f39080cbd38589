"""What an engine is: it loads an ONNX file, runs arrays, and says what it is made of.

Each engine lives in a file of its own and imports its library in one place, when first used, so that
`import compress` needs none of them and `doctor` can say of each whether it works here and why not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from compress.errors import EngineError

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether an engine works on this machine.

    Attributes:
        name: engine, such as `openvino`.
        available: it can build and run here.
        version: of its library, "" when that is missing.
        devices: what it can run on here, such as ("CPU",).
        reason: why it is not available; "" when it is.
        install: what to type or get to have it; "" when it is available.
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


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What stands beside every figure measured on an engine.

    Attributes:
        engine: `openvino`, `onnxruntime`, `torch`, ...
        label: name of the row in tables, such as `openvino (f32)`.
        version: of the library.
        device: where it runs, such as `CPU`.
        float_precision: type in which the part that is not quantized ran (`f32`, `bf16`, `f16`), as the
            engine itself reports it; "unknown" when it does not.
        options: as given to the library.
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
    """What an engine is built with, besides its file.

    Attributes:
        batch_size: fixes the first dimension of every input; None leaves it as the file has it.
        threads: CPU threads of one run; None = the library's own choice.
        precision: of what is not quantized (`f32`, `bf16`, `f16`); None = the library's own choice.
        options: further ones of this engine, by name.
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
    """One layer that an engine runs, as the engine itself reports it.

    Attributes:
        name: of the layer in the engine.
        kind: the engine's name of the operation, such as `Convolution`.
        precision: type in which it computes, such as `u8`, `bf16` or `f32`.
        output_precisions: type of each output.
        kernel: implementation chosen; "" when the engine does not say.
        original_names: nodes of the ONNX file that were fused into it, in no promised order.
    """

    name: str
    kind: str
    precision: str
    output_precisions: tuple[str, ...] = ()
    kernel: str = ""
    original_names: tuple[str, ...] = ()


class Engine(ABC):
    """A model that is ready to run. `close` frees it; also a context manager."""

    info: EngineInfo
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]

    @abstractmethod
    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Run once.

        Args:
            inputs: one array for each of `self.inputs`, by name, of its type and shape.

        Returns:
            One array for each of `self.outputs`, by name.

        Raises:
            EngineError: a missing, unknown or ill-shaped input, or a failure of the library.
        """

    def runtime_layers(self) -> tuple[RuntimeLayer, ...]:
        """The layers that run, in their order; constants are left out.

        Raises:
            EngineError: this engine does not tell.
        """
        raise EngineError(f"{self.info.engine} does not tell which layers it runs; build the file with 'openvino'")

    def layer_times_ms(self) -> dict[str, float]:
        """Milliseconds that each of `runtime_layers` took in the last run, by name.

        Raises:
            EngineError: this engine does not tell, or was not built to.
        """
        raise EngineError(
            f"{self.info.engine} does not tell how long its layers take; build the file with 'openvino', profile='yes'"
        )

    def close(self) -> None:  # noqa: B027  (most engines have nothing to free)
        """Free what the engine holds."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def runtime_layers(engine: Engine) -> tuple[RuntimeLayer, ...]:
    """What `engine` really runs: layers after fusion, each with the type it computes in.

    Raises:
        EngineError: this engine does not tell.
    """
    return engine.runtime_layers()
