"""The steps of each command, in order, and refusals before a run trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from compress.data.base import BatchPlan, DataSet
from compress.data.load import load_data
from compress.errors import CalibrationError, DataError, ModelError, RecipeError
from compress.export.onnx import check_export, export_onnx, prepare
from compress.files import write_json
from compress.graph.modules import modes_restored
from compress.models.by_name import BuiltModel
from compress.pipeline.run import (
    COMMANDS,
    RECIPE_FILE,
    Run,
    RunFolder,
    boxes_and_scores,
    free_folder,
    latest_folder,
    open_run,
    task_of,
)
from compress.pipeline.saved import end_to_end_step
from compress.pipeline.steps.evaluate import bench_step, evaluate_step
from compress.pipeline.steps.export import audit_step, build_step, check_required, export_step
from compress.pipeline.steps.networks import (
    build_float,
    check_pattern,
    check_start,
    float_step,
    ptq_step,
    qat_step,
    sparse_step,
    zeros_of,
)
from compress.quantization import QuantSpec
from compress.quantization.ptq.quantize import quantize_targets
from compress.recipe.tree import Recipe
from compress.report.document import write_card, write_report
from compress.sparsity import parse_pattern
from compress.sparsity.eligibility import eligibility
from compress.support.imports import imported, is_import_path
from compress.support.process import memory_bytes
from compress.support.progress import NoProgress, Progress
from compress.training import TrainSpec
from compress.training.distributed import SINGLE, Processes
from compress.training.optim import check_optimizer, check_schedule
from compress.training.passes import FeaturePairs
from compress.variants import Variant

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
    there = memory_bytes()
    if there is not None and needed > there:
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
    quick = replace(  # without what looks at images, which an untrained network's two do not tell
        spec,
        adaround=None,
        smooth=None if spec.smooth == "auto" else spec.smooth,
        bias_correction="analytic" if spec.bias_correction == "analytic" else None,
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


def run(
    recipe: Recipe,
    command: str,
    out: Path | str,
    *,
    resume: bool = False,
    device: str | None = None,
    start: Path | None = None,
    processes: Processes = SINGLE,
    progress: Progress | None = None,
) -> RunFolder:
    """Run all steps of `command`, from the baseline to the report.

    Args:
        recipe: of `load_recipe`.
        command: `train` (baseline only), `ptq`, `qat`, or `prune` (sparse, and sparse INT8 with a `quantization`
            section).
        out: run folder.
        resume: go on with the run in `out`.
        device: `cpu` or `cuda`; None = a GPU where there is one.
        start: a finished run, `train` or any other, whose float network is taken over; None = it is trained.
        processes: of torchrun; rank 0 exports, measures and writes.
        progress: listener.

    Returns:
        The folder, with metrics.json, report.md and report.html.

    Examples:
        >>> folder = compress.run(compress.load_recipe("quickstart"), "qat", out="runs/mine")  # doctest: +SKIP
    """
    check_sections(recipe, command)
    check_memory(recipe, processes.world_size)
    place = processes.on(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = Path(out)
    data = load_data(recipe.data)
    task = task_of(recipe, data)
    built = build_float(recipe)  # before the folder: a model that cannot be built leaves none
    check_classifier(recipe, built, len(data.val.labels))
    check_network(recipe, command, built.model, data)  # refused now and not after an hour of training
    check_start(start, recipe, data)
    folder = processes.on_main(lambda: open_run(out, recipe, command, resume=resume, data=data.fingerprints()))
    bars = progress or NoProgress()
    this = Run(recipe, folder, data, place, processes=processes, progress=bars, resume=resume, start=start)
    this.task = task
    try:
        _make_networks(this, command, float_step(this, built))
        if processes.is_main:
            _measure(this)
    finally:
        folder.release()
    return folder


def _make_networks(this: Run, command: str, float_model: nn.Module) -> None:
    this.networks[Variant.FLOAT, None] = float_model
    if command in {"ptq", "qat"}:
        quantized = ptq_step(this, float_model)
        if command == "qat":
            qat_step(this, float_model, quantized)
    if command == "prune":
        _prune(this, float_model)


def _prune(this: Run, float_model: nn.Module) -> None:
    this.networks[Variant.SPARSE, None] = sparse = sparse_step(this, float_model)
    if this.recipe.quantization is None:
        return
    ptq_step(this, float_model)
    quantized = ptq_step(this, sparse, Variant.SPARSE_PTQ)
    if this.recipe.qat is not None:
        qat_step(this, float_model, quantized, Variant.SPARSE_QAT, masks=zeros_of(this, quantized))


def _measure(this: Run) -> None:
    export_step(this)
    if Variant.SPARSE in this.variants:
        check_pattern(this)
    build_step(this, this.variants)
    audit_step(this, this.variants)
    evaluate_step(this)
    bench_step(this)
    end_to_end_step(this)
    if notes := this.all_notes():
        write_json(this.path("notes.json"), notes)
    this.progress.start("report", 0)
    write_report(this.folder.path)
    this.progress.finish("report")
    write_card(this.folder.path)
    check_required(this)


def default_folder(
    recipe_name: str, command: str, *, resume: bool, parent: Path | str = "runs", recipe: Recipe | None = None
) -> Path:
    """`runs/<recipe>-<command>`, numbered if it exists; with `resume` the latest, if possible of `recipe`."""
    path = Path(recipe_name)
    stem = path.parent.name.removesuffix("-train") if path.name == RECIPE_FILE and path.parent.name else path.stem
    name = f"{stem}-{command}"
    return latest_folder(Path(parent), name, recipe) if resume else free_folder(Path(parent), name)
