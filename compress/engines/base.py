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

    def close(self) -> None:  # noqa: B027  (most engines have nothing to free)
        """Free what the engine holds."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
