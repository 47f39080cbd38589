"""The steps of each command, in order."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from compress.data.load import load_data
from compress.files import write_json
from compress.pipeline.folder import RECIPE_FILE, RunFolder, free_folder, latest_folder, open_run
from compress.pipeline.preflight import check_classifier, check_memory, check_network, check_sections
from compress.pipeline.run import Run, task_of
from compress.pipeline.steps.end_to_end import end_to_end_step
from compress.pipeline.steps.engines import audit_step, build_step, check_required
from compress.pipeline.steps.evaluate import bench_step, evaluate_step
from compress.pipeline.steps.export import export_step
from compress.pipeline.steps.quantize import ptq_step, qat_step
from compress.pipeline.steps.sparse import check_pattern, sparse_step, zeros_of
from compress.pipeline.steps.training import build_float, check_start, float_step
from compress.recipe.tree import Recipe
from compress.report.write import write_card, write_report
from compress.support.progress import NoProgress, Progress
from compress.training.distributed import SINGLE, Processes
from compress.variants import Variant


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
        zeros = zeros_of(this, quantized)
        qat_step(this, float_model, quantized, Variant.SPARSE_QAT, masks=zeros)


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
