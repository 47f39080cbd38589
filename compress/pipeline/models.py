"""The steps that make networks: float baseline, post-training quantization, quantization-aware training."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from compress.data.base import BatchPlan, DataSet, Split
from compress.files import write_json, write_text
from compress.models import BuiltModel, build_model_with_notes
from compress.pipeline.run import Run
from compress.quantization.calibrate import CalibrationReport, calibrate
from compress.quantization.improve import improve, smoothed
from compress.quantization.insert import insert_quantizers, placement_of
from compress.quantization.learned import freeze_scales, learn_scales
from compress.quantization.spec import QuantSpec
from compress.recipe import Recipe
from compress.sparsity.parametrization import apply_masks, squash_masks
from compress.training import QATSpec, TrainReport, TrainSpec, fit, load_model, save_model
from compress.training.loop import AfterStep

_MUCH = 0.02  # of the values beyond the range: what percentile and mse leave out stays far below it


def build_float(recipe: Recipe, data: DataSet) -> BuiltModel:
    """The recipe's model as it is before training: fresh from the seed, or with its weights."""
    torch.manual_seed(recipe.train.seed)
    return build_model_with_notes(recipe.model, num_classes=data.train.num_classes)


def float_step(run: Run, built: BuiltModel) -> nn.Module:
    """The float baseline: the recipe's model, trained unless `train.epochs` is 0."""
    spec = run.recipe
    model = built.model
    if run.folder.done("train"):
        load_model(model, run.path("float.safetensors"))
        return model.to(run.device).eval()
    run.notes += built.notes
    report = train(run, model.to(run.device), spec.train, "train")
    keep(run, "train", model, top1=report.final.top1, images_per_s=report.images_per_s, seconds=report.seconds)
    return model.eval()


def ptq_step(run: Run, float_model: nn.Module, variant: str = "ptq") -> fx.GraphModule:
    """Post-training quantization of a float network, calibrated on images of the training split."""
    spec = cast(QuantSpec, run.recipe.quantization)
    example, images, many = run.example.to(run.device), _calibration_images(run, spec), run.processes.world_size > 1
    if run.folder.done(variant):
        qmodel = insert_quantizers(float_model, example, spec)
        load_model(qmodel, run.path(f"{variant}.safetensors"))
        return qmodel.eval()
    ready = smoothed(float_model, example, images, spec, all_reduce=many, progress=run.progress)
    qmodel = insert_quantizers(ready, example, spec)
    seen = calibrate(qmodel, images, all_reduce=many, progress=run.progress)
    run.notes += _clipping_note(variant, seen) + _dead_note(variant, seen)
    run.processes.on_main(lambda: _write_quantization(run, qmodel, seen))
    rounded = run.path(f"{variant}.adaround")
    improved = improve(
        qmodel,
        images,
        spec,
        smoothing=getattr(ready, "smoothing", None),
        folder=rounded if run.processes.is_main else None,
        all_reduce=many,
        progress=run.progress,
    )
    run.notes += [f"{variant}: {note}" for note in improved.notes()]
    keep(run, variant, qmodel, images=seen.images)
    run.processes.on_main(lambda: shutil.rmtree(rounded, ignore_errors=True))  # the weights have taken its place
    return qmodel


def qat_step(
    run: Run,
    float_model: nn.Module,
    ptq_model: fx.GraphModule,
    variant: str = "qat",
    *,
    masks: Mapping[str, Tensor] | None = None,
) -> fx.GraphModule:
    """Train a quantized network on, taught by the float one where the recipe says so; `masks` hold zeros at zero."""
    spec = cast(QATSpec, run.recipe.qat)
    qmodel = copy.deepcopy(ptq_model)
    if run.folder.done(variant):
        load_model(qmodel, run.path(f"{variant}.safetensors"))
        return qmodel.eval()
    if masks:
        apply_masks(qmodel, masks)
    if spec.scales == "learned":
        learn_scales(qmodel)
    behind = run.recipe.train.epochs + (run.recipe.finetune.epochs if variant.startswith("sparse") else 0)
    report = train(run, qmodel.train(), spec, variant, teacher=float_model, first_epoch=behind)
    freeze_scales(qmodel)
    if masks:
        squash_masks(qmodel)
    keep(run, variant, qmodel, top1=report.final.top1, images_per_s=report.images_per_s, seconds=report.seconds)
    return qmodel.eval()


