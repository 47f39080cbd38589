"""Times a run from images to classes: decoding, preprocessing, the engine and postprocessing."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from compress.data.base import Preprocessing
from compress.data.decode import (
    centre_window,
    decode_jpegs,
    open_image,
    preprocessed,
    read_image,
    refusal,
    resize_tensor,
)
from compress.engines.base import Engine, TensorInfo
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY
from compress.kernels.resample import resample
from compress.measure.latency import check_numbers, watched_turns
from compress.support.limits import IMAGE_PIXELS
from compress.support.progress import NoProgress, Progress

Stage = Literal["decode", "preprocess", "engine", "postprocess"]
STAGES: tuple[Stage, ...] = ("decode", "preprocess", "engine", "postprocess")
TOP = 5
_QUIET = NoProgress()

# Content of a JPEG or PNG file, or pixels (H, W, 3) that need no decoding.
Source = bytes | NDArray[np.uint8]
# An image as a run takes it: a file for Pillow, pixels, or a file (bytes,) uint8 for a GPU.
Ready = bytes | Image.Image | Tensor


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """Time of one run of one variant, from images to classes.

    Attributes:
        device: that resizes and normalizes pixels.
        stage_ms: median of each stage over all runs, in order; without `decode` if no image is encoded.
        p50_ms: median of whole runs; may differ from `total_ms`.
    """

    label: str
    batch_size: int
    device: str
    stage_ms: Mapping[Stage, float]
    p50_ms: float
    runs: int
    method: str

    @property
    def total_ms(self) -> float:
        return sum(self.stage_ms.values())

    def share(self, stage: Stage) -> float:
        return self.stage_ms.get(stage, 0.0) / self.total_ms if self.total_ms else 0.0


def measure_end_to_end(
    engines: Mapping[str, Engine],
    images: Sequence[Source],
    *,
    batch_size: int = 1,
    preprocessing: Preprocessing | None = None,
    device: str = "cpu",
    max_pixels: int = IMAGE_PIXELS,
    warmup: int = 2,
    runs: int = 50,
    seconds: float = 3.0,
    progress: Progress = _QUIET,
) -> tuple[EndToEnd, ...]:
    """Time engines with decoding, preprocessing and postprocessing, in turn, on the same images.

    - `engines`: by label; each takes one input, (N, 3, S, S), and its first output is logits (N, classes).
    - `images`: all encoded, or none; the first `batch_size` are used, and repeated if there are fewer.
    - `preprocessing`: None = that of each engine's own file.
    - `device`: that resizes and normalizes pixels, `cpu` or a GPU such as `cuda`, which decodes JPEG files too.
    - `max_pixels`: of the largest image that is decoded.
    - `seconds`: time for each, at most, on average; the first round is always finished.
    """
    check_numbers("measure_end_to_end", batch_size=batch_size, warmup=warmup, runs=runs, seconds=seconds)
    _check(engines, images, device, max_pixels)
    encoded = isinstance(images[0], bytes)
    chosen = [images[i % len(images)] for i in range(batch_size)]
    where = torch.device(device)
    batch = ready([p if isinstance(p, bytes) else Image.fromarray(p) for p in chosen], where)
    by_gpu = any(isinstance(image, Tensor) for image in batch)
    timed = {
        label: partial(_stamps, engine, batch, _prepared(engine, label, batch_size, preprocessing), where, max_pixels)
        for label, engine in engines.items()
    }
    for run in timed.values():
        for _ in range(warmup):
            run()
    turns, disturbed = watched_turns(timed, runs=runs, seconds=seconds * len(engines), progress=progress)
    shown = STAGES if encoded else STAGES[1:]
    results = (
        _result(label, [run for turn in turns[label] for run in turn], batch_size, device, shown, len(engines), by_gpu)
        for label in engines
    )
    warning = f"; {disturbed}: these times are not to be compared" if disturbed else ""
    return tuple(replace(result, method=result.method + warning) for result in results)


def _check(engines: Mapping[str, Engine], images: Sequence[Source], device: str, max_pixels: int) -> None:
    if not engines:
        raise EngineError("measure_end_to_end: there is no engine to measure")
    if device != "cpu" and not (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise EngineError(f"measure_end_to_end: device is {device!r}, and torch sees no such GPU here; give 'cpu'")
    if not images:
        raise DataError("measure_end_to_end: there are no images; give JPEG or PNG files, or arrays of pixels")
    if len({isinstance(image, bytes) for image in images}) > 1:
        raise DataError("measure_end_to_end: some images are encoded and some are pixels; give one kind")
    for index, image in enumerate(images):
        if isinstance(image, bytes):
            decode([image], first=index, max_pixels=max_pixels)
        elif image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DataError(f"image {index} is {image.dtype} of shape {image.shape}; allowed are uint8 of (H, W, 3)")


def _prepared(
    engine: Engine, label: str, batch_size: int, given: Preprocessing | None
) -> tuple[Preprocessing, TensorInfo]:
    if len(engine.inputs) != 1:
        raise EngineError(f"{label} takes {len(engine.inputs)} inputs; images are made for one")
    text = engine.metadata.get(PREPROCESSING_KEY)
    if given is None and text is None:
        raise EngineError(
            f"{label}: its file does not say how its input is made (no {PREPROCESSING_KEY} in its metadata); export it "
            "with compress, or give preprocessing="
        )
    preprocessing = given if given is not None else Preprocessing.from_json(str(text))
    tensor = engine.inputs[0]
    wanted = (batch_size, *preprocessing.input_shape)
    fits = len(tensor.shape) == 4 and all(a in (-1, b) for a, b in zip(tensor.shape, wanted, strict=True))
    if not fits or not tensor.dtype.startswith("float"):
        raise EngineError(f"{label} takes {tensor.dtype} of {tensor.shape}, and preprocessing makes floats of {wanted}")
    return preprocessing, tensor


def _stamps(
    engine: Engine,
    batch: Sequence[Ready],
    prepared: tuple[Preprocessing, TensorInfo],
    device: torch.device,
    max_pixels: int,
) -> tuple[int, ...]:
    preprocessing, tensor = prepared
    begin = time.perf_counter_ns()
    images = decoded_images(batch, device, max_pixels)
    decoded = time.perf_counter_ns()
    answer = _engine_call(engine, tensor, images, preprocessing, device)
    ready = time.perf_counter_ns()
    logits = answer()
    answered = time.perf_counter_ns()
    top = classes(logits)
    end = time.perf_counter_ns()
    del top
    return decoded - begin, ready - decoded, answered - ready, end - answered


def ready(images: Sequence[bytes | Image.Image], device: torch.device) -> list[Ready]:
    """Images as a run takes them: files that a GPU decodes as tensors (bytes,) uint8, others as they are."""
    if device.type == "cpu":
        return list(images)
    found = [for_decoder(image) if isinstance(image, bytes) else image for image in images]
    try:
        decode_jpegs([image for image in found if isinstance(image, Tensor)], device)
    except RuntimeError:  # a torchvision without nvJPEG, or a file that it fails on
        return list(images)
    return found


def for_decoder(image: bytes) -> bytes | Tensor:
    """A file as a tensor (bytes,) uint8, if nvJPEG reads it as Pillow does; else as it is."""
    content = np.frombuffer(image, dtype=np.uint8)
    with open_image(io.BytesIO(image)) as header:
        return image if refusal(header, content) else torch.from_numpy(content.copy())


def decoded_images(batch: Sequence[Ready], device: torch.device, max_pixels: int) -> list[Image.Image | Tensor]:
    """RGB images: Pillow's, or tensors (3, H, W) uint8 on `device`."""
    files = [image for image in batch if isinstance(image, Tensor)]
    by_device = iter(decode_jpegs(files, device) if files else ())
    images = [
        next(by_device)
        if isinstance(image, Tensor)
        else decode([image], max_pixels=max_pixels)[0]
        if isinstance(image, bytes)
        else image
        for image in batch
    ]
    if files and device.type != "cpu":
        torch.cuda.synchronize(device)
    return images


