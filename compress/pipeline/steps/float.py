"""The float baseline."""

from __future__ import annotations

import torch
from torch import nn

from compress.data.classes import class_count
from compress.models.by_name import BuiltModel, build_model_with_notes
from compress.pipeline.run import Run
from compress.pipeline.steps.training import facts_of, save_variant, train
from compress.recipe.tree import Recipe
from compress.training import load_model
from compress.variants import Variant


def build_float(recipe: Recipe) -> BuiltModel:
    """Build the recipe's model, from the seed or with its weights."""
    torch.manual_seed(recipe.train.seed)
    return build_model_with_notes(recipe.model, num_classes=class_count(recipe.data), task=recipe.task)


def float_step(run: Run, built: BuiltModel) -> nn.Module:
    """Return the float baseline, trained unless `train.epochs` is 0."""
    model = built.model
    if run.folder.done(Variant.FLOAT.step):
        load_model(model, run.path(Variant.FLOAT.weights_file))
        return model.to(run.device).eval()
    run.notes += built.notes
    report = train(run, model.to(run.device), run.recipe.train, Variant.FLOAT)
    save_variant(run, Variant.FLOAT, model, **facts_of(report, run.task.metric))
    return model.eval()
