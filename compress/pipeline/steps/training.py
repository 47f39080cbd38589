"""The float baseline, and the training that steps share."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from compress.data.base import DataSet
from compress.data.load import class_count
from compress.errors import RunError
from compress.files import write_text
from compress.models.by_name import BuiltModel, build_model, build_model_with_notes
from compress.pipeline.folder import differences, read_state, recipe_of
from compress.pipeline.run import Run
from compress.recipe.tree import Recipe
from compress.records.files import TRAIN
from compress.support.meters import TaskMetric
from compress.training import TrainSpec
from compress.training.checkpoint import load_model, save_model
from compress.training.log import TrainReport
from compress.training.loop import AfterStep, fit
from compress.variants import Variant


def train(
    run: Run,
    model: nn.Module,
    spec: TrainSpec,
    variant: Variant,
    *,
    teacher: nn.Module | None = None,
    first_epoch: int = 0,
    after_step: AfterStep | None = None,
) -> TrainReport:
    """Train `model` in place.

    `variant` names the files. `teacher`: for distillation, if the recipe names no other. `first_epoch`: epochs trained
    before, so that images come in another order. `after_step`: called after each step.
    """
    report = fit(
        model,
        run.data,
        spec,
        batch_size=run.recipe.data.batch_size,
        folder=run.folder.path,
        task=run.task,
        teacher=_teacher(run, teacher) if spec.distill else None,
        device=run.device,
        processes=run.processes,
        resume=run.resume,
        name=variant.step,
        first_epoch=first_epoch,
        reference=_reference(run) if spec.stop_within is not None else None,
        after_step=after_step,
        progress=run.progress,
    )
    if report.stopped is not None:
        done = f"{len(report.history)} of {spec.epochs} epochs"
        run.notes.append(f"{variant}: training ended after {done}: {report.stopped}")
    if spec.keep_best and report.best is not None and report.best is not report.history[-1]:
        run.notes.append(f"{variant}: the weights are those of epoch {report.best.epoch}, whose metric was the best")
    return report


def _reference(run: Run) -> float | None:
    value: float | None = run.folder.facts_of(Variant.FLOAT.step).get(run.task.metric.name)
    return value


def _teacher(run: Run, own: nn.Module | None) -> nn.Module | None:
    spec = run.recipe.teacher
    if spec is None:
        return own
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec, num_classes=class_count(run.recipe.data), task=run.recipe.task)
    return model.to(run.device).eval()


def facts_of(report: TrainReport, metric: TaskMetric) -> dict[str, float]:
    figures = {metric.name: report.final.values[metric.name]}
    return {**figures, "images_per_s": report.images_per_s, "seconds": report.seconds}


def save_variant(run: Run, variant: Variant, model: nn.Module, **facts: float) -> None:
    """Write weights and finish the step on the main process; others wait."""

    def work() -> None:
        save_model(model, run.path(variant.weights_file), {"step": variant.step, "recipe": run.recipe.digest()})
        run.finish(variant.step, **facts)
        run.path(f"{variant.step}.checkpoint.safetensors").unlink(missing_ok=True)  # the weights replace it

    run.processes.on_main(work)


def build_float(recipe: Recipe) -> BuiltModel:
    torch.manual_seed(recipe.train.seed)
    return build_model_with_notes(recipe.model, num_classes=class_count(recipe.data), task=recipe.task)


def check_start(start: Path | None, recipe: Recipe, data: DataSet) -> None:
    """Refuse a run whose float network is not that of `recipe` on `data`."""
    if start is None:
        return
    step, there = Variant.FLOAT.step, read_state(start)
    if not there.done(step):
        raise RunError(f"{start} has not trained its float network to the end; go on with it first (--resume)")
    there.check_data(data.fingerprints())
    found = [d.words for d in differences(asdict(recipe_of(start)), asdict(recipe)) if d.binding([step])]
    if found:
        raise RunError(
            f"the float network of {start} is another one: its recipe differs in {', '.join(found)}. Repeat its values "
            "(--set), or leave --from out to train anew"
        )


def _take_over(run: Run, start: Path, model: nn.Module) -> None:
    load_model(model, start / Variant.FLOAT.weights_file)
    facts = {name: value for name, value in read_state(start).facts_of(Variant.FLOAT.step).items() if name != "notes"}
    run.notes.append(f"the float network is that of {start}")
    if run.processes.is_main and (start / TRAIN.name).is_file():
        write_text(run.path(TRAIN.name), (start / TRAIN.name).read_text(encoding="utf-8"))
    save_variant(run, Variant.FLOAT, model, **facts)


def float_step(run: Run, built: BuiltModel) -> nn.Module:
    """Return the float baseline: that of `run.start`, else trained unless `train.epochs` is 0."""
    model, done = built.model, run.folder.done(Variant.FLOAT.step)
    if done:
        load_model(model, run.path(Variant.FLOAT.weights_file))
    else:
        run.notes += built.notes
        if run.start is not None:
            _take_over(run, run.start, model)
    run.name_classes(model.to(run.device).eval())
    if not done and run.start is None:
        report = train(run, model, run.recipe.train, Variant.FLOAT)
        save_variant(run, Variant.FLOAT, model, **facts_of(report, run.task.metric))
    return model.eval()
