"""JPEG files decoded, cut and resized by a GPU, by its hardware decoders where it has them."""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import itertools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from compress.data.decode import Decoded, Decoder, Item, collate, covering, longest_side, middle, open_image, random_box
from compress.data.memory import to_device
from compress.data.workers import Place
from compress.errors import DataError
from compress.files import read_regular
from compress.kernels.resample import Window, resample

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


_UPRIGHT, _ORIENTATION = 1, 274  # EXIF 2.32
_END = b"\xff\xd9"
_RGB_IDS = [82, 71, 66]


class FileItem(NamedTuple):
    """One image: a file for the GPU, or what the CPU made of it.

    Attributes:
        file: (bytes,) uint8; None if the CPU decoded it.
        window: part of the image, or None.
        decoded: the CPU's result or error, or None.
        reason: why the CPU decoded it, and its name, or "".
    """

    number: int
    file: Tensor | None
    window: Window | None
    decoded: Item | None
    reason: tuple[str, str]


class Packed(NamedTuple):
    """A batch in one tensor: each tensor from a worker process costs a connection.

    Attributes:
        indices: of readable images.
        by_gpu: for each, whether the GPU decodes it.
        files: (bytes,) uint8, concatenated.
        lengths: bytes by file.
        decoded: the others and failures, or None.
        reasons: with a file's name each.
    """

    indices: list[int]
    by_gpu: list[bool]
    files: Tensor
    lengths: list[int]
    windows: list[Window]
    decoded: Decoded | None
    reasons: dict[str, str]

    def pin_memory(self) -> Packed:
        """Return the batch with its files in pinned memory; a DataLoader calls it."""
        return self._replace(files=self.files.pin_memory())


