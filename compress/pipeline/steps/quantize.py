"""Quantization after training and its report, and training of a quantized network."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.data.base import BatchPlan, Split
from compress.errors import RunError
from compress.files import read_json, write_json, write_text
from compress.pipeline.folder import TARGETS_STEP
from compress.pipeline.run import Run, stem, weight_quantizer
from compress.pipeline.steps.training import facts_of, save_variant, train
from compress.quantization import QuantSpec, Rule, Target
from compress.quantization.block_graph import typical_block
from compress.quantization.calibration.calibrate import calibrate
from compress.quantization.learned import bake_weights, freeze_scales, learn_scales, normalize_weights
from compress.quantization.placement.decisions import measured_rule
from compress.quantization.placement.insert import insert_quantizers
from compress.quantization.ptq.improve import methods, without
from compress.quantization.ptq.quantize import quantize_targets
from compress.quantization.quantizer import LOWEST
from compress.quantization.report import (
    CalibrationReport,
    QuantizationReport,
    calibration_of,
    placement_of,
    quantization_report_of,
)
from compress.records.files import BLOCK
from compress.sparsity.parametrization import apply_masks, squash_masks
from compress.training.checkpoint import load_model, save_model
from compress.variants import Variant

_MANY_CLIPPED = 0.02  # share of the values beyond the range; percentile and mse leave out far fewer


def ptq_step(run: Run, float_model: nn.Module, variant: Variant = Variant.PTQ) -> fx.GraphModule:
    """Quantize a float network, calibrated on training images; a finished step loads its weights.

    Returns:
        The first target's network; `run.networks` has all of them, calibrated in the same pass.
    """
    spec = run.quantization
    example = run.example.to(run.device)
    if run.folder.done(variant.step):
        kept = without(spec, _taken_back(run, variant))
        found = {}
        for target in spec.targets:
            measured = _measured_rules(run, variant, run.placements[target])
            own = replace(kept, rules=(*kept.rules, *measured)).for_target(target)
            found[target] = insert_quantizers(float_model, example, own)
        for target, model in found.items():
            load_model(model.eval(), _weights(run, variant, run.placements[target]))
        return _kept(run, variant, found)
    rounded = run.path(f"{variant}.adaround")
    found = quantize_targets(
        float_model,
        example,
        calibration_images(run, spec),
        spec=spec,
        folder=rounded if run.processes.is_main else None,
        all_reduce=run.processes.world_size > 1,
        progress=run.progress,
    )
    for target, model in found.items():
        _report(run, variant, run.placements[target], model)
    first = _kept(run, variant, found)
    save_further(run, variant)
    save_variant(run, variant, first, images=calibration_of(first).images)
    run.processes.on_main(lambda: shutil.rmtree(rounded, ignore_errors=True))  # the weights replace it
    return first


def _kept(run: Run, variant: Variant, found: Mapping[Target, fx.GraphModule]) -> fx.GraphModule:
    run.networks |= {(variant, run.placements[target]): model for target, model in found.items()}
    return found[run.quantization.targets[0]]


def _weights(run: Run, variant: Variant, target: Target | None) -> Path:
    return run.path(f"{stem(variant, target)}.safetensors")


def save_further(run: Run, variant: Variant) -> None:
    def work() -> None:
        facts = {"step": variant.step, "recipe": run.recipe.digest()}
        for (made, target), model in run.networks.items():
            if made is variant and target is not None:
                save_model(model, _weights(run, variant, target), facts)

    run.processes.on_main(work)


def _report(run: Run, variant: Variant, target: Target | None, model: fx.GraphModule) -> None:
    report = quantization_report_of(model)
    calibration = calibration_of(model)
    notes = (*_clipping_note(calibration), *_dead_note(calibration), *report.notes())
    measured = {rule.match: rule.reason for rule in report.placement.measured_rules}
    if measured:
        run.processes.on_main(lambda: write_json(run.path(_measured_file(variant, target)), measured))
    run.notes += [f"{stem(variant, target)}: {note}" for note in notes]
    if target is not None:
        run.processes.on_main(lambda: write_text(run.path(f"placement.{target}.csv"), report.placement.to_csv()))
        return
    run.processes.on_main(lambda: _write_report(run, model, report, calibration))
    if report.comparison is not None:
        back = list(report.comparison.taken_back)
        run.processes.on_main(lambda: write_json(run.path(_back_file(variant)), back))


def _back_file(variant: Variant) -> str:
    return f"{variant}.taken_back.json"


def _measured_file(variant: Variant, target: Target | None) -> str:
    return f"{stem(variant, target)}.measured.json"


def _measured_rules(run: Run, variant: Variant, target: Target | None) -> list[Rule]:
    path = run.path(_measured_file(variant, target))
    found = _stored(path, {})
    if not isinstance(found, dict) or not all(isinstance(reason, str) for reason in found.values()):
        raise RunError(f"{path} holds {found!r:.80}: it must name layers and reasons; begin the run anew (--out)")
    return [measured_rule(match, reason) for match, reason in found.items()]


def _taken_back(run: Run, variant: Variant) -> list[str]:
    path = run.path(_back_file(variant))
    found = _stored(path, [])
    asked = methods(run.quantization)
    if not isinstance(found, list) or not set(found) <= set(asked):
        raise RunError(f"{path} holds {found}: it must be a list of {', '.join(asked)}; begin the run anew (--out)")
    return found


def _stored(path: Path, default: Any) -> Any:
    try:
        return read_json(path) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restore it, or begin the run anew (--out)") from error


@dataclass(frozen=True)
class CalibrationImages:
    """This process's images on its device; its length is in batches."""

    split: Split
    plan: BatchPlan
    device: torch.device

    def __len__(self) -> int:
        return self.split.steps(self.plan)

    def __iter__(self) -> Iterator[Tensor]:
        return (images for images, _ in self.split.batches(self.plan, device=self.device))


