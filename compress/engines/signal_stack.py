"""Restores the signal stack of a thread after OpenVINO has replaced it; a freed stack kills the process at a signal."""

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
