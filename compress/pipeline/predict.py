"""A finished run's file in use: predictions on an engine, and the repository of a model server."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from compress.data.base import Preprocessing
from compress.data.decode import pixels_of, preprocessed, read_image
from compress.data.files import readable
from compress.data.folder import pictures_in
from compress.engines.base import Engine, TensorInfo, read_onnx
from compress.engines.registry import suits
from compress.errors import DataError, RunError, near_misses
from compress.export.names import PREPROCESSING_KEY
from compress.files import replacing, write_text
from compress.pipeline.run import recipe_of
from compress.pipeline.saved import chosen_variant, networks_of, run_without_data
from compress.support.limits import IMAGE_PIXELS
from compress.tasks.base import Task
from compress.variants import Variant

SERVERS = {"triton": ("onnxruntime", "openvino", "tensorrt"), "openvino": ("openvino",)}
# Lets ONNX Runtime's backend give a file to TensorRT.
_TENSORRT = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }\n'
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int64": "TYPE_INT64", "int32": "TYPE_INT32"}


def write_bundle(
    folder: Path, server: str, out: Path, *, variant: str = "", name: str = "", max_batch_size: int = 32
) -> list[Path]:
    """Write `<out>/<name>/1/model.onnx`, and for Triton `<out>/<name>/config.pbtxt`.

    `server` is `triton` or `openvino`; `variant` "" = the best; `name` "" = the run folder's; Triton joins batches up
    to `max_batch_size`.
    """
    if server not in SERVERS:
        raise RunError(f"there is no server {server!r}{near_misses(server, SERVERS)} (one of: {', '.join(SERVERS)})")
    chosen = chosen_variant(folder, variant)
    engine = _engine_of(folder, chosen, server)
    file = networks_of([folder])[str(chosen)].of(engine)
    model = out / (name or folder.resolve().name)
    if model.exists():
        raise RunError(f"{model} is there already; name another model with --name, or remove it")
    with replacing(model / "1" / "model.onnx") as path:
        shutil.copyfile(file, path)
    interface = read_onnx(file)
    weights = [(place, model / "1" / place.name) for place in interface.weight_files]
    written = [model / "1" / "model.onnx", *(Path(shutil.copyfile(*pair)) for pair in weights)]
    if server == "triton":
        text = config_text(interface.inputs, interface.outputs, engine, max_batch_size=max_batch_size)
        written.append(write_text(model / "config.pbtxt", text))
    return written


def _engine_of(folder: Path, variant: Variant, server: str) -> str:
    engines, quantization = SERVERS[server], recipe_of(folder).quantization
    if not variant.is_quantized or quantization is None:
        return engines[0]
    found = [engine for target in quantization.targets for engine in engines if suits(engine, [target])]
    if not found:
        raise RunError(
            f"the INT8 files of {folder} are for {', '.join(quantization.targets)}, and {server} runs files in "
            f"{' or '.join(engines)}: add one to quantization.target and run `export` again, or give --variant float"
        )
    return found[0]


def config_text(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], engine: str = "onnxruntime", *, max_batch_size: int
) -> str:
    """Triton's configuration; batches are joined where the file leaves the size open."""
    batched = all(tensor.shape and tensor.shape[0] == -1 for tensor in (*inputs, *outputs))

    def rows(kind: str, tensors: Sequence[TensorInfo]) -> str:
        parts = []
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.shape[1:] if batched else tensor.shape))
            kind_of = _TYPES.get(tensor.dtype, f"TYPE_{tensor.dtype.upper()}")
            parts.append(
                f"  {{ name: {json.dumps(tensor.name, ensure_ascii=False)}, data_type: {kind_of}, dims: [{dims}] }}"
            )
        return f"{kind} [\n" + ",\n".join(parts) + "\n]\n"

    backend = "openvino" if engine == "openvino" else "onnxruntime"
    head = f'backend: "{backend}"\nmax_batch_size: {max_batch_size if batched else 0}\n'
    head += _TENSORRT if engine == "tensorrt" else ""
    return head + rows("input", inputs) + rows("output", outputs) + ("dynamic_batching { }\n" if batched else "")


