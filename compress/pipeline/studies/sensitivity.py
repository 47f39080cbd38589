"""The steps of `sensitivity`: the baseline, every layer's effect, and the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.errors import RecipeError, RunError
from compress.files import read_json, write_json, write_text
from compress.pipeline.folder import open_run
from compress.pipeline.resumable import SENSITIVITY
from compress.pipeline.run import Run
from compress.pipeline.steps.float import build_float, float_step
from compress.plots.sensitivity import draw_sensitivity
from compress.plots.style import WIDE, save_figure, styled
from compress.quantization.placement.rules import LayerSettings
from compress.quantization.ptq.prepare import float_graph
from compress.quantization.sensitivity.mixed import with_weight_bits
from compress.quantization.sensitivity.sensitivity import (
    Effect,
    LayerSensitivity,
    Sensitivity,
    layer_settings,
    sensitivity,
)
from compress.quantization.spec import QuantSpec, check_quant_spec
from compress.recipe.tree import Recipe
from compress.report.sensitivity import sensitivity_csv, sensitivity_markdown
from compress.support.progress import NoProgress, Progress
from compress.tasks.classification import TOP1

STEP = SENSITIVITY


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of `sensitivity_run`; the first of `specs`, by format, is the recipe's own."""

    run: Run
    model: nn.Module
    specs: Mapping[str, QuantSpec]
    reports: Mapping[str, Sensitivity]
    settings: Mapping[str, Mapping[str, LayerSettings]]
    files: tuple[Path, ...]

    @property
    def base(self) -> str:
        """The recipe's own format."""
        return next(iter(self.specs))


def sensitivity_run(
    recipe: Recipe,
    out: Path,
    *,
    images: int = 256,
    weight_bits: Sequence[int] = (),
    resume: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Train the baseline where needed, then measure every layer in every format.

    `out` takes sensitivity.json, .csv, .md and .png. `images`: number of evaluation images. `weight_bits`: further
    formats.
    `resume`: measured layers are kept. `device`: None = a GPU where there is one.

    Raises:
        RecipeError: no `quantization` section, or no images.
        CompressError: as its steps do.
    """
    specs = formats_of(recipe, weight_bits)
    if images < 1:
        raise RecipeError(f"images is {images}: it must be 1 or more")
    data = load_data(recipe.data)
    built = build_float(recipe)
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(
        recipe=recipe,
        folder=open_run(out, recipe, STEP, resume=resume, data=data.fingerprints()),
        data=data,
        device=torch.device(found),
        progress=progress or NoProgress(),
        resume=resume,
    )
    try:
        model = float_step(run, built)
        reports = {name: _measure(run, model, name, spec, images) for name, spec in specs.items()}
        graph, _ = float_graph(model, run.example.to(run.device), next(iter(specs.values())))
        return Measured(
            run=run,
            model=model,
            specs=specs,
            reports=reports,
            settings={name: layer_settings(graph, spec) for name, spec in specs.items()},
            files=_write(run, reports),
        )
    finally:
        run.folder.release()


def formats_of(recipe: Recipe, weight_bits: Sequence[int]) -> dict[str, QuantSpec]:
    """Return the quantization in each weight format, by names such as `w8a8`."""
    spec = recipe.quantization
    if spec is None:
        raise RecipeError("sensitivity needs a `quantization` section, and the recipe has quantization: null")
    spec = spec.for_target()  # one placement is studied, the one that training follows
    specs = {f"w{spec.weights.num_bits}a{spec.activations.num_bits}": spec}
    for bits in weight_bits:
        other = with_weight_bits(spec, bits)
        check_quant_spec(other)
        specs.setdefault(f"w{bits}a{spec.activations.num_bits}", other)
    return specs


def calibration_batches(run: Run, spec: QuantSpec) -> list[Tensor]:
    """Return the calibration images, on the run's device."""
    limit = min(spec.calibration_images, len(run.data.train))
    return [x.to(run.device) for x in run.batches("train", run.recipe.data.batch_size, limit=limit)]


def evaluation_batches(run: Run, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return (images, targets) of the evaluation split, on the run's device."""
    plan = BatchPlan(batch_size=run.recipe.data.batch_size, limit=min(images, len(run.data.val)))
    return run.data.val.batches(plan, device=run.device)


def _measure(run: Run, model: nn.Module, name: str, spec: QuantSpec, images: int) -> Sensitivity:
    """Sensitivity in one format; its rows are kept in the folder as they are measured."""
    path = run.path(f"sensitivity-{name}.json")
    stored, report, known = _stored(path, images)
    if report is not None:
        return report

    def keep(row: LayerSensitivity) -> None:
        stored["rows"].append(plain(asdict(row)))
        write_json(path, stored)

    report = sensitivity(
        model,
        run.example.to(run.device),
        calibration_batches(run, spec),
        evaluation_batches(run, images),
        spec=spec,
        metric=None if run.task.metric is TOP1 else run.task.metric,
        known=known,
        keep=keep,
        progress=run.progress,
    )
    write_json(path, {"images": images, "report": plain(asdict(report))})
    return report


def _stored(path: Path, images: int) -> tuple[dict[str, Any], Sensitivity | None, dict[str, LayerSensitivity]]:
    """Measurements of a stopped run on so many images: the file's content, the whole report, the single layers."""
    nothing: dict[str, Any] = {"images": images, "rows": []}
    try:
        stored = read_json(path) if path.exists() else nothing
        if stored.get("images") != images:
            stored = nothing
        if "report" in stored:
            return stored, _report_of(stored["report"]), {}
        return stored, None, {row.layer: row for row in map(_row_of, stored["rows"])}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, and its layers are measured again") from error


def plain(value: Any) -> Any:  # of the same kind as the value
    """Return `value` for JSON: infinity becomes `inf` or `-inf`."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _effect(effect: Mapping[str, Any]) -> Effect:
    return Effect(**{**effect, "sqnr_db": float(effect["sqnr_db"])})


def _row_of(row: Mapping[str, Any]) -> LayerSensitivity:
    return LayerSensitivity(**{**row, "alone": _effect(row["alone"]), "left_out": _effect(row["left_out"])})


def _report_of(report: Mapping[str, Any]) -> Sensitivity:
    rows = tuple(map(_row_of, report["rows"]))
    return Sensitivity(**{**report, "quantized": _effect(report["quantized"]), "rows": rows})


def _write(run: Run, reports: Mapping[str, Sensitivity]) -> tuple[Path, ...]:
    with styled():
        figure = draw_sensitivity(reports, WIDE)
    return (
        write_json(run.path("sensitivity.json"), plain({name: asdict(report) for name, report in reports.items()})),
        write_text(run.path("sensitivity.csv"), sensitivity_csv(reports)),
        write_text(run.path("sensitivity.md"), f"# Sensitivity\n\n{sensitivity_markdown(reports)}"),
        save_figure(figure, run.path("sensitivity.png")),
    )
