"""Export or measure the networks of a finished run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from compress.data.load import load_data
from compress.engines import Engine
from compress.errors import RunError, near_misses
from compress.export.names import RECIPE_KEY, VARIANT_KEY
from compress.export.onnx import export_onnx
from compress.measure.metric import Metric
from compress.measure.spec import BenchSpec
from compress.pipeline.folder import read_state, recipe_from_anywhere, recipe_of
from compress.pipeline.run import NetworkFiles, Run, stem
from compress.pipeline.steps.evaluate import TIMINGS, bench
from compress.pipeline.steps.ptq import ptq_step
from compress.pipeline.steps.qat import qat_step
from compress.pipeline.steps.slower import keep_slower, slower
from compress.pipeline.steps.sparse import sparse_step
from compress.pipeline.steps.training import build_float, float_step
from compress.quantization.spec import TARGETS, Target
from compress.records.files import METRICS
from compress.records.summary import best_variant, family
from compress.support.progress import NoProgress, Progress
from compress.variants import Variant


def variants_in(folder: Path) -> list[Variant]:
    """Networks whose weights a run folder holds, in order."""
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

    Raises:
        RunError: the folder holds no such network.
        ExportError: bad arguments.
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
    """The variant of that name; "" = the best by the run's figures, the last where it has none.

    Raises:
        RunError: the folder holds no such network.
    """
    known = variants_in(folder)
    if not known:
        raise RunError(f"{folder} holds no weights of a run ({', '.join(list(Variant)[:3])}.safetensors)")
    best = None if name else best_variant(METRICS.read(folder) or ())
    chosen = Variant.named(name or (best[0] if best and best[0] in known else known[-1]))
    if chosen not in known:
        raise RunError(f"{folder} holds no {name!r}{near_misses(name, known)}; it holds {', '.join(known)}")
    return chosen


def finished_run(folder: Path) -> Run:
    """A run whose steps load their results; data are loaded anew.

    Raises:
        RunError: the folder holds no run, or the data have changed.
    """
    recipe = recipe_from_anywhere(folder)
    data, state = load_data(recipe.data), read_state(folder)
    state.check_data(data.fingerprints())
    return Run(recipe=recipe, folder=state, data=data)


def network(run: Run, variant: Variant, target: Target | None = None) -> nn.Module:
    """A network with its weights; `target` None = the first.

    Raises:
        RunError: the run is not for that target.
    """
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
    """Networks by variant of a run folder, or ONNX files by stem, by path where stems are equal.

    Raises:
        RunError: no ONNX files, a missing file, or files and folders mixed.
    """
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
    """Measure latency of ONNX files, or of a run folder's, which keeps the figures."""
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
