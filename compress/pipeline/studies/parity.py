"""The command `inspect parity`: engines by layer, and the accuracy debugger."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.data.base import BatchPlan, DataSet, Split
from compress.data.load import load_data
from compress.engines.registry import target_of
from compress.errors import EngineError, RecipeError, RunError
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure.latency import latency_ratio, time_files
from compress.measure.parity import LayerParity, layer_parity
from compress.onnx_ptq.quantize import mend_onnx, quantize_onnx
from compress.pipeline.run import task_of
from compress.pipeline.saved import finished_run, network, variants_in
from compress.pipeline.steps.networks import CalibrationImages, build_float
from compress.quantization import QuantSpec
from compress.quantization.ptq.quantize import quantize, quantize_targets
from compress.quantization.sensitivity import Goal, Mended, mend
from compress.recipe.tree import Recipe
from compress.support.progress import NoProgress, Progress
from compress.tasks.classification import TOP1
from compress.variants import Variant

_ENGINES = ("onnxruntime", "openvino")
_IMAGES = 8  # of the evaluation split

Results = dict[str, LayerParity | EngineError]


def parity_of_recipe(recipe: Recipe) -> Results:
    """Quantize the recipe's untrained model, export it, and compare each engine, or say why not."""
    if recipe.quantization is None:
        raise RecipeError("parity compares a quantized network, and the recipe has quantization: null")
    data = load_data(recipe.data)
    model = build_float(recipe).model.eval()
    plan = BatchPlan(
        batch_size=recipe.data.batch_size, limit=min(recipe.quantization.calibration_images, len(data.train))
    )
    batches = [x for x, _ in data.train.batches(plan)]
    example = batches[0][:2]
    networks = quantize_targets(model, example, batches, spec=recipe.quantization)
    first = next(iter(networks.values()))
    found = {engine: networks.get(target_of(engine) or "tensorrt", first) for engine in _ENGINES}
    return _compare(found, example, data.val)


def parity_of_run(folder: Path) -> Results:
    """Export a run's last quantized network and compare each engine."""
    known = [name for name in variants_in(folder) if name.is_quantized]
    if not known:
        raise RunError(f"{folder} holds no quantized network (there is: none); ptq and qat make them")
    run = finished_run(folder)
    found = {engine: network(run, *run.key(known[-1], target_of(engine))) for engine in _ENGINES}
    return _compare(found, run.example, run.data.val)


def _compare(networks: Mapping[str, nn.Module], example: Tensor, split: Split) -> Results:
    images = next(iter(split.batches(BatchPlan(batch_size=_IMAGES, limit=_IMAGES))))[0]
    results: Results = {}
    for engine, qmodel in networks.items():
        precision = "f32" if engine == "openvino" else None
        if not isinstance(qmodel, fx.GraphModule):  # never, of a quantized variant
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = export_onnx(qmodel.cpu(), example, Path(folder) / "model.onnx")
            try:
                results[engine] = layer_parity(qmodel, path, images, engine=engine, precision=precision)
            except EngineError as error:
                results[engine] = error
    return results


_TIMED = 6  # changes that are timed one by one, at most
_MENDED = "mended"


@dataclass(frozen=True, kw_only=True)
class Price:
    """A time beside the mended network's.

    Attributes:
        label: `float`, `as specified`, `mended`, or `without` a change.
        ratio: mended over this; above 1 the changes cost time.
    """

    label: str
    p50_ms: float
    ratio: float
    unquiet: str = ""


@dataclass(frozen=True, kw_only=True)
class MendReport:
    """Result of the debugger.

    Attributes:
        prices: () = not timed.
        not_timed: why, or "".
        recipe: file of the changes, or None.
    """

    mended: Mended
    prices: tuple[Price, ...]
    not_timed: str
    recipe: Path | None


def mend_recipe(
    recipe: Recipe, goal: Goal, *, images: int = 256, out: Path | None = None, progress: Progress | None = None
) -> MendReport:
    """Debug a recipe with its weights.

    The goal is judged on `images` evaluation images; `out` takes the recipe.
    """
    if recipe.model.weights is None and recipe.train.epochs:
        raise RecipeError(
            f"the recipe names no weights and trains its network (train.epochs: {recipe.train.epochs}): before that, "
            "nothing can be said of its accuracy. Give a run in place of the recipe (--run), such as one of `train` or "
            "`ptq`, or name weights (model.weights); train.epochs: 0 takes the network as it is"
        )
    data = load_data(recipe.data)
    return _mend(recipe, build_float(recipe).model, data, goal, images, out, progress)


