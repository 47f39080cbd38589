"""The command `search`: a front, and its points trained and timed beside float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from compress.data.load import load_data
from compress.errors import RunError, SearchError
from compress.export.onnx import export_onnx
from compress.files import write_json, write_text
from compress.measure.latency import time_files
from compress.measure.machine import describe_machine
from compress.models import ModelSpec
from compress.pipeline.commands import run as run_recipe
from compress.pipeline.run import Run, RunFolder, open_run, read_state, recipe_from_anywhere
from compress.pipeline.steps.evaluate import judge_file
from compress.pipeline.steps.networks import build_float, float_step
from compress.recipe.tree import Recipe
from compress.report.search_page import write_search_report
from compress.search.lab import quantization_of, sparsity_of, time_ratio
from compress.search.models import channel_block
from compress.search.search import Attempt, Bound, Front, Outcome, Point, after, best, check_request, order, search
from compress.search.space import analyse, make_space
from compress.support.meters import amount_of
from compress.support.progress import NoProgress, Progress
from compress.support.text import scored
from compress.training import TrainSpec
from compress.training.checkpoint import load_model, save_model
from compress.variants import Variant

REBUILD = "compress.search.network:rebuilt"
_RUNS, _SECONDS = 200, 3.0


def attempt(run: Run, front: Front, point: Point, name: str, reference: Path) -> Attempt:
    folder = run.path(name)
    recipe, command = point_recipe(run, front, point, run.path(f"{name}.safetensors"))
    write_text(run.path(f"{name}.yaml"), recipe.to_yaml())
    run_recipe(recipe, command, folder, resume=folder.exists(), device=str(run.device), progress=run.progress)
    variants = [variant for variant in Variant if (folder / variant.onnx_file).is_file() and _wanted(command, variant)]
    files = {str(variant): folder / variant.onnx_file for variant in variants}
    scores, times, unquiet = measure_files(run, front, {"reference": reference, **files})
    metric = run.task.metric
    best = min(files, key=lambda key: (metric.drop(scores["reference"], scores[key]), times[key][1]))
    return Attempt(
        label=point.label,
        folder=name,
        variant=best,
        file=f"{name}/{files[best].name}",
        ms=times[best][0],
        ratio=times[best][1],
        score=scores[best],
        drop=metric.drop(scores["reference"], scores[best]),
        unquiet=unquiet,
    )


def point_recipe(run: Run, front: Front, point: Point, weights: Path) -> tuple[Recipe, str]:
    network = front.network(point)
    save_model(network, weights, {"step": "search", "recipe": run.recipe.digest()})
    recipe, lab, spec = run.recipe, front.lab, front.lab.spec
    quantization = quantization_of(lab, network, point.configuration)
    sparsity = sparsity_of(lab, network, point.configuration)
    tuning = {f.name: getattr(recipe.finetune, f.name) for f in fields(TrainSpec)}
    made = replace(
        recipe,
        model=_model(run, point, weights),
        train=TrainSpec(**tuning),
        quantization=quantization,
        sparsity=sparsity,
        bench=replace(recipe.bench, engines=(lab.engine,), batch_sizes=(spec.batch_size,), threads=spec.threads),
        teacher=recipe.teacher or replace(recipe.model, weights=str(run.path(Variant.FLOAT.weights_file))),
    )
    if sparsity is not None:
        return made, "prune"
    return made, "train" if quantization is None else "ptq" if recipe.qat is None else "qat"


def _model(run: Run, point: Point, weights: Path) -> ModelSpec:
    whole = {key: value for key, value in asdict(run.recipe.model).items() if key != "weights"}
    options: dict[str, Any] = {
        "model": whole,
        "image": list(run.data.val.preprocessing.input_shape),
        "configuration": dict(point.configuration),
        "task": run.recipe.task,
    }
    return ModelSpec(name=REBUILD, weights=str(weights), num_classes=run.recipe.model.num_classes, options=options)


def _wanted(command: str, variant: Variant) -> bool:
    """Whether a run's network is what its point asked for: quantized, sparse, both or neither."""
    if command == "train":
        return variant is Variant.FLOAT
    return variant.is_quantized and (variant.is_sparse or command != "prune")


def measure_files(
    run: Run, front: Front, files: Mapping[str, Path], *, images: int | None = None
) -> tuple[dict[str, float], dict[str, tuple[float, float]], str]:
    """Return each file's metric, (ms, time over `reference`'s), and why these do not compare.

    `files` include `reference`, with open batch size. `images`: None = all.
    """
    spec, engine = front.lab.spec, front.lab.engine
    options: dict[str, Any] = {"threads": spec.threads, "precision": spec.precision}
    metric = run.task.metric.name
    scores = {name: judge_file(run, path, engine, images, **options).values[metric] for name, path in files.items()}
    timed = time_files(
        files,
        engine,
        batch_size=spec.batch_size,
        threads=spec.threads,
        precisions=dict.fromkeys(files, spec.precision),
        runs=_RUNS,
        seconds=_SECONDS,
    )
    times = {name: (row.p50_ms, time_ratio(row, timed["reference"])) for name, row in timed.items()}
    return scores, times, next((row.unquiet for row in timed.values() if row.unquiet), "")


def export_open(run: Run, network: nn.Module, path: Path) -> Path:
    return export_onnx(network.cpu(), run.example, path, preprocessing=run.data.val.preprocessing)


STEP = "search"
_SCORED = 8  # points of the front whose metric is measured before fine-tuning
_IMAGES = 1024  # of the evaluation split, for those


