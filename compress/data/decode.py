"""Image files to 8-bit pixels, by the CPU or by a GPU, which decodes, cuts and resizes JPEG files."""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from compress.data.base import Preprocessing, uniform
from compress.data.memory import to_device
from compress.data.workers import Decoded, Item, Place, T, collate
from compress.errors import DataError
from compress.files import read_regular
from compress.kernels.resample import Window, resample
from compress.support.imports import any_failure, described
from compress.support.limits import IMAGE_PIXELS

_AREA = (0.08, 1.0)
_LOG_RATIO = math.log(4 / 3)
_TRIES = 10
_METHODS = {"bilinear": Image.Resampling.BILINEAR.value, "bicubic": Image.Resampling.BICUBIC.value}
_LONGEST_STRIP = 4  # times what the crop needs
_FORMATS = ("JPEG", "PNG", "PPM", "GIF", "BMP", "DIB", "WEBP", "TIFF", "JPEG2000")
"""Formats of pixels. Pillow opens others too, whatever the name of the file: for PostScript it starts Ghostscript.
At one that `preinit` does not know Pillow loads all its plugins, for a quarter of a second: these come last.
"""
_PILLOW = threading.Lock()
if hasattr(os, "register_at_fork"):  # a worker process that is forked from another thread must not find it locked
    os.register_at_fork(before=_PILLOW.acquire, after_in_parent=_PILLOW.release, after_in_child=_PILLOW.release)


class Decoder(Dataset[Item]):
    """Decodes images one at a time; the target of each is its index."""

    def __init__(
        self,
        folder: Path,
        files: np.ndarray,
        *,
        preprocessing: Preprocessing,
        max_pixels: int = IMAGE_PIXELS,
    ) -> None:
        self.folder, self.files, self.preprocessing = folder, files, preprocessing
        self.max_pixels = max_pixels

    def __getitem__(self, place: Place) -> Item:
        index = place[0]
        path, draws = self.path(index), self.draws(place)
        size = self.preprocessing.height_width
        try:
            with open_image(path, self.max_pixels) as file:
                image = rgb(file)
            if draws is None:
                pixels = preprocessed(image, self.preprocessing)
            else:
                pixels = random_crop(image, size, draws, interpolation=self.preprocessing.interpolation)
        except Exception as error:  # a damaged file can make its decoder fail in any way
            return None, index, str(path), f"{path} is not a readable image ({type(error).__name__}: {error})"
        return pixels, index, str(path), ""

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(bytes(self.files[index]))

    def draws(self, place: Place) -> list[float] | None:
        index, seed = place
        if seed is None:
            return None
        return uniform(seed, torch.tensor([index]), 4 * _TRIES + 1)[0].tolist()