TOP = 5
LEAST_SCORE = 0.4  # boxes of a lower score are left out


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One image and its prediction.

    Attributes:
        classes: (name, share): five likeliest with probabilities, or shares of pixels.
        boxes: class, score, edges in pixels of the input.
        drawn: file of the image with masks or boxes, or of the restored image.
    """

    image: str
    classes: tuple[tuple[str, float], ...] = ()
    boxes: tuple[tuple[str, float, tuple[float, ...]], ...] = ()
    drawn: str | None = field(default=None)
    restored: bool = False


def predict(
    folder: Path,
    images: Sequence[Path],
    *,
    engine: str = "openvino",
    variant: str = "",
    out: Path | None = None,
) -> list[Prediction]:
    """Run a finished run's file on images; its data need not be here.

    `images` are files, or folders searched to any depth; a warning names those that cannot be read. `variant` "" = the
    best. `out` is the folder of what is drawn or restored; None = `predictions` in the run folder.
    """
    run = run_without_data(folder)
    if run.recipe.task == "own":
        raise RunError(
            f"{folder} is a run of the task own, and predict shows classes, masks and boxes alone: load its ONNX file "
            "with compress.build_engine, and show the outputs as they are meant"
        )
    files = networks_of([folder])[chosen_variant(folder, variant)]
    names = _names(images, folder / "predictions" if out is None else out)
    if run.task.draw is not None:
        _check_apart(names)
    with files.engine(engine, batch_size=1) as built:
        preprocessing = Preprocessing.from_json(built.metadata[PREPROCESSING_KEY])
        whole, most = run.task.name == "restoration", run.recipe.data.max_pixels
        answer = partial(_answer, run.task, built, preprocessing)

        def read(path: Path) -> Tensor:
            if whole:
                return pixels_of(read_image(path, max_pixels=most))
            return read_picture(path, preprocessing, cropped=run.task.name == "classification", max_pixels=most)

        found = []
        for path, pixels in readable(list(names), read):
            seen = by_tiles(pixels, preprocessing.height_width, answer) if whole else answer(pixels)
            found.append(_prediction(run.task, run.data.val.labels, path, pixels, seen, names[path]))
    return found


def _answer(task: Task, engine: Engine, preprocessing: Preprocessing, pixels: Tensor) -> Any:
    """The selected outputs of one image (channels, H, W) uint8."""
    inputs = preprocessing.normalize(pixels[None].float().div(255)).numpy()
    outputs = engine.run({engine.inputs[0].name: inputs})
    tensors = {name: torch.from_numpy(array) for name, array in outputs.items()}
    return task.select(next(iter(tensors.values())) if len(tensors) == 1 else tensors)


_BORDER = 8  # most pixels of a part's inner edges that are left to its neighbour, as a network sees less context there


def by_tiles(pixels: Tensor, size: tuple[int, int], restored: Callable[[Tensor], Tensor]) -> Tensor:
    """An image of any size, restored in parts of `size` that overlap, (1, channels, k H, k W).

    Args:
        pixels: (channels, H, W); a side shorter than that of a part is mirrored.
        size: height and width of a part.
        restored: from a part to (1, channels, k height, k width).
    """
    lacking = [(0, max(0, side - given)) for side, given in zip(size, pixels.shape[1:], strict=True)]
    whole = torch.from_numpy(np.pad(pixels.numpy(), [(0, 0), *lacking], "symmetric"))
    rows, columns = (_covers(length, side) for length, side in zip(whole.shape[1:], size, strict=True))
    result: Tensor | None = None
    for (top, y), (left, x) in itertools.product(rows, columns):
        part = restored(whole[:, top : top + size[0], left : left + size[1]])
        scale = part.shape[-1] // size[1]
        if result is None:
            result = part.new_empty(1, part.shape[1], *(scale * side for side in whole.shape[1:]))
        below = slice(scale * (top + y), scale * (top + size[0]))
        beside = slice(scale * (left + x), scale * (left + size[1]))
        result[:, :, below, beside] = part[:, :, scale * y :, scale * x :]
    assert result is not None
    return result[:, :, : scale * pixels.shape[1], : scale * pixels.shape[2]]


def _covers(length: int, side: int) -> list[tuple[int, int]]:
    """Where parts of `side` begin that cover `length`, and how many of their first pixels are left to those before."""
    border = min(_BORDER, side // 4)
    last = length - side
    starts = [*range(0, last, side - 2 * border), last]
    return [(start, border if start else 0) for start in starts]


def _names(images: Sequence[Path], out: Path) -> dict[Path, Path]:
    names: dict[Path, Path] = {}
    taken: set[Path] = set()
    for given in images:
        found = [given]
        if given.is_dir():  # without what was drawn into a folder in it
            found = [path for path in pictures_in(given) if given == out or out not in path.parents]
        for path in found:
            place = out / (path.relative_to(given).parent if given.is_dir() else "")
            choices = (place / f"{path.stem}{f'-{i}' if i > 1 else ''}.png" for i in itertools.count(1))
            if path not in names:
                names[path] = next(choice for choice in choices if choice not in taken)
                taken.add(names[path])
    return names


def _check_apart(names: dict[Path, Path]) -> None:
    pictures = {path.resolve() for path in names}
    for drawn in names.values():
        if drawn.resolve() in pictures:
            raise DataError(f"{drawn} is one of the images, and what is drawn would replace it: name another --out")


def read_picture(
    path: Path, preprocessing: Preprocessing, *, cropped: bool = True, max_pixels: int = IMAGE_PIXELS
) -> Tensor:
    """Read an image as evaluation does, (channels, height, width) uint8; squashed if not `cropped`."""
    image = read_image(path, max_pixels=max_pixels)
    return preprocessed(image, preprocessing if cropped else replace(preprocessing, resize="squash"))


def _prediction(task: Task, labels: Sequence[str], path: Path, pixels: Tensor, seen: Any, name: Path) -> Prediction:
    if task.name == "classification":
        shares, places = seen[0].float().softmax(0).topk(min(TOP, len(seen[0])))
        named = [(labels[place], share) for share, place in zip(shares.tolist(), places.tolist(), strict=True)]
        return Prediction(image=str(path), classes=tuple(named))
    drawn = _draw(task, pixels, seen, name)
    if task.name == "restoration":
        return Prediction(image=str(path), drawn=drawn, restored=True)
    if task.name == "segmentation":
        counts = seen[0].argmax(0).flatten().bincount(minlength=len(labels)) / seen[0, 0].numel()
        rows = sorted(zip(labels, counts.tolist(), strict=True), key=lambda row: -row[1])
        return Prediction(image=str(path), classes=tuple(row for row in rows if row[1] > 0), drawn=drawn)
    (rows_of_image,) = task.metric.make().decode(seen)  # type: ignore[attr-defined]
    boxes = [
        (labels[int(label)], float(score), tuple(box.tolist()))
        for box, score, label in zip(*(rows_of_image[k] for k in ("boxes", "scores", "labels")), strict=True)
        if score >= LEAST_SCORE
    ]
    return Prediction(image=str(path), boxes=tuple(boxes), drawn=drawn)


def _draw(task: Task, pixels: Tensor, seen: Any, name: Path) -> str | None:
    if task.draw is None:
        return None
    picture = task.draw(pixels[None], seen, None)[0].movedim(0, -1).contiguous().numpy()
    with replacing(name) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG")
    return str(name)
