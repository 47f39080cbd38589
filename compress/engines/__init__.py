"""Engines run a model and are measured; each imports its library in one place, on first use."""

from compress.engines.base import (
    Arrays,
    Availability,
    BuildOptions,
    Engine,
    EngineInfo,
    GpuTimes,
    RuntimeLayer,
    TensorInfo,
)
from compress.engines.registry import ENGINES, build_engine, engine_availability
from compress.engines.torch import TorchEngine

__all__ = [
    "ENGINES",
    "Arrays",
    "Availability",
    "BuildOptions",
    "Engine",
    "EngineInfo",
    "GpuTimes",
    "RuntimeLayer",
    "TensorInfo",
    "TorchEngine",
    "build_engine",
    "engine_availability",
]
