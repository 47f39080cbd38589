"""The step that trains a quantized network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

from torch import Tensor, fx, nn

from compress.pipeline.run import Run
from compress.pipeline.steps.training import facts_of, save_variant, train
from compress.quantization.learned import freeze_scales, learn_scales
from compress.quantization.weight_norm import bake_weights, normalize_weights
from compress.sparsity.parametrization import apply_masks, squash_masks
from compress.training import QATSpec, load_model
from compress.variants import Variant


def qat_step(
    run: Run,
    float_model: nn.Module,
    ptq_model: fx.GraphModule,
    variant: Variant = Variant.QAT,
    *,
    masks: Mapping[str, Tensor] | None = None,
) -> fx.GraphModule:
    """Train a calibrated network further, with the float one as its teacher if the recipe asks for distillation.

    Args:
        run: the run under way.
        float_model: teacher.
        ptq_model: calibrated network; it is not changed.
        variant: network that is made.
        masks: boolean masks of weights that stay zero, by layer path.
    """
    spec = cast(QATSpec, run.recipe.qat)
    qmodel = copy.deepcopy(ptq_model)
    if run.folder.done(variant.step):
        load_model(qmodel, run.path(variant.weights_file))
        return qmodel.eval()
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
    return qmodel.eval()
