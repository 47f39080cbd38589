"""Networks of finished runs, and weights in files: loaded, exported, or measured again, also from images to classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compress.data import DataSpec
from compress.data.base import Batch, DataSet, Preprocessing, Split
from compress.data.decode import read_image
from compress.data.files import readable
from compress.data.folder import FolderSplit
from compress.data.load import class_count, load_data
from compress.data.memory import MemorySplit
from compress.engines import Engine
from compress.engines.base import read_onnx
from compress.errors import (
    CheckpointError,
    DataError,
    EngineError,
    EngineUnavailableError,
    RunError,
    first_few,
    near_misses,
)
from compress.export.names import PREPROCESSING_KEY, RECIPE_KEY, VARIANT_KEY
from compress.export.onnx import export_onnx
from compress.files import expand_user, read_regular
from compress.graph.trace import check_module
from compress.measure import BenchSpec
from compress.measure.latency import EndToEnd, Source, measure_end_to_end
from compress.measure.metric import Metric
from compress.pipeline.run import NetworkFiles, Run, read_state, read_state_file, recipe_from_anywhere, recipe_of, stem
from compress.pipeline.steps.evaluate import TIMINGS, bench, keep_slower, slower
from compress.pipeline.steps.networks import build_float, float_step, ptq_step, qat_step, sparse_step
from compress.quantization import TARGETS, Target
from compress.quantization.placement.decisions import Placement
from compress.records.files import END_TO_END, METRICS, Breakdown
from compress.records.summary import best_variant, family
from compress.support.limits import IMAGE_PIXELS
from compress.support.progress import NoProgress, Progress
from compress.training.checkpoint import load_model, read_tensors, save_model
from compress.variants import Variant


def variants_in(folder: Path) -> list[Variant]:
    return [variant for variant in Variant if (folder / variant.weights_file).is_file()]


def export_again(
    folder: Path,
    *,
    variant: str = "",
    target: Target | None = None,
    out: Path | None = None,
    precision: str = "fp32",
    opset: int = 19,
    dynamic_batch: bool = True,
) -> Path:
    """Write a network of a run as ONNX.

    `variant` "" = the best, `target` None = the first, `out` None = `<folder>/<variant>-<precision>.onnx`. `precision`
    is of all that is not quantized, `opset` 19 or later.
    """
    chosen = chosen_variant(folder, variant)
    run = finished_run(folder)
    model = network(run, chosen, target)
    name = stem(*run.key(chosen, target))
    return export_onnx(
        model,
        run.example,
        out or folder / f"{name}-{precision}.onnx",
        precision=precision,
        dynamic_batch=dynamic_batch,
        opset=opset,
        preprocessing=run.data.val.preprocessing,
        labels=run.data.val.labels,
        metadata={RECIPE_KEY: recipe_of(folder).digest(), VARIANT_KEY: chosen},
    )


def chosen_variant(folder: Path, name: str = "") -> Variant:
    """The variant of that name; "" = the best by the run's figures, the last where it has none."""
    known = variants_in(folder)
    if not known:
        raise RunError(f"{folder} holds no weights of a run ({', '.join(list(Variant)[:3])}.safetensors)")
    best = None if name else best_variant(METRICS.read(folder) or ())
    chosen = Variant.named(name or (best[0] if best and best[0] in known else known[-1]))
    if chosen not in known:
        raise RunError(f"{folder} holds no {name!r}{near_misses(name, known)}; it holds {', '.join(known)}")
    return chosen


def finished_run(folder: Path) -> Run:
    """A run whose steps load their results; data are loaded anew."""
    recipe = recipe_from_anywhere(folder)
    data, state = load_data(recipe.data), read_state(folder)
    state.check_data(data.fingerprints())
    return Run(recipe=recipe, folder=state, data=data)


def network(run: Run, variant: Variant, target: Target | None = None) -> nn.Module:
    spec = run.recipe.quantization
    known = spec.targets if spec is not None else ()
    if target is not None and target not in known:
        raise RunError(f"the run is for {', '.join(known) or 'no target'}, not for {target!r}")
    float_model = float_step(run, build_float(run.recipe))
    base = sparse_step(run, float_model) if variant.is_sparse else float_model
    if variant.is_quantized:
        quantized = ptq_step(run, base, variant.trained_from or variant)
        if variant.trained_from:
            qat_step(run, float_model, quantized, variant)
    else:
        run.networks[variant, None] = base
    return run.networks[run.key(variant, target)]


def networks_of(files: Sequence[Path]) -> dict[str, NetworkFiles]:
    """Networks by variant of a run folder, or ONNX files by stem, by path where stems are equal."""
    if any(path.is_dir() for path in files):
        if len(files) > 1:
            raise RunError("bench takes one run folder or any number of ONNX files, not both")
        found = {str(v): _files_of(files[0], v) for v in Variant if (files[0] / v.onnx_file).is_file()}
        if not found:
            raise RunError(f"{files[0]} holds no ONNX files of a run yet; let it finish with --resume first")
        return found
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise RunError(f"there is no file {', '.join(missing)}; give ONNX files, or one run folder")
    stems = [path.stem for path in files]
    return {path.stem if stems.count(path.stem) == 1 else str(path): NetworkFiles(file=path) for path in files}


def _files_of(folder: Path, variant: Variant) -> NetworkFiles:
    paths = {target: folder / f"{stem(variant, target)}.onnx" for target in TARGETS}

    def in_torch(threads: int | None) -> Engine:
        run = finished_run(folder)
        network(run, variant)
        return run.in_torch(variant, threads=threads)

    return NetworkFiles(
        file=folder / variant.onnx_file,
        further={target: path for target, path in paths.items() if path.is_file()},
        in_torch=in_torch,
    )


