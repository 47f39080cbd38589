"""Steps that make networks: float baseline, quantized after training and trained, pruned; their common training."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from compress.audit.onnx import audit_sparsity
from compress.data.base import BatchPlan, DataSet, Split
from compress.data.load import class_count
from compress.errors import AuditError, ModelError, RooflineError, RunError
from compress.export.names import module_prefix
from compress.files import read_json, write_json, write_text
from compress.models.by_name import BuiltModel, build_model, build_model_with_notes, read_state_dict
from compress.pipeline.run import (
    TARGETS_STEP,
    Run,
    differences,
    layer_weight,
    read_kept,
    read_state,
    recipe_of,
    stem,
    weight_quantizer,
)
from compress.quantization import QuantSpec, Rule, Target
from compress.quantization.block_graph import typical_block
from compress.quantization.calibration.calibrate import calibrate
from compress.quantization.learned import bake_weights, freeze_scales, learn_scales, normalize_weights
from compress.quantization.placement.decisions import measured_rule
from compress.quantization.placement.insert import insert_quantizers
from compress.quantization.ptq.quantize import methods, quantize_targets, without
from compress.quantization.quantizer import LOWEST
from compress.quantization.report import (
    CalibrationReport,
    QuantizationReport,
    calibration_of,
    placement_of,
    quantization_report_of,
)
from compress.recipe.tree import Recipe
from compress.records.files import BLOCK, HISTOGRAMS, TRAIN, Histogram
from compress.roofline_model import sparse_bound
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec
from compress.sparsity.channels import prune_channels
from compress.sparsity.eligibility import NOTEWORTHY_CHANNELS, large_enough
from compress.sparsity.parametrization import MaskSchedule, apply_masks, masked_layers, squash_masks
from compress.sparsity.sparsifier import mask_options, sparsify
from compress.support.meters import TaskMetric
from compress.training import TrainSpec
from compress.training.checkpoint import load_model, save_model
from compress.training.log import TrainReport
from compress.training.loop import AfterStep, fit
from compress.training.optim import recalibrate_batchnorm
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
    before = run.folder.facts_of(Variant.FLOAT.step).get(run.task.metric.name)
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
        reference=before if spec.stop_within is not None else None,
        after_step=after_step,
        progress=run.progress,
    )
    if report.stopped is not None:
        done = f"{len(report.history)} of {spec.epochs} epochs"
        run.notes.append(f"{variant}: training ended after {done}: {report.stopped}")
    if spec.keep_best and report.best is not None and report.best is not report.history[-1]:
        run.notes.append(f"{variant}: the weights are those of epoch {report.best.epoch}, whose metric was the best")
    return report


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
    found = read_state(start).facts_of(Variant.FLOAT.step)
    facts = {name: value for name, value in found.items() if name not in {"notes", "left_out"}}  # of that run's files
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
    notes = (*_warnings(calibration), *report.notes())
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


_ANEW = "restore it, or begin the run anew (--out)"


def _back_file(variant: Variant) -> str:
    return f"{variant}.taken_back.json"


def _measured_file(variant: Variant, target: Target | None) -> str:
    return f"{stem(variant, target)}.measured.json"


def _measured_rules(run: Run, variant: Variant, target: Target | None) -> list[Rule]:
    found = read_kept(run.path(_measured_file(variant, target)), dict[str, str], dict[str, str](), _ANEW)
    return [measured_rule(match, reason) for match, reason in found.items()]


def _taken_back(run: Run, variant: Variant) -> list[str]:
    path, asked = run.path(_back_file(variant)), methods(run.quantization)
    found = read_kept(path, list[str], list[str](), _ANEW)
    if not set(found) <= set(asked):
        raise RunError(f"{path} holds {found}: it must be a list of {', '.join(asked)}; begin the run anew (--out)")
    return found


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


def _warnings(seen: CalibrationReport) -> Iterator[str]:
    cut = {name: share for name, share in seen.clipped.items() if share > _MANY_CLIPPED}
    if cut:
        worst = max(cut, key=lambda name: cut[name])
        yield (
            f"calibration cuts off {cut[worst]:.0%} of the values at {worst}, over {_MANY_CLIPPED:.0%} at {len(cut)} "
            f"of {len(seen.amax)} quantizers; if accuracy is lost, compare quantization.activations.calibrator=mse and "
            "max"
        )
    if seen.dead:
        yield (
            f"{len(seen.dead)} of {len(seen.amax)} quantizers, {seen.dead[0]} among them, see zeros whatever the image "
            "and have a range of 1; train the model, then quantize it"
        )


def _write_report(run: Run, model: fx.GraphModule, report: QuantizationReport, seen: CalibrationReport) -> None:
    write_text(run.path("placement.csv"), report.placement.to_csv())
    if (block := typical_block(model)) is not None:
        BLOCK.write(run.folder.path, block)
    formats = {site.name: site.format for site in report.placement.activations}
    rows = []
    for name, histogram in seen.histograms.items():
        counts, edges = _coarse(*histogram)
        ends, amax = (edges[0].item(), edges[-1].item()), seen.amax[name].item()
        counted = tuple(counts.tolist())
        rows.append(Histogram(name=name, counts=counted, bin_edges=ends, amax=amax, signed=formats[name].signed))
    HISTOGRAMS.write(run.folder.path, rows)


def _coarse(counts: Tensor, edges: Tensor, bins: int = 128) -> tuple[Tensor, Tensor]:
    group = max(1, -(-len(counts) // bins))
    padded = torch.cat([counts, counts.new_zeros(-len(counts) % group)]).view(-1, group).sum(1)
    return padded, torch.arange(len(padded) + 1, dtype=edges.dtype) * (edges[1] - edges[0]) * group


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
            load_model(model, _weights(run, variant, target))
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
    state = {name: value for name, value in trained.state_dict().items() if not name.endswith(("amax", LOWEST))}
    model.load_state_dict(state, strict=False)


def take_weight_ranges(model: nn.Module, trained: fx.GraphModule) -> None:
    """Copy the weight ranges of layers that both networks quantize alike; in place."""
    formats = {site.path: site.format for site in placement_of(trained).weights}
    for site in placement_of(model).weights:
        if formats.get(site.path) == site.format:
            weight_quantizer(model, site.path).set_amax(weight_quantizer(trained, site.path).amax)


GPU = "a100"  # device of the report's bound: the first kind with 2:4 tensor cores

RECALIBRATION_IMAGES = 1024  # training images for BatchNorm if no training follows

_MASK = ".parametrizations.weight.0.mask"


def sparse_step(run: Run, float_model: nn.Module) -> nn.Module:
    """Pruned and fine-tuned, as a plain module.

    Without fine-tuning, BatchNorm is recalibrated after masks by magnitude.
    """
    spec = run.sparsity
    pattern = check_sparsity_spec(spec)
    model = copy.deepcopy(float_model)
    if pattern.kind == "channel":
        report = prune_channels(model, spec, example_inputs=run.example.to(run.device), progress=run.progress)
        write_json(run.path("sparsity.json"), asdict(report))
    finished, tuning = run.folder.done("sparse"), run.recipe.finetune
    if pattern.kind != "channel" and not finished:
        _mask(run, model, float_model, spec, pattern)
    if finished:
        load_model(model, run.path("sparse.safetensors"))
        return model.eval()
    _note(run)
    if tuning.epochs == 0:
        model.to(run.device)
        if pattern.kind == "channel" or spec.saliency == "magnitude":
            recalibrate_batchnorm(model, _recalibration_images(run))
    schedule = MaskSchedule(model, spec) if masked_layers(model) else None
    after_step = schedule.after_step if schedule is not None else None
    first = run.recipe.train.epochs
    done = train(
        run, model.train(), tuning, Variant.SPARSE, teacher=float_model, first_epoch=first, after_step=after_step
    )
    if schedule is not None:
        squash_masks(model)
    save_variant(run, Variant.SPARSE, model, **facts_of(done, run.task.metric))
    return model.eval()


def _mask(run: Run, model: nn.Module, dense: nn.Module, spec: SparsitySpec, pattern: Pattern) -> None:
    path = run.path("masked.safetensors")
    if not run.folder.done("mask"):
        report = sparsify(
            model,
            spec,
            example_inputs=run.example.to(run.device),
            batches=[x.to(run.device) for x in run.batches("train", 32, limit=spec.calibration_images)],
            progress=run.progress,
        )
        document = asdict(report) | {"at_most": _at_most(run, dense, report.masked, pattern)}

        def write() -> None:
            save_model(model, path, {"step": "mask", "recipe": run.recipe.digest()})
            write_json(run.path("sparsity.json"), document)
            run.finish("mask", density=report.density)

        run.processes.on_main(write)
        return
    masks = {key.removesuffix(_MASK): mask for key, mask in read_state_dict(path).items() if key.endswith(_MASK)}
    apply_masks(model, masks, pattern=str(pattern), **mask_options(spec))
    load_model(model, path)


def _at_most(run: Run, dense: nn.Module, masked: tuple[str, ...], pattern: Pattern) -> str:
    if str(pattern) != "2:4":
        return f"no engine is faster for {pattern}"
    precision = "fp16" if run.recipe.quantization is None else "int8"
    try:
        bound = sparse_bound(
            dense,
            run.example.to(run.device),
            masked=masked,
            device=GPU,
            precision=precision,
            batch_size=run.recipe.data.batch_size,
        )
    except (ModelError, RooflineError) as error:
        return f"how much faster 2:4 can make the network is not known: {error}"
    shapes = {path: tuple(layer_weight(dense, path).shape) for path in masked}
    large = bound.speedup_with([path for path, shape in shapes.items() if large_enough(shape)])
    return (
        f"2:4 makes the network at most {bound.speedup:.2f} times as fast ({GPU}, {precision}, batch "
        f"{bound.batch_size}, from its roofline), {large:.2f} where layers of fewer than {NOTEWORTHY_CHANNELS} "
        "channels stay dense; engines for CPUs have no 2:4 kernels (inspect model --sparsity lists the layers)"
    )


def _note(run: Run) -> None:
    path = run.path("sparsity.json")
    try:
        known = dict(read_json(path))
    except (OSError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}. Restore it, or begin the run anew (--out)") from error
    refused = (known.get("permutation") or {}).get("refused")
    notes = [known.get("at_most"), f"channels were not permuted: {refused}" if refused else None]
    if run.recipe.finetune.epochs == 0:
        second = run.sparsity.saliency == "hessian"
        done = "its weights updated" if second else "its BatchNorm statistics measured again"
        notes.append(
            f"finetune.epochs is 0: the network was not trained on, only {done} on images of the training split; a "
            "few epochs bring back most of what is lost"
        )
    run.notes += [note for note in notes if note]


def _recalibration_images(run: Run) -> Iterator[Tensor]:
    split = run.data.train
    sample = split.order(BatchPlan(batch_size=1, limit=min(RECALIBRATION_IMAGES, len(split))))
    count = max(1, len(sample) // 32)
    return (split.load(sample[i::count], epoch=None, device=run.device)[0] for i in range(count))


def zeros_of(run: Run, model: nn.Module) -> Mapping[str, Tensor]:
    path = run.path("masked.safetensors")
    if not path.is_file():
        return {}
    layers = [key.removesuffix(_MASK) for key in read_state_dict(path) if key.endswith(_MASK)]
    return {layer: layer_weight(model, layer).detach() != 0 for layer in layers}


def check_pattern(run: Run) -> None:
    pattern = check_sparsity_spec(run.sparsity)
    if pattern.kind != "nm":
        return
    layers = [key.removesuffix(_MASK) for key in read_state_dict(run.path("masked.safetensors")) if key.endswith(_MASK)]
    rows = []
    for name in (stem(variant, target) for variant, target in run.networks if variant.is_sparse):
        audit = audit_sparsity(run.path(f"{name}.onnx"), pattern.n, pattern.m)
        for layer in layers:
            row = next((r for r in audit if r.name.startswith(module_prefix(layer))), None)
            if row is None or row.violations:
                held = "is not in the file" if row is None else f"breaks {pattern} in {row.violations} groups"
                raise AuditError(f"{name}.onnx: {layer} {held}; the masks were lost on the way to the file")
            rows.append({"variant": name, **asdict(row)})
    write_json(run.path("sparsity_audit.json"), rows)
