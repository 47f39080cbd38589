"""scipy's integer programs without what their solver prints.

HiGHS 1.12, which scipy 1.17 brings, prints a line of its debugging to standard output whatever it is told
(github.com/ERGO-Code/HiGHS/issues/2783); `search --json` and callers of the library would find it in their output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scipy
from scipy.optimize import milp

_PRINTS = scipy.__version__.startswith("1.17.")
_STDOUT = 1
_ONE_AT_A_TIME = threading.Lock()


def solve(*arguments: Any, **options: Any) -> Any:
    """Call `scipy.optimize.milp`, and print nothing."""
    with _unprinted() if _PRINTS else contextlib.nullcontext():
        return milp(*arguments, **options)


@contextlib.contextmanager
def _unprinted() -> Iterator[None]:
    """Throw away what C code writes to standard output while the block runs; Python's own buffer is not touched."""
    with _ONE_AT_A_TIME, Path(os.devnull).open("wb") as nothing:
        try:
            flush, own = ctypes.CDLL(None).fflush, os.dup(_STDOUT)
        except (OSError, TypeError, AttributeError):  # it is closed, or there is no C library to ask: let it print
            yield
            return
        try:
            flush(None)
            os.dup2(nothing.fileno(), _STDOUT)
            yield
        finally:
            flush(None)
            os.dup2(own, _STDOUT)
            os.close(own)