def train(
    run: Run,
    model: nn.Module,
    spec: TrainSpec,
    variant: str,
    *,
    teacher: nn.Module | None = None,
    first_epoch: int = 0,
    after_step: AfterStep | None = None,
) -> TrainReport:
    """Train `model` in place as the run says; `variant` names its files and its bar.

    `first_epoch` counts the epochs behind it: a phase that went on with those of the phase before would show the
    network the same images in the same order, augmented alike, as it has seen.
    """
    return fit(
        model,
        run.data,
        spec,
        batch_size=run.recipe.data.batch_size,
        folder=run.folder.path,
        teacher=teacher if spec.distill else None,
        device=run.device,
        processes=run.processes,
        resume=run.resume,
        name=variant,
        first_epoch=first_epoch,
        after_step=after_step,
        progress=run.progress,
    )


def keep(run: Run, step: str, model: nn.Module, **facts: float | None) -> None:
    """Write the weights and mark a step as done, on the main process; the others wait."""

    def work() -> None:
        name = "float" if step == "train" else step
        save_model(model, run.path(f"{name}.safetensors"), {"step": step, "recipe": run.recipe.digest()})
        run.finish(step, **facts)
        run.path(f"{step}.checkpoint.safetensors").unlink(missing_ok=True)  # the weights have taken its place

    run.processes.on_main(work)


@dataclass(frozen=True)
class CalibrationImages:
    """This process's share of the calibration images, batch by batch; has a length, so that progress has an end."""

    split: Split
    plan: BatchPlan

    def __len__(self) -> int:
        return self.split.steps(self.plan)

    def __iter__(self) -> Iterator[Tensor]:
        return (images for images, _ in self.split.batches(self.plan))


def _calibration_images(run: Run, spec: QuantSpec) -> CalibrationImages:
    """The images that ranges are measured on: of the training split, never of the evaluation split."""
    plan = BatchPlan(
        batch_size=run.recipe.data.batch_size,
        limit=min(spec.calibration_images, len(run.data.train)),
        rank=run.processes.rank,
        world_size=run.processes.world_size,
    )
    return CalibrationImages(run.data.train, plan)


def _clipping_note(variant: str, seen: CalibrationReport) -> list[str]:
    """A word of warning where the ranges leave out much of what was seen."""
    cut = {name: share for name, share in seen.clipped.items() if share > _MUCH}
    if not cut:
        return []
    worst = max(cut, key=lambda name: cut[name])
    return [
        f"{variant}: calibration cuts off {cut[worst]:.0%} of the values at {worst}, over {_MUCH:.0%} at {len(cut)} "
        f"of {len(seen.amax)} quantizers; if accuracy is lost, compare quantization.activations.calibrator=mse and max"
    ]


def _dead_note(variant: str, seen: CalibrationReport) -> list[str]:
    """A word of warning where tensors are zero whatever the image."""
    if not seen.dead:
        return []
    return [
        f"{variant}: {len(seen.dead)} of {len(seen.amax)} quantizers, {seen.dead[0]} among them, see zeros whatever "
        "the image and have a range of 1; train the model, then quantize it"
    ]


def _write_quantization(run: Run, qmodel: fx.GraphModule, seen: CalibrationReport) -> None:
    """The table of decisions, and what calibration saw."""
    write_text(run.path("placement.csv"), placement_of(qmodel).to_csv())
    formats = {site.name: site.format for site in placement_of(qmodel).activations}
    rows = []
    for name, (counts, edges) in seen.histograms.items():
        counts, edges = _coarse(counts, edges)
        rows.append(
            {
                "name": name,
                "counts": counts.tolist(),
                "bin_edges": [edges[0].item(), edges[-1].item()],
                "amax": seen.amax[name].item(),
                "signed": formats[name].signed,
            }
        )
    write_json(run.path("histograms.json"), rows)


def _coarse(counts: Tensor, edges: Tensor, bins: int = 128) -> tuple[Tensor, Tensor]:
    """A histogram of about `bins` bins for drawing: neighbours added up, the last ones padded with empty bins."""
    group = max(1, -(-len(counts) // bins))
    missing = -len(counts) % group
    padded = torch.cat([counts, counts.new_zeros(missing)]).view(-1, group).sum(1)
    width = edges[1] - edges[0]
    return padded, torch.arange(len(padded) + 1, dtype=edges.dtype) * width * group
