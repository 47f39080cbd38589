"""Helpers of the engines: checks of input arrays, import of a library, short texts of its errors."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from compress.engines.base import Arrays, TensorInfo
from compress.errors import CompressError, EngineError, EngineUnavailableError, near_misses
from compress.support.imports import any_failure


def check_inputs(inputs: Mapping[str, NDArray[np.generic]], expected: Sequence[TensorInfo], *, label: str) -> Arrays:
    """Refuse inputs that an engine does not take; return them contiguous, in the engine's order.

    In `expected` a dimension of -1 takes any size from 1.

    Raises:
        EngineError: a name is missing or unknown, or an array is of another type or shape.
    """
    names = [tensor.name for tensor in expected]
    for name in inputs:
        if name not in names:
            raise EngineError(f"{label}: unknown input {name!r}{near_misses(name, names)} (inputs: {', '.join(names)})")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise EngineError(f"{label}: missing input {', '.join(missing)}; got {', '.join(inputs) or 'none'}")
    checked: Arrays = {}
    for tensor in expected:
        array = inputs[tensor.name]
        if not isinstance(array, np.ndarray):
            raise EngineError(f"{label}: input {tensor.name!r} is a {type(array).__name__}; give a numpy array")
        if array.dtype.name != tensor.dtype:
            raise EngineError(f"{label}: input {tensor.name!r} is {array.dtype.name}; the engine takes {tensor.dtype}")
        if not _fits(array.shape, tensor.shape):
            raise EngineError(
                f"{label}: input {tensor.name!r} has shape {array.shape}; the engine takes {shape_text(tensor.shape)}"
            )
        checked[tensor.name] = np.ascontiguousarray(array)
    return checked


def _fits(got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(got) == len(wanted) and all(g == w or (w == -1 and g >= 1) for g, w in zip(got, wanted, strict=True))


def shape_text(shape: Iterable[int]) -> str:
    """Return `(any, 3, 224, 224)` for (-1, 3, 224, 224)."""
    return f"({', '.join('any' if size == -1 else str(size) for size in shape)})"


def with_batch(inputs: Sequence[TensorInfo], batch_size: int | None, *, where: str) -> tuple[TensorInfo, ...]:
    """Return `inputs` with their first dimension fixed to `batch_size`; None leaves them unchanged.

    Raises:
        EngineError: an input has no dimensions, or is fixed to another size already.
    """
    if batch_size is None:
        return tuple(inputs)
    for tensor in inputs:
        if not tensor.shape or tensor.shape[0] not in (-1, batch_size):
            raise EngineError(
                f"{where}: batch_size is {batch_size} but input {tensor.name!r} is fixed to "
                f"{shape_text(tensor.shape)}; export it with a dynamic batch, or leave batch_size out"
            )
    return tuple(tensor.with_batch(batch_size) for tensor in inputs)


def import_library(module: str, install: str) -> ModuleType:
    """Import an engine's library on first use, without telemetry.

    Raises:
        EngineUnavailableError: it is not installed, or cannot be imported.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    silenced = module == "openvino" and "openvino" not in sys.modules and "openvino_telemetry" not in sys.modules
    if silenced:  # OpenVINO reports each import, without asking, where this package is there
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # Python's own sign for "not installed"
    try:
        return importlib.import_module(module)
    except Exception as error:  # a damaged library fails in any way while it is imported
        raise EngineUnavailableError(
            f"{module} cannot be imported ({type(error).__name__}: {error}); {install}"
        ) from error
    finally:
        if silenced:
            sys.modules.pop("openvino_telemetry", None)


def library_errors(error: type[CompressError], before: str, after: str = "") -> AbstractContextManager[None]:
    """Raise `error` for any failure of a library in the context, its reason between two texts."""
    return any_failure(lambda found: error(f"{before}{reason(found)}{after}"))


_TELLING = re.compile(r"no conversion rule|not supported|unsupported|not implemented|no op registered|unknown op", re.I)


def reason(error: BaseException, *, limit: int = 500) -> str:
    """Return a library's message on one line, without source positions."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from src", "Traceback"))]
    telling = [line for line in kept if _TELLING.search(line)]  # these name the operator, and may stand last
    text = " ".join(dict.fromkeys([*telling, *kept]))
    text = text or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
