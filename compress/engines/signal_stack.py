"""The alternate signal stack of a thread, kept as it was while a library is at work.

OpenVINO gives the thread that compiles a model a signal stack of its own, and frees it with the model. Of two models
freed in the order in which they were made, the first cannot put the old stack back, and the second puts back that of
the first, freed by then. The next signal with a handler (SIGCHLD, when a worker of a DataLoader ends) kills the
process. A stack that was put back at once is never the library's to free.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """`stack_t` of Linux (sigaltstack(2))."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def keep_signal_stack() -> Iterator[None]:
    """Put this thread's alternate signal stack back at the end. Does nothing outside Linux."""
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
