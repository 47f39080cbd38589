"""Whether TensorRT and TensorRT-RTX are here. They need a library and a GPU, and either may be missing or broken."""

from __future__ import annotations

import importlib
from typing import Any

from compress.engines.arrays import reason
from compress.engines.base import Availability


def nvidia_availability(name: str, *, module: str, install: str) -> Availability:
    """Availability of an engine whose library is `module`.

    A package index holds placeholders of these libraries, which install but cannot be imported or hold nothing; they
    count as missing.
    """
    library, problem = _library(module)
    version = str(getattr(library, "__version__", ""))
    devices = _cuda_devices()
    reasons = [problem] if problem else []
    if not devices:
        reasons.append("torch sees no CUDA device")
    wanted = [install] if problem else []
    if not devices:
        wanted.append("use a machine with an NVIDIA GPU and its driver")
    return Availability(
        name=name,
        available=not reasons,
        version=version,
        devices=devices,
        reason="; ".join(reasons),
        install="; ".join(wanted),
    )


def _library(name: str) -> tuple[Any, str]:
    """The imported library and "", or None and why not. Any error counts: placeholders raise what they like."""
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError:
        return None, f"{name} is not installed"
    except (Exception, SystemExit) as error:
        return None, f"{name} cannot be imported ({type(error).__name__}: {reason(error, limit=200)})"
    if not hasattr(library, "Builder"):
        return None, f"the package {name} holds no Builder: it is a placeholder or another package"
    return library, ""


def _cuda_devices() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))
