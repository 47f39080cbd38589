"""Refusals before a run trains."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from compress.data.base import BatchPlan, DataSet
from compress.errors import CalibrationError, DataError, ModelError, RecipeError
from compress.export.onnx import check_export, export_onnx
from compress.export.prepare import prepare
from compress.models.by_name import BuiltModel
from compress.pipeline.folder import COMMANDS
from compress.pipeline.run import boxes_and_scores
from compress.quantization.ptq.quantize import quantize_targets
from compress.quantization.spec import QuantSpec
from compress.recipe.tree import Recipe
from compress.sparsity.eligibility import eligibility
from compress.sparsity.spec import parse_pattern
from compress.support.imports import imported, is_import_path
from compress.training.evaluate import modes_restored
from compress.training.optim import check_optimizer, check_schedule
from compress.training.passes import FeaturePairs
from compress.training.spec import TrainSpec

LONG_TRAINING = 10_000  # passes of images from which on the file is written once before the training


def check_sections(recipe: Recipe, command: str) -> None:
    """Refuse missing sections and file forms that cannot be written."""
    if command not in COMMANDS:
        raise RecipeError(f"no command {command!r}; one of: {', '.join(COMMANDS)}")
    if command in {"ptq", "qat"} and recipe.quantization is None:
        raise RecipeError(f"{command} needs a `quantization` section, and the recipe has quantization: null")
    if command == "prune" and recipe.sparsity is None:
        raise RecipeError("prune needs a `sparsity` section, such as sparsity: {pattern: '2:4'}")
    if command == "qat" and recipe.qat is None:
        raise RecipeError("qat needs a `qat` section, and the recipe has qat: null; ptq needs none")
    check_export(recipe.export)
    check_trainings(recipe, command)


def check_trainings(recipe: Recipe, command: str) -> None:
    sections: list[TrainSpec | None] = [recipe.train]
    if command == "prune":
        sections.append(recipe.finetune)
    if command in {"qat", "prune"}:
        sections.append(recipe.qat)
    for spec in sections:
        if spec is not None:
            check_optimizer(spec)
            check_schedule(spec)
            for name in filter(is_import_path, spec.augment):
                imported(name, key="augment", error=RecipeError)


def check_classifier(recipe: Recipe, built: BuiltModel, classes: int) -> None:
    """Refuse weights for another number of classes without a training to follow."""
    if recipe.train.epochs or built.weights_classes is None:
        return
    wanted, there = recipe.model.num_classes or classes, built.weights_classes
    wider = (
        f", set model.num_classes to {there} if its first {classes} are those of the data" if there > classes else ""
    )
    raise ModelError(
        f"model.weights {recipe.model.weights} classifies {built.weights_classes} classes, the model has {wanted} (the "
        f"data {classes}), and train.epochs is 0: its classifier would stay random. Give weights that were trained for "
        f"{wanted} classes{wider}, or train the new classifier with train.epochs of 1 or more"
    )


def check_memory(recipe: Recipe, world_size: int) -> None:
    data = recipe.data
    height, width = data.height_width
    needed = 12 * height * width * max(-(-data.batch_size // world_size), *recipe.bench.batch_sizes, 1)
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    if needed > there:
        raise DataError(
            f"one batch of images takes {needed / 2**30:,.1f} GiB (data.image_size {data.image_size}, data.batch_size "
            f"{data.batch_size}, bench.batch_sizes {recipe.bench.batch_sizes}), and this machine has "
            f"{there / 2**30:,.1f} GiB: make one of them smaller"
        )


def check_network(recipe: Recipe, command: str, model: nn.Module, data: DataSet) -> None:
    """Try quantization, sparsity and export untrained, with two images."""
    if recipe.export.nms:
        boxes_and_scores(recipe, data)
    if command == "train":
        return
    example = next(iter(data.train.batches(BatchPlan(batch_size=2, limit=2))))[0]
    with torch.random.fork_rng(devices=[]):
        if command == "prune" and recipe.sparsity is not None and parse_pattern(recipe.sparsity.pattern).kind == "nm":
            eligibility(model, recipe.sparsity, example_inputs=example)
        if recipe.quantization is not None:
            long = _passes(recipe, command, len(data.train)) >= LONG_TRAINING
            _try_quantization(recipe, recipe.quantization, model, example, trained=command != "ptq", long=long)


def _passes(recipe: Recipe, command: str, images: int) -> int:
    later = {"prune": (recipe.finetune, recipe.qat), "qat": (recipe.qat,)}.get(command, ())
    return images * sum(spec.epochs for spec in (recipe.train, *later) if spec is not None)


def _try_export(recipe: Recipe, qmodel: nn.Module, example: Tensor) -> None:
    spec = recipe.export
    with TemporaryDirectory() as folder:
        export_onnx(
            qmodel,
            example,
            Path(folder) / "model.onnx",
            precision=spec.precision,
            dynamic_batch=spec.dynamic_batch,
            opset=spec.opset,
            channel_scales=spec.channel_scales,
        )


def _try_quantization(
    recipe: Recipe, spec: QuantSpec, model: nn.Module, example: Tensor, *, trained: bool, long: bool
) -> None:
    quick = replace(
        spec, adaround=None, bias_correction=None if spec.bias_correction == "empirical" else spec.bias_correction
    )
    try:
        found = quantize_targets(model, example, [example], spec=quick)
    except CalibrationError:  # of an untrained network on two images: the calibration of the run will tell
        return
    for qmodel in found.values():
        if long:
            _try_export(recipe, qmodel, example)
        else:
            prepare(qmodel, example, precision=recipe.export.precision)
    if trained and recipe.qat is not None and recipe.qat.distill_features and recipe.teacher is None:
        qmodel = next(iter(found.values()))  # training follows the first target
        pairs = FeaturePairs(qmodel, model, recipe.qat.distill_features)
        with pairs.watched(), torch.no_grad(), modes_restored(model, qmodel):
            for one in (model.eval(), qmodel.eval()):
                one(example)
            pairs.distance()
