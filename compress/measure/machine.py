"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

from compress.support.process import (
    core_count,
    instruction_sets,
    load_average,
    memory_bytes,
    nvidia_driver,
    processor_name,
    read_fact,
)

LIBRARIES = (
    "torch",
    "torchvision",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-lean",
    "timm",
)

# Instruction sets that decide how fast low precision is, under the kernel's names (`asimddp`: NEON dot product).
ISA_FLAGS = (
    *("avx2", "avx_vnni", "avx_vnni_int8", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "amx_fp16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA GPU: name, compute capability (such as `9.0`), memory in bytes."""

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine of a measurement; unknown facts are empty or None.

    Attributes:
        usable_cores: that this process may use (affinity and container quota).
        isa: those of `ISA_FLAGS` that the processor has.
        load_average: of the last minute.
    """

    cpu: str
    cores: int
    usable_cores: float
    isa: tuple[str, ...]
    memory_bytes: int | None
    load_average: float | None
    system: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    gpu_driver: str = ""

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        return {**row, "isa": list(self.isa), "gpus": list(row["gpus"])}


def describe_machine() -> Machine:
    features = instruction_sets()
    return Machine(
        cpu=processor_name(),
        cores=os.cpu_count() or 1,
        usable_cores=_usable_cores(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in features),
        memory_bytes=memory_bytes(),
        load_average=load_average(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=platform.python_version(),
        versions=_versions(),
        gpus=_gpus(),
        gpu_driver=nvidia_driver(),
    )


def _usable_cores() -> float:
    """The smaller of the affinity mask and the cgroup's quota."""
    count = core_count()
    quota, _, period = read_fact("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return min(float(count), round(int(quota) / int(period), 2))
    return float(count)


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(
        Gpu(name=gpu.name, compute_capability=f"{gpu.major}.{gpu.minor}", memory_bytes=gpu.total_memory) for gpu in seen
    )
