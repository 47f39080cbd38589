"""Calls that wait for other threads and ignore the caller's autocast and default device.

torch.fx replaces methods of `nn.Module` for the whole process while it traces, so two traces may not overlap.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_ONE = threading.RLock()


def _renew() -> None:
    global _ONE
    _ONE = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew)


def alone(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function wait for calls in other threads, and compute without the caller's autocast and default device."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _ONE, contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            return function(*args, **kwargs)

    return call