def search_run(
    recipe: Recipe,
    out: Path,
    *,
    engine: str,
    latency: float | None = None,
    max_drop: float | None = None,
    storage: str | None = None,
    resume: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Train the baseline where needed, search, fine-tune, and check the bound on the engine.

    `latency`: largest share of float's latency, or `max_drop`: most points lost. `storage`: of trials, for several
    workers;
    None = a file in the folder. `device`: None = a GPU where there is one.
    """
    if latency is None and max_drop is None:
        raise SearchError("search takes a bound: --latency 0.5 (of the float network's) or --max-drop 1.0 (points)")
    version = check_request(engine, latency=latency, max_drop=max_drop, spec=recipe.search)
    data, built = load_data(recipe.data), build_float(recipe)
    example, _ = data.train.load([0, 1], epoch=None, device=torch.device("cpu"))
    block = channel_block(engine, version=version)
    make_space(analyse(built.model, example), recipe.search, engine, block=block)  # an empty one is refused here
    folder = open_run(out, recipe, STEP, resume=resume, data=data.fingerprints())
    run = _run(recipe, folder, data, device=device, progress=progress, resume=resume)
    try:
        model = float_step(run, built)
        write_json(run.path("environment.json"), describe_machine().to_dict())
        front = _search(run, model, engine, storage=storage, latency=latency)
        reference = export_open(run, front.lab.structure.graph, run.path("reference.onnx"))
        bound = Bound(latency=latency, max_drop=max_drop, unit=run.task.metric.unit)
        return _finish(run, front, bound, reference)
    finally:
        run.folder.release()


def _finish(run: Run, front: Front, bound: Bound, reference: Path) -> Outcome:
    scores = _scores(run, front, reference)
    attempts = _attempts(run, front, bound, reference)
    write_json(run.path("attempts.json"), [asdict(made) for made in attempts])
    chosen = best(attempts, bound)
    outcome = Outcome(
        bound=bound,
        front=front,
        metric=run.task.metric,
        scores=scores,
        attempts=tuple(attempts),
        chosen=chosen,
        images=min(_IMAGES, len(run.data.val)),
        folder=run.folder.path,
    )
    write_search_report(outcome, recipe=run.recipe)
    if chosen is None:
        raise SearchError(_missed(bound, attempts))
    run.finish(STEP, chosen=chosen.folder)
    return outcome


def search_worker(
    out: Path, *, engine: str, storage: str | None = None, device: str | None = None, progress: Progress | None = None
) -> Front:
    recipe = recipe_from_anywhere(out)
    check_request(engine, spec=recipe.search)
    state = read_state(out)
    if not state.done(Variant.FLOAT.step):
        raise RunError(f"{out} holds no trained float network yet: let the search begin its trials first")
    data, built = load_data(recipe.data), build_float(recipe)
    run = _run(recipe, state, data, device=device, progress=progress, resume=True)
    load_model(built.model, run.path(Variant.FLOAT.weights_file))
    return _search(run, built.model.to(run.device).eval(), engine, storage=storage, latency=None, role="worker")


def _run(
    recipe: Recipe, folder: RunFolder, data: Any, *, device: str | None, progress: Progress | None, resume: bool
) -> Run:
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Run(
        recipe=recipe,
        folder=folder,
        data=data,
        device=torch.device(found),
        progress=progress or NoProgress(),
        resume=resume,
    )


def _search(
    run: Run,
    model: nn.Module,
    engine: str,
    *,
    storage: str | None,
    latency: float | None,
    role: Literal["all", "worker"] = "all",
) -> Front:
    spec = run.recipe.search
    size = min(64, run.recipe.data.batch_size)
    pictures = run.batches("train", size, limit=min(spec.images, len(run.data.train)))
    return search(
        model.eval(),
        run.example.to(run.device),
        [images.to(run.device) for images in pictures],
        engine=engine,
        spec=spec,
        quantization=run.recipe.quantization,
        out=run.path(STEP),
        storage=storage,
        role=role,
        resume=run.path(STEP).exists(),
        latency=latency,
        progress=run.progress,
    )


def _scores(run: Run, front: Front, reference: Path) -> dict[str, float]:
    rows = [point for point in front.front if point.configuration]
    step = max(1, -(-len(rows) // _SCORED))
    files = {"reference": reference}
    for number, point in enumerate(rows[::step]):
        files[point.label] = export_open(run, front.quantized(point), run.path(f"{STEP}/scored-{number}.onnx"))
    scores, _, _ = measure_files(run, front, files, images=min(_IMAGES, len(run.data.val)))
    for name, path in files.items():
        if name != "reference":
            path.unlink(missing_ok=True)
    return {"float" if name == "reference" else name: score for name, score in scores.items()}


def _attempts(run: Run, front: Front, bound: Bound, reference: Path) -> list[Attempt]:
    """Fine-tune points until one keeps the bound, and what `after` goes on to then."""
    made: list[Attempt] = []
    waiting = order(front, bound)
    while waiting and len(made) < run.recipe.search.attempts:
        point = waiting.pop(0)
        made.append(attempt(run, front, point, f"network-{len(made) + 1}", reference))
        waiting = after(waiting, point, made[-1], bound)
    return made


def _missed(bound: Bound, attempts: Sequence[Attempt]) -> str:
    best = min(attempts, key=lambda made: made.ratio if bound.latency is not None else made.drop)
    return (
        f"no network keeps the bound, {bound.words}, after fine-tuning; the best of {len(attempts)} is {best.folder} "
        f"({best.label}) at {best.ratio_text()} of the float network's latency with {scored(best.drop, bound.unit)} "
        f"{amount_of(bound.unit)} lost. Raise search.attempts, search.trials or finetune.epochs, or ask for less"
    )
