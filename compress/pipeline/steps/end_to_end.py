"""Times from images to classes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from compress.data.base import Split
from compress.data.folder import FolderSplit
from compress.data.memory import MemorySplit
from compress.engines import Engine
from compress.errors import DataError, EngineError, EngineUnavailableError
from compress.files import read_regular
from compress.measure import BenchSpec
from compress.measure.end_to_end import EndToEnd, Source, measure_end_to_end
from compress.pipeline.run import Run
from compress.pipeline.saved import finished_run, networks_of
from compress.records.files import END_TO_END, Breakdown
from compress.support.limits import IMAGE_PIXELS
from compress.support.progress import NoProgress, Progress

_QUIET = NoProgress()
_ENDINGS = frozenset({".jpg", ".jpeg", ".png"})


def bench_end_to_end(
    files: Sequence[Path],
    spec: BenchSpec,
    *,
    images: Path | None = None,
    split: Split | None = None,
    device: str = "cpu",
    progress: Progress = _QUIET,
) -> Breakdown:
    """Time files on engines at each batch size.

    `files` are ONNX files, or one run folder; `images` a folder searched to any depth; None = a run's evaluation
    images, `split` if loaded. `device` resizes and normalizes.
    """
    networks = networks_of(files)
    most = max(spec.batch_sizes, default=1)
    pictures, max_pixels = _pictures_of(files[0], images, split, most)
    results: list[EndToEnd] = []
    unavailable: dict[str, str] = {}
    for batch_size in spec.batch_sizes:
        with ExitStack() as stack:
            engines: dict[str, Engine] = {}
            for variant, files_of in networks.items():
                for name in spec.engines:
                    try:
                        built = files_of.engine(name, batch_size=batch_size, threads=spec.threads)
                    except EngineUnavailableError as error:
                        unavailable[name] = str(error)
                        continue
                    stack.enter_context(built)
                    engines[f"{variant}: {built.info.label}"] = built
            if not engines:
                raise EngineError("none of the engines can run here: " + "; ".join(unavailable.values()))
            results += measure_end_to_end(
                engines,
                pictures,
                batch_size=batch_size,
                device=device,
                max_pixels=max_pixels,
                warmup=spec.warmup,
                runs=spec.runs,
                seconds=spec.seconds,
                progress=progress,
            )
    return Breakdown(results=tuple(results), unavailable=unavailable)


def end_to_end_step(run: Run) -> None:
    spec = run.recipe.bench
    if not spec.end_to_end or run.folder.done("end_to_end"):
        return
    try:
        found = bench_end_to_end([run.folder.path], spec, split=run.data.val, progress=run.progress)
    except (DataError, EngineError) as error:
        run.notes.append(f"end to end: not measured: {error}")
    else:
        END_TO_END.write(run.folder.path, found)
    run.finish("end_to_end")


def _pictures_of(file: Path, images: Path | None, split: Split | None, count: int) -> tuple[list[Source], int]:
    if images is not None:
        return _pictures(images, count), IMAGE_PIXELS
    split = _evaluation_split(file) if split is None else split
    return _evaluation_images(split, count), getattr(split, "max_pixels", IMAGE_PIXELS)


def _pictures(images: Path, count: int) -> list[Source]:
    if not images.is_dir():
        raise DataError(f"there is no folder {images}; --images names one with JPEG or PNG files")
    named = (path for path in images.rglob("*") if path.suffix.lower() in _ENDINGS and not path.is_dir())
    found = sorted(named)[:count]
    if not found:
        raise DataError(f"{images} holds no JPEG or PNG files ({', '.join(sorted(_ENDINGS))})")
    return _contents(found)


def _contents(files: Sequence[Path]) -> list[Source]:
    try:
        return [read_regular(path) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read as an image: {error.strerror}") from None


def _evaluation_split(run: Path) -> Split:
    if not run.is_dir():
        raise DataError("an ONNX file holds no images: name a folder with JPEG or PNG files with --images")
    return finished_run(run).data.val


def _evaluation_images(split: Split, count: int) -> list[Source]:
    if isinstance(split, FolderSplit):
        return _contents(split.files[:count])
    if isinstance(split, MemorySplit):
        rows = split.images[:count].permute(0, 2, 3, 1).numpy()
        return [np.repeat(row, 3, axis=2) if row.shape[2] == 1 else row.copy() for row in rows]
    images, _ = split.load(list(range(min(count, len(split)))), epoch=None, device=torch.device("cpu"))
    return list(split.preprocessing.pixels(images).permute(0, 2, 3, 1).contiguous().numpy())