def bench_again(
    files: Sequence[Path], spec: BenchSpec, *, sides: Sequence[int] = (), progress: Progress | None = None
) -> list[Metric]:
    folder = read_state(files[0]) if len(files) == 1 and files[0].is_dir() else None
    networks = networks_of(files)
    metrics = bench(networks, spec, sides=sides, progress=progress or NoProgress())

    def measured_again(old: Metric) -> bool:
        engine = family(old.engine) in spec.engines and old.batch_size in spec.batch_sizes
        return engine and old.variant in networks and old.name in TIMINGS

    if folder is not None:
        folder.add_metrics(metrics, without=measured_again)  # the times of a file that no longer loads are not its own
        recipe = recipe_of(folder.path)
        targets = () if recipe.quantization is None else recipe.quantization.targets
        keep_slower(folder.path, slower(networks, metrics, spec, targets, progress=progress), networks, spec)
    return metrics


_GREY, _MEASURED = (0.5, 0.5, 0.5), "measured"


def load(
    path: Path | str, *, variant: str = "", target: Target | None = None, into: nn.Module | None = None
) -> nn.Module:
    """Load a network of a finished run, or the weights that `save` wrote; a run's data need not be here.

    Args:
        path: a run folder, or a .safetensors file.
        variant: `float`, `ptq`, `qat`, ...; "" = the best by the run's figures, the last where it has none.
        target: one of the run's; None = the first.
        into: takes the weights of a file, in place.

    Returns:
        In evaluation mode on the CPU; a quantized one is a GraphModule with `.placement`.

    Raises:
        RunError: no such network.
        CheckpointError: the file is damaged, does not fit `into`, or `into` is missing.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> path = compress.save(qmodel, "qat.safetensors")
        >>> again = compress.load(path, into=compress.insert_quantizers(model, images[:1]))
        >>> torch.equal(again(images), qmodel(images))
        True
    """
    path = expand_user(path)
    if path.is_dir():
        if into is not None:
            raise RunError(f"{path} is a run folder, which rebuilds its network: leave `into` out")
        chosen = chosen_variant(path, variant)
        return network(run_without_data(path), chosen, target).cpu().eval()
    if into is None:
        raise CheckpointError(f"{path} is no run folder; weights in a file need the module that takes them: into=model")
    try:
        load_model(into, path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_measured_hint(path)}") from error
    return into.eval()


def save(model: nn.Module, path: Path | str) -> Path:
    """Write a module's weights and quantizer ranges as safetensors with a checksum; whole or not at all.

    Code is not saved: a quantized network is rebuilt by `insert_quantizers` with the same model and spec.

    Args:
        model: any module, on any device.
        path: file that ends in .safetensors.

    Raises:
        CheckpointError: another ending, a lazy module, or the file cannot be written.
        ModelError: no module, or on the meta device.

    Examples:
        >>> print(compress.save(model, "float.safetensors"))
        float.safetensors
    """
    path = expand_user(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} must end in .safetensors, which is the form that is written")
    check_module(model)
    placement = getattr(model, "placement", None)
    rules = placement.measured_rules if isinstance(placement, Placement) else ()
    return save_model(model, path, {_MEASURED: [rule.match for rule in rules]} if rules else None)


def _measured_hint(path: Path) -> str:
    layers = read_tensors(path, "model").data.get(_MEASURED) or []
    if not layers:
        return ""
    return (
        f". Calibration images decided about {len(layers)} layers in it ({first_few(layers)}): give their rules, "
        "qmodel.placement.measured_rules of the network that was saved, to insert_quantizers in spec.rules"
    )


def run_without_data(folder: Path) -> Run:
    """A finished run with black images for data, to rebuild its networks."""
    recipe, state = recipe_from_anywhere(folder), read_state_file(folder)
    kept = (state.data or {}).get("val", {}).get("labels")
    labels = tuple(kept) if kept else tuple(str(number) for number in range(class_count(recipe.data)))
    recipe = replace(recipe, model=replace(recipe.model, weights=None), data=replace(recipe.data, classes=labels))
    split = BlankSplit(labels=labels, preprocessing=preprocessing_of(folder, recipe.data))
    return Run(recipe=recipe, folder=read_state(folder), data=DataSet(train=split, val=split))


def preprocessing_of(folder: Path, spec: DataSpec) -> Preprocessing:
    path = folder / Variant.FLOAT.onnx_file
    text = read_onnx(path).metadata.get(PREPROCESSING_KEY) if path.is_file() else None
    return Preprocessing.of(spec, mean=_GREY, std=_GREY) if text is None else Preprocessing.from_json(text)


class BlankSplit(Split):
    """Two black images of the input's shape, to trace a network with."""

    def __init__(self, *, labels: tuple[str, ...], preprocessing: Preprocessing) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=0)

    def __len__(self) -> int:
        return 2

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        count = len(indices)
        images = torch.zeros(count, *self.preprocessing.input_shape, device=device)
        return images, torch.zeros(count, dtype=torch.int64, device=device)


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
    pictures, max_pixels = _pictures_of(files[0], images, split, max(spec.batch_sizes, default=1))
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
    found = sorted(named)
    if not found:
        raise DataError(f"{images} holds no JPEG or PNG files ({', '.join(sorted(_ENDINGS))})")
    return [content for _, content in itertools.islice(readable(found, _decodable), count)]


def _decodable(path: Path) -> Source:
    (content,) = _contents([path])
    read_image(path)
    return content


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
