"""Training of a quantized network."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, fx, nn

from compress.pipeline.folder import TARGETS_STEP
from compress.pipeline.run import Run, stem, weight_quantizer
from compress.pipeline.steps.ptq import calibration_images, save_further
from compress.pipeline.steps.training import facts_of, save_variant, train
from compress.quantization.calibration.calibrate import calibrate
from compress.quantization.learned import bake_weights, freeze_scales, learn_scales, normalize_weights
from compress.quantization.quantizer import LOWEST
from compress.quantization.report import placement_of
from compress.sparsity.parametrization import apply_masks, squash_masks
from compress.training.checkpoint import load_model
from compress.variants import Variant


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