def _engine_call(
    engine: Engine,
    tensor: TensorInfo,
    images: Sequence[Image.Image | Tensor],
    preprocessing: Preprocessing,
    device: torch.device,
) -> Callable[[], NDArray[np.generic]]:
    """Preprocess; return a function that runs the engine and returns its logits on the host."""
    pixels = preprocess(images, preprocessing, device).to(getattr(torch, tensor.dtype)).contiguous()
    name = engine.outputs[0].name
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        if engine.takes_tensors:
            return lambda: engine.run_tensors({tensor.name: pixels})[name].cpu().numpy()
    array = pixels.cpu().numpy()
    return lambda: engine.run({tensor.name: array})[name]


def decode(images: Sequence[bytes], *, first: int = 0, max_pixels: int = IMAGE_PIXELS) -> list[Image.Image]:
    return [
        read_image(io.BytesIO(content), name=f"image {index}", max_pixels=max_pixels)
        for index, content in enumerate(images, start=first)
    ]


def preprocess(
    images: Sequence[Image.Image | Tensor], preprocessing: Preprocessing, device: torch.device | str
) -> Tensor:
    """(N, 3, height, width) float32 on `device`; Pillow resizes on the CPU, torchvision elsewhere."""
    device = torch.device(device)
    tensors = [image for image in images if isinstance(image, Tensor)]
    if len(tensors) == len(images) and (preprocessing.interpolation, preprocessing.resize) == ("bilinear", "crop"):
        size, ratio = preprocessing.height_width, preprocessing.crop_ratio
        windows = [centre_window(image.shape[2], image.shape[1], size, ratio) for image in tensors]
        return preprocessing.normalize(resample(tensors, windows, size).float().div_(255))
    squares = [
        preprocessed(image, preprocessing)
        if device.type == "cpu" and isinstance(image, Image.Image)
        else resize_tensor(_on(device, image), preprocessing)
        for image in images
    ]
    return preprocessing.normalize(torch.stack(squares).float().div_(255))


