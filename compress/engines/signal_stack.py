"""Restores the alternate signal stack of a thread after a library has replaced it.

OpenVINO gives the thread that compiles a model a signal stack of its own, and frees it with the model. If two models
are freed in the order in which they were made, a freed stack stays set, and the next signal with a handler (SIGCHLD,
when a worker of a DataLoader ends) kills the process. Restoring the stack at once prevents this.
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
    """Restore this thread's alternate signal stack at the end; outside Linux, do nothing."""
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
