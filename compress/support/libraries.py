"""Libraries of engines: their import on first use, and their errors on one line."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

from compress.errors import CompressError, EngineUnavailableError
from compress.support.imports import any_failure


def import_library(module: str, install: str) -> ModuleType:
    """Import an engine's library on first use, without telemetry."""
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
    return any_failure(lambda found: error(f"{before}{reason(found)}{after}"))


_TELLING = re.compile(r"no conversion rule|not supported|unsupported|not implemented|no op registered|unknown op", re.I)
_PLACE = re.compile(
    r"Exception from src|Traceback|Check '|FrontEnd API failed|Model wasn't fully|Summary:|To facilitate"
)


def reason(error: BaseException, *, limit: int = 500) -> str:
    """A library's message on one line, without source positions."""
    lines = [line.strip().removeprefix("-- ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not _PLACE.match(line)] or lines
    telling = [line for line in kept if _TELLING.search(line)]  # these name the operator, and may stand last
    cause = [line for line in telling if line.startswith("No conversion rule")]  # the others follow from it
    text = " ".join(dict.fromkeys(cause or [*telling, *kept])) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Stack(ctypes.Structure):
    """`stack_t` of Linux (sigaltstack(2))."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def keep_signal_stack() -> Iterator[None]:
    """Restore this thread's alternate signal stack, which OpenVINO replaces: a freed one is fatal at a signal."""
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    stack = _Stack()
    sigaltstack(None, ctypes.byref(stack))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(stack), None)
