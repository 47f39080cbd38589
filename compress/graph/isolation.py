"""Calls that neither other threads nor the caller's settings change, and that leave a model as it was.

torch.fx replaces methods of `nn.Module` for the whole process while it traces, so two traces may not overlap. Only what
a forward pass changed is written back, because another thread may run the same model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

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


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the modes and the buffers of all modules afterwards, plain attributes, and those that became symbolic."""
    states = [
        (module, module.training, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training, attributes, parameters, buffers in states:
            for table, before in (vars(module), attributes), (module._parameters, parameters):
                _take_back(table, before)
            if any(module._buffers.get(name) is not value for name, value in buffers.items()):
                module._buffers.update(buffers)
            for name in [name for name in module._buffers if name not in buffers]:
                del module._buffers[name]
            if module.training != training:
                module.training = training
        with torch.no_grad():
            for buffer, value in values:
                if not equal(buffer, value):  # an expanded constant is not written to
                    buffer.copy_(value)


def _take_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in list(table.items()):
        if name not in before:
            if _is_symbolic(value):
                del table[name]
        elif value is not before[name] and (_is_symbolic(value) or isinstance(value, (int, float, str))):
            table[name] = before[name]


def _is_symbolic(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(value))


def equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have the same shape and values; NaN equals nothing."""
    return a.shape == b.shape and torch.equal(a, b)
