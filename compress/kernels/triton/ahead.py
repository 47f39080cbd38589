"""Compile Triton kernels before they are needed: in many processes at once, and for GPUs that are not there."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorType(NamedTuple):
    """A tensor as the compiler sees it; `aligned`: it begins at a multiple of 16 bytes."""

    dtype: str
    aligned: bool


class DescriptorType(NamedTuple):
    """A tensor descriptor as the compiler sees it."""

    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A kernel to compile, with tensors as `TensorType` or `DescriptorType` and sorted options, such as `num_warps`."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@contextmanager
def recorded() -> Iterator[dict[Request, None]]:
    """Within, launches of Triton kernels are noted and not made."""
    from triton.runtime.jit import JITFunction  # optional: Triton is not installed everywhere

    requests: dict[Request, None] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = tuple(map(_seen, args, self.params))
        kept = {key: value for key, value in options.items() if value is not None}
        request = Request(self.fn.__module__, self.fn.__name__, arguments, tuple(sorted(kept.items())))
        requests[request] = None

    before = JITFunction.run
    JITFunction.run = run
    try:
        yield requests
    finally:
        JITFunction.run = before


def _seen(argument: Any, parameter: Any, inside: bool = False) -> object:
    """An argument as the compiler sees it: of numbers that are no constants only a few kinds."""
    if isinstance(argument, Tensor):
        return TensorType(str(argument.dtype).removeprefix("torch."), argument.data_ptr() % 16 == 0)
    if type(argument).__name__ == "TensorDescriptor":
        return DescriptorType(str(argument.base.dtype).removeprefix("torch."), tuple(argument.block_shape))
    if parameter.is_constexpr or argument is None or isinstance(argument, bool):
        return argument
    if isinstance(argument, tuple):
        inner: list[Any] = [_seen(element, parameter, True) for element in argument]
        return type(argument)(*inner) if hasattr(argument, "_fields") else tuple(inner)
    if isinstance(argument, float):
        return 0.5
    if isinstance(argument, int) and -(2**31) <= argument < 2**31:
        if parameter.do_not_specialize and not inside:
            return 17
        return 1 if argument == 1 else 16 if argument % 16 == 0 else 17
    return argument


def compile_requests(
    requests: Sequence[Request],
    capability: tuple[int, int],
    *,
    jobs: int,
    seconds: float | None = None,
) -> list[str]:
    """Compile kernels in processes of their own, in `seconds` for all; return what failed of each, or ""."""
    results = ["" if seconds is None else f"not compiled in {seconds:.0f} s"] * len(requests)
    if not requests or (seconds is not None and seconds <= 0):
        return results
    order = _Order(tuple(requests), capability, jobs, None if seconds is None else time.time() + seconds)
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        orders, answers = server.stdin, server.stdout
        assert orders is not None and answers is not None
        # A server that ends is late, or cannot run here: what it leaves is compiled when it is launched.
        with suppress(BrokenPipeError, EOFError):
            orders.write(pickle.dumps(sys.path) + pickle.dumps(order))
            orders.close()
            for _ in requests:
                index, results[index] = pickle.load(answers)
    return results


_SERVER = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from compress.kernels.triton.ahead import serve
serve()
"""


class _Order(NamedTuple):
    """The arguments of `compile_requests`; `end` is the time after which nothing is waited for."""

    requests: tuple[Request, ...]
    capability: tuple[int, int]
    jobs: int
    end: float | None


def serve() -> None:
    """Compile what is read from standard input, and write each result when it is there: the started process."""
    order: _Order = pickle.load(sys.stdin.buffer)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no result
    _start(order.capability)
    for module in dict.fromkeys(request.module for request in order.requests):
        importlib.import_module(module)  # once for all children
    waiting = list(enumerate(order.requests))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < order.jobs:
            connection, child = _child()
            running[connection] = _next(waiting, connection), child
        ready = wait(list(running), None if order.end is None else max(0.0, order.end - time.time()))
        if not ready:
            break
        for connection in [one for one in running if one in ready]:
            index, child = running.pop(connection)
            try:
                error = connection.recv()
                if waiting:
                    running[connection] = _next(waiting, connection), child
            except EOFError:
                child.join()
                error = f"the compiler ended with status {child.exitcode}"
            pickle.dump((index, error), output)
            output.flush()
    for _, child in running.values():
        child.kill()


def _next(waiting: list[tuple[int, Request]], connection: Connection) -> int:
    index, request = waiting.pop()
    connection.send(request)
    return index


def _child() -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")
    connection, end = context.Pipe()
    child = context.Process(target=_compile_all, args=(end,), daemon=True)
    child.start()
    end.close()
    return connection, child


def _compile_all(requests: Connection) -> None:
    while True:
        requests.send(_compile(requests.recv()))


class _Target:
    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget  # optional: Triton is not installed everywhere

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _start(capability: tuple[int, int]) -> None:
    from triton.runtime.driver import driver  # optional: Triton is not installed everywhere

    torch.set_num_threads(1)
    driver.set_active(_Target(capability))


def _stand_in(argument: Any) -> object:
    from triton.runtime.jit import MockTensor  # optional: Triton is not installed everywhere

    if isinstance(argument, TensorType):
        tensor = MockTensor(getattr(torch, argument.dtype))
        if not argument.aligned:
            tensor.data_ptr = lambda: 1
        return tensor
    if isinstance(argument, DescriptorType):
        from triton.tools.tensor_descriptor import TensorDescriptor  # optional: Triton is not installed everywhere

        block = list(argument.block)
        strides = [16 * math.prod(block[i + 1 :]) for i in range(len(block) - 1)]
        return TensorDescriptor(MockTensor(getattr(torch, argument.dtype)), block, [*strides, 1], block)
    if isinstance(argument, tuple):
        inner: list[Any] = [_stand_in(element) for element in argument]
        return type(argument)(*inner) if hasattr(argument, "_fields") else tuple(inner)
    return argument


def _compile(request: Request) -> str:
    try:
        kernel = getattr(importlib.import_module(request.module), request.name)
        arguments = [_stand_in(argument) for argument in request.arguments]
        kernel.warmup(*arguments, grid=(1,), **dict(request.options))
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
    return ""
