"""The command `sensitivity`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.errors import RecipeError, RunError
from compress.files import read_json, write_json, write_text
from compress.pipeline.folder import open_run
from compress.pipeline.resumable import SENSITIVITY
from compress.pipeline.run import Run
from compress.pipeline.steps.float import build_float, float_step
from compress.pipeline.steps.ptq import calibration_images
from compress.plots.sensitivity import draw_sensitivity
from compress.plots.style import WIDE, save_figure, styled
from compress.quantization.placement.rules import LayerSettings
from compress.quantization.ptq.prepare import float_graph
from compress.quantization.sensitivity.mixed import everywhere
from compress.quantization.sensitivity.sensitivity import (
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
    """Baseline, then every layer in every format.

    Writes sensitivity.json, .csv, .md and .png; `images` is their number, `weight_bits` further formats; on `resume`
    measured layers are kept.

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
        other = everywhere(spec, "weights", num_bits=bits)
        check_quant_spec(other)
        specs.setdefault(f"w{bits}a{spec.activations.num_bits}", other)
    return specs


def _measure(run: Run, model: nn.Module, name: str, spec: QuantSpec, images: int) -> Sensitivity:
    """Sensitivity in one format; its rows are kept in the folder as they are measured."""
    path = run.path(f"sensitivity-{name}.json")
    stored = _stored(path, images)
    if stored.report is not None:
        return stored.report

    def keep(row: LayerSensitivity) -> None:
        stored.rows.append(row)
        write_json(path, plain({"images": images, "rows": [asdict(row) for row in stored.rows]}))

    report = sensitivity(
        model,
        run.example.to(run.device),
        calibration_images(run, spec),
        run.data.val.batches(BatchPlan(batch_size=run.recipe.data.batch_size, limit=images), device=run.device),
        spec=spec,
        metric=None if run.task.metric is TOP1 else run.task.metric,
        known={row.layer: row for row in stored.rows},
        keep=keep,
        progress=run.progress,
    )
    write_json(path, plain({"images": images, "report": asdict(report)}))
    return report


@dataclass
class _Stored:
    """Measurements that a run keeps: single layers while it is under way, then the whole report."""

    images: int
    rows: list[LayerSensitivity] = field(default_factory=list)
    report: Sensitivity | None = None


def _stored(path: Path, images: int) -> _Stored:
    """Return the measurements of a stopped run; empty ones if it used another number of images."""
    try:
        stored = TypeAdapter(_Stored).validate_python(read_json(path)) if path.exists() else _Stored(images)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, and its layers are measured again") from error
    return stored if stored.images == images else _Stored(images)


def plain(value: Any) -> Any:  # of the same kind as the value
    """Return `value` for JSON: infinity becomes `inf` or `-inf`."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _write(run: Run, reports: Mapping[str, Sensitivity]) -> tuple[Path, ...]:
    with styled():
        figure = draw_sensitivity(reports, WIDE)
    return (
        write_json(run.path("sensitivity.json"), plain({name: asdict(report) for name, report in reports.items()})),
        write_text(run.path("sensitivity.csv"), sensitivity_csv(reports)),
        write_text(run.path("sensitivity.md"), f"# Sensitivity\n\n{sensitivity_markdown(reports)}"),
        save_figure(figure, run.path("sensitivity.png")),
    )