@contextmanager
def open_image(source: Path | IO[bytes], max_pixels: int = IMAGE_PIXELS) -> Iterator[Image.Image]:
    """Yield an image of which only the header was read; `max_pixels` replaces Pillow's limit."""
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise OSError("it is a pipe, a device or a folder, and only regular files are read")
    with _PILLOW:  # Pillow's limit is a global variable
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            Image.preinit()
            file = Image.open(source, formats=_FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    with file:
        if file.width * file.height > max_pixels:
            raise ValueError(
                f"it has {file.width:,} x {file.height:,} pixels, and at most {max_pixels:,} are decoded "
                "(data.max_pixels in a recipe)"
            )
        yield file


def read_image(
    source: Path | IO[bytes],
    *,
    name: str = "",
    max_pixels: int = IMAGE_PIXELS,
    convert: Callable[[Image.Image], Image.Image] | None = None,
) -> Image.Image:
    """Decode an image file.

    `name` is for messages, "" = the path; `convert` makes the image, None = `rgb`.
    """
    with (
        any_failure(lambda error: DataError(f"{name or source} is not a readable image ({described(error)})")),
        open_image(source, max_pixels) as file,
    ):
        return (convert or rgb)(file)


def pixels_of(image: Image.Image) -> Tensor:
    """(channels, height, width) uint8, contiguous."""
    return torch.from_numpy(np.array(image)).movedim(-1, 0).contiguous()


def rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, upright by EXIF; 16-bit values are scaled, not clipped."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError("its pixels have 32 bits and no fixed range; store it with 8 or 16 bits a channel")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def preprocessed(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """An image as evaluation takes it, (3, height, width) uint8.

    It is the centre, resized to cover the size over the crop ratio, or all of the image.
    """
    longest = longest_side(image.width, image.height, preprocessing.height_width)
    if preprocessing.resize == "crop" and max(image.size) > longest:
        height, width = min(image.height, longest), min(image.width, longest)
        image = _part(image, middle(image.height, height), middle(image.width, width), height, width)
    return _transforms().pil_to_tensor(resized(image, preprocessing))


def _whole(image: Any, size: tuple[int, int], *, padded: bool, interpolation: str) -> Any:
    transforms, method = _transforms(), _METHODS[interpolation]
    if not padded:
        return transforms.resize(image, list(size), interpolation=method, antialias=True)
    height, width = transforms.get_size(image)
    scale = min(size[0] / height, size[1] / width)
    sides = [max(1, min(side, round(old * scale))) for side, old in zip(size, (height, width), strict=True)]
    image = transforms.resize(image, sides, interpolation=method, antialias=True)
    left, top = middle(size[1], sides[1]), middle(size[0], sides[0])
    return transforms.pad(image, [left, top, size[1] - sides[1] - left, size[0] - sides[0] - top])


def resized(image: T, preprocessing: Preprocessing) -> T:
    p, transforms = preprocessing, _transforms()
    if p.resize != "crop":
        return _whole(image, p.height_width, padded=p.resize == "pad", interpolation=p.interpolation)
    height, width = transforms.get_size(image)
    sides = covering(height, width, p.height_width, p.crop_ratio)
    covers = transforms.resize(image, sides, interpolation=_METHODS[p.interpolation], antialias=True)
    return transforms.center_crop(covers, list(p.height_width))


def longest_side(width: int, height: int, size: tuple[int, int]) -> int:
    return math.ceil(_LONGEST_STRIP * min(width, height) * max(size) / min(size))


def covering(height: int, width: int, size: tuple[int, int], crop_ratio: float) -> list[int]:
    """The size, for torchvision's `resize`, at which an image covers `size` / crop_ratio."""
    if size[0] == size[1]:
        return [round(size[0] / crop_ratio)]
    scale = max(size[0] / height, size[1] / width) / crop_ratio
    return [max(size[0], round(height * scale)), max(size[1], round(width * scale))]


def random_crop(
    image: Image.Image, size: tuple[int, int], draws: list[float], *, interpolation: str = "bilinear"
) -> Tensor:
    """A random part of an RGB image as (3, height, width) uint8, mirrored half of the time.

    `draws`: 41 numbers of [0, 1): 4 for each of ten attempts, and the mirror.
    """
    top, left, height, width = random_box(image.width, image.height, draws[:-1])
    transforms = _transforms()
    part, method = _part(image, top, left, height, width), _METHODS[interpolation]
    part = transforms.resize(part, list(size), interpolation=method, antialias=True)
    return transforms.pil_to_tensor(transforms.horizontal_flip(part) if draws[-1] < 0.5 else part)


def middle(outer: int, inner: int) -> int:
    return round((outer - inner) / 2.0)


def _part(image: Image.Image, top: int, left: int, height: int, width: int) -> Image.Image:
    """A part, without the pixel limit of `Image.crop`."""
    part = Image.new(image.mode, (width, height))
    part.paste(image, (-left, -top))
    return part


def random_box(width: int, height: int, draws: list[float]) -> tuple[int, int, int, int]:
    """(top, left, height, width): 8 to 100 % of the area, 3:4 to 4:3 (Szegedy et al., arXiv 1409.4842, section 6).

    After ten misfits the largest centred part of an allowed shape.
    """
    for area, ratio, vertical, horizontal in zip(*(iter(draws),) * 4, strict=True):
        pixels = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        shape = math.exp((2 * ratio - 1) * _LOG_RATIO)
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(vertical * (height - h + 1)), int(horizontal * (width - w + 1)), h, w
    limit = math.exp(_LOG_RATIO)
    w, h = min(width, max(1, round(height * limit))), min(height, max(1, round(width * limit)))
    return (height - h) // 2, (width - w) // 2, h, w


def prepare() -> None:
    _transforms()


@functools.cache
def _transforms() -> ModuleType:
    from torchvision.transforms.v2 import functional  # lazy: it takes seconds, and other data sets do not need it

    return functional


_BACKEND_HARDWARE, _HW_DECODE_NO_PIPELINE, _OUTPUT_RGB, _MAX_COMPONENT = 3, 1, 3, 4
_SUPPORTED = 0
_ALIGNMENT = 512  # of an image's first byte, as torch aligns its tensors


class _Image(ctypes.Structure):
    """nvjpegImage_t: the planes of a decoded image."""

    _fields_ = (("channel", ctypes.c_void_p * _MAX_COMPONENT), ("pitch", ctypes.c_size_t * _MAX_COMPONENT))


class NvJpeg:
    """The decoders of one GPU."""

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
        return self._replace(files=self.files.pin_memory())


class Reader(Dataset[FileItem]):
    """The files of a split, read one at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

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
    read = [item for item in items if item.decoded is None or item.decoded[0] is not None]
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
    size, indices = decoder.preprocessing.height_width, packed.indices
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
    """(bytes,) uint8 on the CPU to (3, H, W) uint8 on `device`."""
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
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(file, "JPEG")
    try:
        decode_jpegs([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except RuntimeError as error:
        raise DataError(
            f"data.decode is gpu, and torchvision cannot decode JPEG files on {device} ({str(error).splitlines()[0]}): "
            "install a torchvision that was built with CUDA, or set data.decode: cpu"
        ) from error
