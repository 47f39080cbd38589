"""The hardware JPEG decoders of NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BACKEND_HARDWARE, _HW_DECODE_NO_PIPELINE, _OUTPUT_RGB, _MAX_COMPONENT = 3, 1, 3, 4
_SUPPORTED = 0
_ALIGNMENT = 512  # of an image's first byte, as torch aligns its tensors


class _Image(ctypes.Structure):
    """nvjpegImage_t: the planes of a decoded image."""

    _fields_ = (("channel", ctypes.c_void_p * _MAX_COMPONENT), ("pitch", ctypes.c_size_t * _MAX_COMPONENT))


class NvJpeg:
    """The decoders of one GPU.

    Raises:
        RuntimeError: no JPEG decoder, or the library does not load.
    """

    def __init__(self, library: str, device: torch.device) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"nvJPEG does not load: {error}") from error
        self._device, self._lock = device, threading.Lock()
        self._handle, self._state, self._header = (ctypes.c_void_p() for _ in range(3))
        with torch.cuda.device(device):
            self._call("CreateEx", _BACKEND_HARDWARE, None, None, _HW_DECODE_NO_PIPELINE, ctypes.byref(self._handle))
            self._call("JpegStateCreate", self._handle, ctypes.byref(self._state))
            self._call("JpegStreamCreate", self._handle, ctypes.byref(self._header))

    def decode(self, files: Sequence[Tensor]) -> list[Tensor | None]:
        """Decode JPEG files, (bytes,) uint8 contiguous on the CPU, and wait.

        Returns:
            RGB (3, H, W) uint8; None where the decoder refuses the file (such as progressive ones).

        Raises:
            RuntimeError: the decoder fails on a file.
        """
        with self._lock, torch.cuda.device(self._device):
            sizes = [self._size(file) for file in files]
            taken = [i for i, size in enumerate(sizes) if size is not None]
            shapes = [(3, *size) for size in sizes if size is not None]
            found: list[Tensor | None] = [None] * len(files)
            if not taken:
                return found
            starts = list(itertools.accumulate((_padded(math.prod(shape)) for shape in shapes), initial=0))
            pixels = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
            placed = list(zip(taken, shapes, starts, strict=False))
            for i, shape, start in placed:
                found[i] = pixels[start : start + math.prod(shape)].view(shape)
            images = (_Image * len(placed))(*(_image(pixels.data_ptr() + start, shape) for _, shape, start in placed))
            data = (ctypes.c_void_p * len(placed))(*(files[i].data_ptr() for i in taken))
            lengths = (ctypes.c_size_t * len(placed))(*(len(files[i]) for i in taken))
            stream = torch.cuda.current_stream()
            self._call("DecodeBatchedInitialize", self._handle, self._state, len(placed), 1, _OUTPUT_RGB)
            self._call(
                "DecodeBatched", self._handle, self._state, data, lengths, images, ctypes.c_void_p(stream.cuda_stream)
            )
            stream.synchronize()  # `files` are read until then
            return found

    def _size(self, file: Tensor) -> tuple[int, int] | None:
        """(height, width), if readable."""
        content, length = ctypes.c_void_p(file.data_ptr()), ctypes.c_size_t(len(file))
        if self._library.nvjpegJpegStreamParseHeader(self._handle, content, length, self._header):
            return None
        refused = ctypes.c_int(-1)
        self._call("DecodeBatchedSupported", self._handle, self._header, ctypes.byref(refused))
        if refused.value != _SUPPORTED:
            return None
        width, height = ctypes.c_uint(), ctypes.c_uint()
        self._call("JpegStreamGetFrameDimensions", self._header, ctypes.byref(width), ctypes.byref(height))
        return height.value, width.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"nvjpeg{name}")(*arguments):
            raise RuntimeError(f"nvjpeg{name} failed with status {status}")


@functools.cache
def nvjpeg(device: torch.device) -> NvJpeg | None:
    """A GPU's decoders; None without them or torchvision's nvJPEG."""
    library = _loaded_library() if device.type == "cuda" else None
    try:
        return None if library is None else NvJpeg(library, device)
    except RuntimeError:
        return None


def _loaded_library() -> str | None:
    importlib.import_module("torchvision.io")  # loads it

    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return None
    paths = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/libnvjpeg." in line]
    return min(paths, key=lambda path: "torchvision" not in path, default=None)  # others may have loaded another one


def _image(first: int, shape: tuple[int, int, int]) -> _Image:
    planes, rows, columns = shape
    channel = [first + plane * rows * columns for plane in range(planes)]
    return _Image((ctypes.c_void_p * _MAX_COMPONENT)(*channel), (ctypes.c_size_t * _MAX_COMPONENT)(*[columns] * planes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
