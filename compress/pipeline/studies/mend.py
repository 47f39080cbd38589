"""The accuracy debugger of recipes, runs and ONNX files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.data.base import BatchPlan, DataSet
from compress.data.load import load_data
from compress.errors import EngineError, RecipeError
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure.prices import MENDED, Price, measure_prices
from compress.onnx_ptq.mend import mend_onnx
from compress.onnx_ptq.quantize import quantize_onnx
from compress.pipeline.again import finished_run, network
from compress.pipeline.run import task_of
from compress.pipeline.steps.float import build_float
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.mend import Mended, mend
from compress.quantization.spec import QuantSpec
from compress.recipe.tree import Recipe
from compress.support.meters import TaskMetric
from compress.support.progress import Progress
from compress.tasks.classification import TOP1
from compress.variants import Variant

_TIMED = 6
"""Changes that are timed one by one, at most."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When a network is mended; exactly one is given.

    Attributes:
        drop: largest loss in points.
        sqnr_db: least signal to noise of the outputs.
    """

    drop: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class MendReport:
    """Result of the debugger.

    Attributes:
        prices: times of the networks; () = not timed.
        not_timed: why not; "" = timed.
        recipe: the file with the changes; None = none.
    """

    mended: Mended
    prices: tuple[Price, ...]
    not_timed: str
    recipe: Path | None


def mend_recipe(
    recipe: Recipe, goal: Goal, *, images: int = 256, out: Path | None = None, progress: Progress | None = None
) -> MendReport:
    """Debug the recipe's network with the weights that it names.

    `images`: number of evaluation images for the goal. `out`: recipe to write; None = none.

    Raises:
        RecipeError: no `quantization` section, or no weights.
    """
    if recipe.model.weights is None and recipe.train.epochs:
        raise RecipeError(
            f"the recipe names no weights and trains its network (train.epochs: {recipe.train.epochs}): before that, "
            "nothing can be said of its accuracy. Give a run in place of the recipe (--run), such as one of `train` or "
            "`ptq`, or name weights (model.weights); train.epochs: 0 takes the network as it is"
        )
    data = load_data(recipe.data)
    return _mend(recipe, build_float(recipe).model.eval(), data, goal, images, out, progress)


def mend_run(
    folder: Path, goal: Goal, *, images: int = 256, out: Path | None = None, progress: Progress | None = None
) -> MendReport:
    """Debug the float network of a run; see `mend_recipe`."""
    run = finished_run(folder)
    return _mend(run.recipe, network(run, Variant.FLOAT).eval(), run.data, goal, images, out, progress)


def mend_file(
    path: Path,
    batches: Iterable[Any],
    spec: QuantSpec,
    goal: Goal,
    *,
    images: Iterable[Any] | None = None,
    metric: Any = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> MendReport:
    """Debug a float ONNX file.

    `batches`: as for `quantize_onnx`. `images`: batches for the goal, targets last; None = `batches`. `metric`: as for
    `compress.mend`. `out`: recipe to write, for `ptq --onnx`; None = none.
    """
    data = list(batches)
    found = mend_onnx(
        path, data, images, spec=spec, drop=goal.drop, sqnr_db=goal.sqnr_db, metric=metric, progress=progress
    )

    def make(own: QuantSpec | None, target: Path) -> Path:
        return path if own is None else quantize_onnx(path, data, spec=own, out=target)

    prices, reason = _prices(found, spec, make, progress)
    recipe = None if out is None else write_text(out, replace(Recipe(), quantization=found.spec).to_yaml())
    return MendReport(mended=found, prices=prices, not_timed=reason, recipe=recipe)


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
    size = recipe.data.batch_size
    batches: list[Tensor] = [
        x
        for x, _ in data.train.batches(BatchPlan(batch_size=size, limit=min(spec.calibration_images, len(data.train))))
    ]
    judged = data.val.batches(BatchPlan(batch_size=size, limit=min(images, len(data.val))))
    metric = task_of(recipe, data).metric
    made = mend_model(model, batches, judged, spec, goal, metric=None if metric is TOP1 else metric, progress=progress)
    path = None if out is None else write_text(out, replace(recipe, quantization=made.mended.spec).to_yaml())
    return replace(made, recipe=path)


def mend_model(
    model: nn.Module,
    batches: list[Tensor],
    images: Iterable[Any],
    spec: QuantSpec,
    goal: Goal,
    *,
    metric: TaskMetric | None = None,
    progress: Progress | None = None,
) -> MendReport:
    """Debug a torch model, and time what was found; see `compress.mend`."""
    found = mend(
        model,
        batches[0][:2],
        batches,
        images,
        spec=spec,
        drop=goal.drop,
        sqnr_db=goal.sqnr_db,
        metric=metric,
        progress=progress,
    )

    def make(own: QuantSpec | None, target: Path) -> Path:
        made = model if own is None else quantize(model, batches[0][:2], batches, spec=own)
        return export_onnx(made, batches[0][:2], target)

    prices, reason = _prices(found, spec, make, progress)
    return MendReport(mended=found, prices=prices, not_timed=reason, recipe=None)


def _prices(
    found: Mended, spec: QuantSpec, make: Callable[[QuantSpec | None, Path], Path], progress: Progress | None
) -> tuple[tuple[Price, ...], str]:
    """Return the times on the target's engine, or why there are none."""
    if not found.changes:
        return (), "nothing was changed"
    wanted: dict[str, QuantSpec | None] = {"float": None, "as specified": spec, MENDED: found.spec}
    if len(found.changes) > 1:
        for change, own in list(zip(found.changes, found.specs, strict=True))[:_TIMED]:
            wanted[f"without {change.text}"] = own
    engine = "onnxruntime" if spec.target not in {"openvino", "tensorrt"} else spec.target
    with tempfile.TemporaryDirectory() as name:
        try:
            files = {label: make(own, Path(name) / f"{i}.onnx") for i, (label, own) in enumerate(wanted.items())}
            return measure_prices(files, engine=engine, progress=progress), ""
        except EngineError as error:
            return (), f"the networks were not timed on {engine}: {error}"