def calibration_images(run: Run, spec: QuantSpec) -> CalibrationImages:
    plan = BatchPlan(
        batch_size=run.recipe.data.batch_size,
        limit=min(spec.calibration_images, len(run.data.train)),
        rank=run.processes.rank,
        world_size=run.processes.world_size,
    )
    return CalibrationImages(run.data.train, plan, run.device)


def _clipping_note(seen: CalibrationReport) -> list[str]:
    cut = {name: share for name, share in seen.clipped.items() if share > _MANY_CLIPPED}
    if not cut:
        return []
    worst = max(cut, key=lambda name: cut[name])
    return [
        f"calibration cuts off {cut[worst]:.0%} of the values at {worst}, over {_MANY_CLIPPED:.0%} at {len(cut)} "
        f"of {len(seen.amax)} quantizers; if accuracy is lost, compare quantization.activations.calibrator=mse and max"
    ]


def _dead_note(seen: CalibrationReport) -> list[str]:
    if not seen.dead:
        return []
    return [
        f"{len(seen.dead)} of {len(seen.amax)} quantizers, {seen.dead[0]} among them, see zeros whatever the image "
        "and have a range of 1; train the model, then quantize it"
    ]


def _write_report(run: Run, model: fx.GraphModule, report: QuantizationReport, seen: CalibrationReport) -> None:
    write_text(run.path("placement.csv"), report.placement.to_csv())
    if (block := typical_block(model)) is not None:
        BLOCK.write(run.folder.path, block)
    formats = {site.name: site.format for site in report.placement.activations}
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
    group = max(1, -(-len(counts) // bins))
    missing = -len(counts) % group
    padded = torch.cat([counts, counts.new_zeros(missing)]).view(-1, group).sum(1)
    width = edges[1] - edges[0]
    return padded, torch.arange(len(padded) + 1, dtype=edges.dtype) * width * group


def qat_step(
    run: Run,
    float_model: nn.Module,
    ptq_model: fx.GraphModule,
    variant: Variant = Variant.QAT,
    *,
    masks: Mapping[str, Tensor] | None = None,
) -> fx.GraphModule:
    """Train a calibrated network; `ptq_model` is not changed.

    `float_model`: teacher, for distillation. `masks`: boolean masks of weights that stay zero, by layer path.
    """
    spec = run.qat
    qmodel = copy.deepcopy(ptq_model)
    if run.folder.done(variant.step):
        load_model(qmodel, run.path(variant.weights_file))
        further_step(run, variant, qmodel.eval())
        return qmodel
    if masks:
        apply_masks(qmodel, masks)
    if spec.normalize_weights:
        normalize_weights(qmodel)
    if spec.scales == "learned":
        learn_scales(qmodel)
    before = run.recipe.train.epochs + (run.recipe.finetune.epochs if variant.is_sparse else 0)
    report = train(run, qmodel.train(), spec, variant, teacher=float_model, first_epoch=before)
    freeze_scales(qmodel)
    bake_weights(qmodel)
    if masks:
        squash_masks(qmodel)
    save_variant(run, variant, qmodel, **facts_of(report, run.task.metric))
    further_step(run, variant, qmodel.eval())
    return qmodel


def further_step(run: Run, variant: Variant, trained: fx.GraphModule) -> None:
    """Keep the trained network, and make it for further targets: its weights, activations calibrated anew."""
    run.networks[variant, None] = trained
    before, step = variant.trained_from, f"{variant.step}.{TARGETS_STEP}"
    found = {t: copy.deepcopy(model) for (made, t), model in run.networks.items() if made is before and t is not None}
    if not found:
        return
    run.networks |= {(variant, target): model for target, model in found.items()}
    if run.folder.done(step):
        for target, model in found.items():
            load_model(model, run.path(f"{stem(variant, target)}.safetensors"))
        return
    for model in found.values():
        take_weights(model, trained)
    first, *others = found.values()
    spec = run.quantization
    images, together = calibration_images(run, spec), run.processes.world_size > 1
    calibrate(first, images, also=others, all_reduce=together, progress=run.progress)
    for model in found.values():
        take_weight_ranges(model, trained)
    save_further(run, variant)
    run.notes.append(
        f"{variant}: training followed the placement for {spec.targets[0]}; the files for "
        f"{', '.join(found)} have its weights, and ranges of activations measured anew"
    )
    run.processes.on_main(lambda: run.finish(step))


def take_weights(model: nn.Module, trained: fx.GraphModule) -> None:
    """Copy weights and statistics, without ranges; in place."""
    state = {name: value for name, value in trained.state_dict().items() if not name.endswith(("amax", LOWEST))}
    model.load_state_dict(state, strict=False)


def take_weight_ranges(model: nn.Module, trained: fx.GraphModule) -> None:
    """Copy the weight ranges of layers that both networks quantize alike; in place."""
    formats = {site.path: site.format for site in placement_of(trained).weights}
    for site in placement_of(model).weights:
        if formats.get(site.path) == site.format:
            weight_quantizer(model, site.path).set_amax(weight_quantizer(trained, site.path).amax)