class Reader(Dataset[FileItem]):
    """The files of a split, read one at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.decoder)

    def __getitem__(self, place: Place) -> FileItem:
        index = place[0]
        path, reason = self.decoder.path(index), ""
        try:
            content = np.frombuffer(bytearray(read_regular(path)), dtype=np.uint8)
            with open_image(io.BytesIO(content.tobytes()), self.decoder.max_pixels) as header:
                reason = refusal(header, content)
                if not reason:
                    window = self._window(place, header.width, header.height)
                    return FileItem(index, torch.from_numpy(content), window, None, ("", ""))
        except Exception:  # a damaged file fails in any way; Pillow names the damage
            reason = ""
        return FileItem(index, None, None, self.decoder[place], (reason, str(path)))

    def _window(self, place: Place, width: int, height: int) -> Window:
        size, draws = self.decoder.preprocessing.height_width, self.decoder.draws(place)
        if draws is None:
            return centre_window(width, height, size, self.decoder.preprocessing.crop_ratio)
        return random_window(width, height, size, draws)


def refusal(header: Image.Image, content: np.ndarray) -> str:
    """Return why the GPU is not to decode a file; "" if it is."""
    if header.format != "JPEG":
        return f"{header.format} files"
    if header.mode != "RGB":
        return "JPEG files that are grey or CMYK"
    if header.info.get("adobe_transform") == 0 or [layer[0] for layer in getattr(header, "layer", ())] == _RGB_IDS:
        return "JPEG files that hold RGB"
    if "exif" in header.info and header.getexif().get(_ORIENTATION, _UPRIGHT) != _UPRIGHT:
        return "JPEG files that their EXIF data turn"
    if content[-2:].tobytes() != _END:
        return "JPEG files without an end"
    return ""


def random_window(width: int, height: int, size: tuple[int, int], draws: list[float]) -> Window:
    """Return the part that `random_crop` takes with the same draws."""
    top, left, rows, columns = random_box(width, height, draws[:-1])
    return Window(top, rows, size[0], 0, left, columns, size[1], 0, int(draws[-1] < 0.5))


def centre_window(width: int, height: int, size: tuple[int, int], crop_ratio: float) -> Window:
    """Return the part that `fitted` takes to crop."""
    longest = longest_side(width, height, size)
    rows, columns = min(height, longest), min(width, longest)
    resized = covering(rows, columns, size, crop_ratio)
    if len(resized) == 1:  # of the shorter side, as torchvision takes it
        short = resized[0]
        resized = [int(short * side / min(rows, columns)) for side in (rows, columns)]
    return Window(
        middle(height, rows),
        rows,
        resized[0],
        middle(resized[0], size[0]),
        middle(width, columns),
        columns,
        resized[1],
        middle(resized[1], size[1]),
        0,
    )


def pack(items: Sequence[FileItem]) -> Packed:
    """Make a batch of items."""
    read = [item for item in items if item.decoded is None or item.decoded[1] is not None]
    files = [item.file for item in read if item.file is not None]
    decoded = [item.decoded for item in items if item.decoded is not None]
    return Packed(
        [item.number for item in read],
        [item.file is not None for item in read],
        torch.cat(files) if files else torch.empty(0, dtype=torch.uint8),
        [len(file) for file in files],
        [item.window for item in read if item.window is not None],
        collate(decoded) if decoded else None,
        {reason: file for reason, file in (item.reason for item in items) if reason},
    )


def decode_packed(
    packed: Packed, decoder: Decoder, seed: int | None, device: torch.device, reasons: dict[str, str]
) -> Decoded:
    """Decode on `device`; returns as `collate`.

    `decoder` takes all to the CPU if the GPU fails; `seed` is the batch's; `reasons` takes why, with a file's name
    each.
    """
    for reason, file in packed.reasons.items():
        reasons.setdefault(reason, file)
    size, indices = decoder.preprocessing.height_width, torch.tensor(packed.indices, dtype=torch.int64)
    pixels, _, failures = packed.decoded or collate([])
    if not packed.lengths:
        return to_device(pixels, device), indices, failures
    try:
        images = decode_jpegs(list(packed.files.split(packed.lengths)), device)
    except RuntimeError as error:
        first = packed.indices[packed.by_gpu.index(True)]
        reasons.setdefault(f"batches that it fails on ({str(error).splitlines()[0]})", str(decoder.path(first)))
        again, indices, more = collate([decoder[index, seed] for index in packed.indices])
        return again, indices, [*failures, *more]
    found = resample(images, packed.windows, size)
    if len(found) == len(indices):
        return found, indices, failures
    by_gpu = torch.tensor(packed.by_gpu)
    whole = found.new_empty(len(indices), 3, *size)
    whole[to_device(by_gpu.nonzero()[:, 0], device)] = found
    whole[to_device((~by_gpu).nonzero()[:, 0], device)] = to_device(pixels, device)
    return whole, indices, failures


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """(bytes,) uint8 on the CPU to (3, H, W) uint8 on `device`.

    Raises:
        RuntimeError: the decoder fails, or the device has none.
    """
    from torchvision.io import ImageReadMode, decode_jpeg  # lazy: as in `decode`

    decoder = nvjpeg(device)
    found = [None] * len(files) if decoder is None else decoder.decode(files)
    if left := [file for file, image in zip(files, found, strict=True) if image is None]:
        if device.type == "cuda":
            torch.cuda.current_stream(
                device
            ).synchronize()  # torchvision may write into memory that was given back here
        computed = iter(decode_jpeg(left, mode=ImageReadMode.RGB, device=device))
        return [next(computed) if image is None else image for image in found]
    return [image for image in found if image is not None]


@functools.cache
def check_decoder(device: torch.device) -> None:
    """Refuse a device on which torchvision cannot decode.

    Raises:
        DataError: why.
    """
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(file, "JPEG")
    try:
        decode_jpegs([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except RuntimeError as error:
        raise DataError(
            f"data.decode is gpu, and torchvision cannot decode JPEG files on {device} ({str(error).splitlines()[0]}): "
            "install a torchvision that was built with CUDA, or set data.decode: cpu"
        ) from error
