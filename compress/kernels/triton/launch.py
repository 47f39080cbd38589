"""The one import of Triton, or a stand-in where it is not installed, and launches that look a kernel up only once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from compress.errors import QuantizationError

if TYPE_CHECKING:
    import triton as triton
    import triton.language as tl

    HAS_TRITON: bool
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:

        class _Missing:
            def __getattr__(self, name: str) -> _Missing:
                return self

            def __call__(self, *args: object, **options: object) -> object:
                return args[0] if args else self

        triton = tl = _Missing()
        HAS_TRITON = False

__all__ = [
    "HAS_TRITON",
    "BoundedCache",
    "Kernels",
    "Launch",
    "launch",
    "refuse_second_derivative",
    "tl",
    "triton",
    "use_triton",
    "use_triton_compiled",
    "use_triton_eager",
]
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
    """Run a kernel; its launch is looked up by its tensors' types. In a compiled graph, torch's code launches it."""
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


Kernels = Literal["triton", "torch"]


def use_triton_eager(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether Triton kernels are launched for `x`: if asked for, or on a GPU; never while torch compiles a graph."""
    return (kernels == "triton" or (kernels is None and HAS_TRITON and x.is_cuda)) and not torch.compiler.is_compiling()


def use_triton_compiled(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether the graph that torch is compiling calls Triton kernels for `x`: on a GPU, unless torch is asked for."""
    return kernels != "torch" and HAS_TRITON and x.is_cuda and torch.compiler.is_compiling()


def use_triton(x: Tensor, kernels: Kernels | None) -> bool:
    return use_triton_compiled(x, kernels) or use_triton_eager(x, kernels)


def refuse_second_derivative(*grads: Tensor | None) -> None:
    if not torch.compiler.is_compiling() and any(grad is not None and grad.requires_grad for grad in grads):
        raise QuantizationError(
            "our Triton kernels have no second derivative; for one, fuse with forward='float', kernels='torch' "
            "(fuse_for_training)"
        )
