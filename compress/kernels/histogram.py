"""CUDA kernels that find a tensor's largest magnitude and its histogram at the speed of memory."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.kernels.triton.launch import BoundedCache


@functools.cache
def available(device: int) -> bool:
    try:
        compiler(), _driver()
    except OSError:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def compiler() -> ctypes.CDLL:
    name = f"libnvrtc.so.{(torch.version.cuda or 'none').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:  # beside torch, in a package that the loader does not search
        spec = importlib.util.find_spec("nvidia")
        for folder in spec.submodule_search_locations or () if spec else ():
            for found in Path(folder).glob(f"*/lib/{name}"):
                return ctypes.CDLL(str(found))
        raise


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compile_cuda(source: str, capability: tuple[int, int], **macros: int) -> bytes:
    """Machine code of CUDA C++ 17 without headers; products and sums are joined only where it says so.

    Raises:
        OSError: there is no compiler.
        RuntimeError: the compiler reports an error.
    """
    nvrtc, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    arch = "{}{}".format(*capability)
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "--fmad=false"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    pointers = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        raise RuntimeError("NVRTC takes no program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), pointers)
        what = "ProgramLog" if failed else "CUBIN"
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        result = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, result)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"NVRTC cannot compile for sm_{arch}: {result.value.decode()}")
    return result.raw


class Kernel:
    """A function of compiled code on a grid that fills the current device; if `together`, blocks wait for others."""

    def __init__(self, code: bytes, name: str, *, threads: int, together: bool = False) -> None:
        module, self._function, blocks = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        _call("cuModuleLoadData", ctypes.byref(module), code)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        function, size = self._function, ctypes.c_size_t(0)
        _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, size)
        processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._shape = (blocks.value * processors, 1, 1, threads, 1, 1, 0)
        self._together = together

    def __call__(self, device: int, values: Tensor, tables: Sequence[Tensor]) -> None:
        sizes = ctypes.c_uint64(values.numel())
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, *tables)]
        addresses = [ctypes.addressof(argument) for argument in (pointers[0], sizes, *pointers[1:])]
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
        if self._together:
            _call("cuLaunchCooperativeKernel", self._function, *self._shape, stream, arguments)
        else:
            _call("cuLaunchKernel", self._function, *self._shape, stream, arguments, None)


def _call(name: str, *arguments: object) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error ' + str(error).encode()).decode()}")


SOURCE = Path(__file__).with_name("histogram.cu")

# Types that the kernels read, and how they call them.
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_SHAPE = {"THREADS": 1024, "BLOCKS": 1, "UNROLL": 4}
_MOST_BINS = 12_000  # fewer than 48 KiB of counts: what every block may have
_MOST_VALUES = 1 << 33  # indices of 16-byte loads are 32 bits wide

_KERNELS = BoundedCache()


def takes(values: Tensor, bins: int = 1) -> bool:
    """Whether the kernels take (rows, n) values: one row without gaps in at most 32 bits, on a GPU."""
    if not values.is_cuda or len(values) != 1 or not values.is_contiguous() or bins > _MOST_BINS:
        return False
    return values.dtype in KINDS and values.numel() < _MOST_VALUES and available(values.get_device())


def collect_amax(values: Tensor, amax: Tensor) -> None:
    """Raise `amax`, (1,) float32, in place to the largest magnitude of values that `takes`; NaN if there is one."""
    _run("largest", values, [amax], 1, 1)


class Watch:
    """A histogram that the kernels count into.

    Args:
        amax, width: (1,) float32, and
        counts: (1, bins) int64: of the histogram, changed in place.
        start: bins that the first batch is spread over, a power of two.
    """

    def __init__(self, amax: Tensor, width: Tensor, counts: Tensor, start: int) -> None:
        gate = torch.zeros(2, dtype=torch.int32, device=counts.device)
        self._tables = (amax, width, counts, gate)
        self._sizes = (counts.shape[1], start)

    def collect(self, values: Tensor) -> None:
        _run("watch", values, self._tables, *self._sizes)


def _run(name: str, values: Tensor, tables: Sequence[Tensor], bins: int, start: int) -> None:
    device = values.get_device()
    key = (name, values.dtype, device, bins, start)
    with torch.cuda.device(device):
        if key not in _KERNELS:
            macros = {"KIND": KINDS[values.dtype], "BINS": bins, "START": start, **_SHAPE}
            code = compile_cuda(SOURCE.read_text(), torch.cuda.get_device_capability(device), **macros)
            _KERNELS[key] = Kernel(code, name, threads=_SHAPE["THREADS"], together=name == "watch")
        _KERNELS[key](device, values, tables)
