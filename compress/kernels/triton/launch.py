"""Launches of Triton kernels that look the compiled kernel up only once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CACHE_SIZE = 4096  # launches, or plans of them


class Launch:
    """One kernel, one grid, one kind of arguments.

    Args:
        kernel: a function under `triton.jit`.
        grid: programs, (x,) or (x, y).
        constants: the last arguments, numbers and constexprs, which are the same in every call.
        options: of Triton's compiler: `num_warps`, `num_stages`, `maxnreg`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *constants: Any, **options: int | None) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._options = options
        self._head: tuple[Any, ...] = ()
        self._tail: tuple[Any, ...] = ()
        self._run: Any = None

    def __call__(self, device: int, *tensors: Any) -> None:
        """Run on the current stream of `device`."""
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(device, *tensors)
        elif not _aligned(tensors):
            self._through_triton(tensors)
        elif self._run is None:
            self._first(tensors)
        else:
            self._run(*self._head, torch._C._cuda_getCurrentRawStream(device), *self._tail, *tensors, *self._constants)

    def _through_triton(self, tensors: tuple[Any, ...]) -> Any:
        return self._kernel[self._grid](*tensors, *self._constants, **self._options)

    def _first(self, tensors: tuple[Any, ...]) -> None:
        compiled = self._through_triton(tensors)
        if compiled is None:  # the interpreter compiles nothing
            return
        self._head = (*self._grid, 1, 1)[:3]
        self._tail = (compiled.function, compiled.packed_metadata, None, None, None)  # no hooks of profilers
        self._run = compiled.run


def _aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    joined = 0
    for tensor in tensors:
        if tensor is not None:
            joined |= tensor.data_ptr()
    return joined & 15 == 0


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], constants: tuple[Any, ...], **options: int
) -> None:
    """Run a kernel; its launch is looked up by the types of its tensors. In a compiled graph, torch's code launches it.

    - `kernel`: a function under `triton.jit`.
    - `options`: of Triton's compiler: `num_warps`, `num_stages`.
    """
    if torch.compiler.is_compiling():
        kernel[grid](*tensors, *constants, **options)
        return
    device = tensors[0].get_device()
    key = (kernel, grid, device, constants, *options.values(), *[tensor.dtype for tensor in tensors])
    found = _LAUNCHES.get(key)
    if found is None:
        found = _LAUNCHES[key] = Launch(kernel, grid, *constants, **options)
    found(device, *tensors)


class BoundedCache(dict[Any, Any]):
    """A dictionary that is cleared when it is full, as happens with ever new shapes."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= _CACHE_SIZE:
            self.clear()
        super().__setitem__(key, value)


_LAUNCHES = BoundedCache()