def _on(device: torch.device, image: Image.Image | Tensor) -> Tensor:
    return image if isinstance(image, Tensor) else F.pil_to_tensor(image).to(device)


def classes(logits: NDArray[np.generic], top: int = TOP) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and softmax probabilities, both (N, top), of the most probable classes of (N, classes) logits."""
    values = np.asarray(logits, dtype=np.float32)
    exponents = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities = exponents / exponents.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    return best.astype(np.int64), np.take_along_axis(probabilities, best, axis=1)


def _result(
    label: str,
    runs: list[tuple[int, ...]],
    batch_size: int,
    device: str,
    shown: Sequence[Stage],
    among: int,
    by_gpu: bool,
) -> EndToEnd:
    times = np.asarray(runs, dtype=np.float64) / 1e6
    medians = dict(zip(STAGES, np.median(times, axis=0), strict=True))
    kept = [STAGES.index(stage) for stage in shown]
    source = "from JPEG or PNG bytes in memory" if "decode" in shown else "from pixels in memory"
    decoded = "decoded together by the GPU, " if by_gpu else "one after another, "
    place = "by Pillow on the CPU" if device == "cpu" else f"by torch on {device}"
    return EndToEnd(
        label=label,
        batch_size=batch_size,
        device=device,
        stage_ms={stage: float(medians[stage]) for stage in shown},
        p50_ms=float(np.median(times[:, kept].sum(axis=1))),
        runs=len(runs),
        method=(
            f"medians of {len(runs)} runs, {among} variants in turn, the same images in each; {source} "
            f"to softmax and top {TOP}; images {decoded}resized and normalized {place}"
        ),
    )
