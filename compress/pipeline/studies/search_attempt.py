"""A point of a front, trained and timed beside float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from compress.engines import build_engine
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure.latency import time_files
from compress.models.spec import ModelSpec
from compress.pipeline.commands import run as run_recipe
from compress.pipeline.run import Run
from compress.pipeline.steps.judge import judge
from compress.recipe.tree import Recipe
from compress.search.front import Attempt, Front, Point
from compress.search.lab import quantization_of, sparsity_spec, time_ratio
from compress.search.space import sparse_layers
from compress.training.checkpoint import save_model
from compress.training.spec import TrainSpec
from compress.variants import Variant

REBUILD = "compress.search.rebuild:network"
_RUNS, _SECONDS = 200, 3.0


def attempt(run: Run, front: Front, point: Point, name: str, reference: Path) -> Attempt:
    """Fine-tune, quantize, export and measure a point; `reference` is float's ONNX file."""
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
    """Write a point's weights to `weights`; return its recipe and command."""
    network = front.network(point)
    save_model(network, weights, {"step": "search", "recipe": run.recipe.digest()})
    recipe, lab, spec = run.recipe, front.lab, front.lab.spec
    quantization = quantization_of(lab, network, point.configuration)
    present = {path for path, _ in network.named_modules()}
    sparse = [layer for layer in sparse_layers(lab.structure, point.configuration) if layer in present]
    tuning = {f.name: getattr(recipe.finetune, f.name) for f in fields(TrainSpec)}
    made = replace(
        recipe,
        model=_model(run, point, weights),
        train=TrainSpec(**tuning),
        quantization=quantization,
        sparsity=sparsity_spec(sparse) if sparse else None,
        bench=replace(recipe.bench, engines=(lab.engine,), batch_sizes=(spec.batch_size,), threads=spec.threads),
        teacher=recipe.teacher or replace(recipe.model, weights=str(run.path(Variant.FLOAT.weights_file))),
    )
    if sparse:
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
    scores = {}
    for name, path in files.items():
        with build_engine(path, engine, threads=spec.threads, precision=spec.precision) as built:
            scores[name] = judge(run, built, limit=images).values[run.task.metric.name]
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
    """Write a network with an open batch size and the run's preprocessing."""
    return export_onnx(network.cpu(), run.example, path, preprocessing=run.data.val.preprocessing)