def mend_run(
    folder: Path, goal: Goal, *, images: int = 256, out: Path | None = None, progress: Progress | None = None
) -> MendReport:
    run = finished_run(folder)
    return _mend(run.recipe, network(run, Variant.FLOAT), run.data, goal, images, out, progress)


def _mend(
    recipe: Recipe,
    model: nn.Module,
    data: DataSet,
    goal: Goal,
    images: int,
    out: Path | None,
    progress: Progress | None,
) -> MendReport:
    spec = recipe.quantization
    if spec is None:
        raise RecipeError("the debugger is for a quantized network, and the recipe has quantization: null")
    spec = spec.for_target()  # of several targets the one that training follows
    calibration, judged = (
        BatchPlan(batch_size=recipe.data.batch_size, limit=limit) for limit in (spec.calibration_images, images)
    )
    batches = list(CalibrationImages(data.train, calibration, torch.device("cpu")))
    example, metric = batches[0][:2], task_of(recipe, data).metric
    found = mend(
        model.eval(),
        example,
        batches,
        data.val.batches(judged),
        spec=spec,
        drop=goal.drop,
        sqnr_db=goal.sqnr_db,
        metric=None if metric is TOP1 else metric,
        progress=progress,
    )

    def make(own: QuantSpec | None, target: Path) -> Path:
        return export_onnx(model if own is None else quantize(model, example, batches, spec=own), example, target)

    return _report(found, replace(recipe, quantization=spec), make, out, progress)


def mend_file(
    path: Path,
    batches: Iterable[Any],
    spec: QuantSpec,
    goal: Goal,
    *,
    metric: Any = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> MendReport:
    """Debug a float ONNX file.

    `batches`, with targets last for a metric, and `metric` as for `compress.mend`; `out` takes a recipe for
    `ptq --onnx`.
    """
    data = list(batches)
    found = mend_onnx(path, data, spec=spec, drop=goal.drop, sqnr_db=goal.sqnr_db, metric=metric, progress=progress)

    def make(own: QuantSpec | None, target: Path) -> Path:
        return path if own is None else quantize_onnx(path, data, spec=own, out=target)

    return _report(found, replace(Recipe(), quantization=spec), make, out, progress)


def _report(
    found: Mended,
    recipe: Recipe,
    make: Callable[[QuantSpec | None, Path], Path],
    out: Path | None,
    progress: Progress | None,
) -> MendReport:
    spec = recipe.quantization or QuantSpec()
    engine = spec.target if spec.target in {"openvino", "tensorrt"} else "onnxruntime"
    wanted: dict[str, QuantSpec | None] = {"float": None, "as specified": spec, _MENDED: found.spec}
    if len(found.changes) > 1:
        singles = list(zip(found.changes, found.specs, strict=True))[:_TIMED]
        wanted |= {f"without {change.text}": own for change, own in singles}
    prices: tuple[Price, ...] = ()
    reason = "nothing was changed"
    if found.changes:
        with tempfile.TemporaryDirectory() as name:
            try:
                files = {label: make(own, Path(name) / f"{i}.onnx") for i, (label, own) in enumerate(wanted.items())}
                prices, reason = measure_prices(files, engine=engine, progress=progress), ""
            except EngineError as error:
                reason = f"the networks were not timed on {engine}: {error}"
    path = None if out is None else write_text(out, replace(recipe, quantization=found.spec).to_yaml())
    return MendReport(mended=found, prices=prices, not_timed=reason, recipe=path)


def measure_prices(
    files: Mapping[str, Path], *, engine: str, seconds: float = 3.0, progress: Progress | None = None
) -> tuple[Price, ...]:
    timed = time_files(files, engine, runs=200, seconds=seconds, progress=progress or NoProgress())
    mended = timed[_MENDED]
    return tuple(
        Price(
            label=label,
            p50_ms=row.p50_ms,
            ratio=latency_ratio(mended, row),
            unquiet=mended.unquiet or row.unquiet,
        )
        for label, row in timed.items()
    )
