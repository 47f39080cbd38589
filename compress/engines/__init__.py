"""What runs a model and is measured; each engine imports its library lazily, in one place."""

from compress.engines.base import (
    Arrays,
    Availability,
    BuildOptions,
    Engine,
    EngineInfo,
    RuntimeLayer,
    TensorInfo,
    runtime_layers,
)
from compress.engines.registry import ENGINES, build_engine, engine_availability
from compress.engines.torch_engine import TorchEngine

__all__ = [
    "ENGINES",
    "Arrays",
    "Availability",
    "BuildOptions",
    "Engine",
    "EngineInfo",
    "RuntimeLayer",
    "TensorInfo",
    "TorchEngine",
    "build_engine",
    "engine_availability",
    "runtime_layers",
]
