"""Detectors in sizes: INT8's cost by size, beside Ultralytics' figures. Every stage goes on after a stop.

    python -m analysis.task_training.sizes train --data scenes --sizes n    # float, PTQ, QAT and their files
    python -m analysis.task_training.sizes judge --data scenes              # mAP of the files on engines
    python -m analysis.task_training.sizes table                            # the rows so far

`judge` compares with the float network in torch, of which `train` keeps the boxes beside each run, so that it takes the
files alone to another machine. Speed is that of analysis/cuda_engine, `--networks yolo_n:32 ... --baseline`.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import compress
from analysis.common.recipes import RecipeRun, run_all
from analysis.common.study import (
    Row,
    append_row,
    command_line,
    listed,
    newest_rows,
    option,
    software,
    study_options,
    table,
)
from compress.data.base import BatchPlan, DataSet
from compress.engines import Engine
from compress.engines.registry import engine_availability, target_of
from compress.files import write_text
from compress.measure.accuracy import compare_evidence, measure_metric
from compress.pipeline.run import stem, task_of
from compress.recipe.tree import Recipe
from compress.tasks.detection import Detections
from compress.training.loop import has_volumes
from compress.training.passes import autocast

# Points of mAP50-95 that PTQ and QAT cost YOLO26 on COCO with TensorRT: Ultralytics, pull request 26093.
PEERS = {"n": (-0.98, -0.97), "s": (-3.82, -0.84), "m": (-5.73, -1.32), "l": (-5.51, -1.33)}
_SKIPPED, _TIMED, _BOXES = 8, 24, "float_boxes.pt"


def main() -> None:
    o = study_options(
        __doc__,
        option("stage", choices=("train", "judge", "table")),
        option("--sizes", nargs="+", choices=PEERS, default=list(PEERS)),
        option("--recipe", default="yolo-scenes", help="name or path"),
        option("--data", default="scenes", help="folder of the images"),
        option("--seconds", type=float, help="of float training: sets the epochs by a few timed steps"),
        option("--set", action="append", default=[], help="key=value for the recipe"),
        option("--engines", nargs="+", default=["cuda", "openvino", "onnxruntime"]),
        option("--limit", type=int, help="images to judge"),
        out="runs/sizes",
    )
    for size in o.sizes:
        folder = o.out / f"{Path(o.recipe).stem}-{size}"
        begun = o.stage == "judge" and folder.is_dir()
        if o.stage == "train" or (begun and not (folder / _BOXES).is_file()):  # stopped before its end
            train(o, size, folder)
        if begun:
            judge(o, size, folder)
    if o.stage == "table":
        print(write(o))


def train(o: argparse.Namespace, size: str, folder: Path) -> None:
    overrides = [f"data.root={o.data}", f"model.options.size={size}", *o.set]
    run_all([planned(o.recipe, overrides, folder, o.seconds)], o.out)
    recipe = compress.load_recipe(str(folder / "recipe.yaml"))
    data = compress.load_data(recipe.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with compress.TorchEngine(
        compress.load(folder, variant="float"), data.val.preprocessing.input_shape, device=device
    ) as engine:
        torch.save(boxes_of(judged(engine, recipe, data, o.limit)), folder / _BOXES)


def planned(recipe: str, overrides: Sequence[str], folder: Path, seconds: float | None) -> RecipeRun:
    """A run whose float training takes `seconds`; one that has begun goes on with the epochs that it has."""
    if folder.is_dir():
        recipe = str(folder / "recipe.yaml")
    elif seconds:
        epochs = epochs_in(compress.load_recipe(recipe, overrides), seconds)
        lengths = {"train.epochs": epochs, "qat.epochs": max(2, epochs // 5), "train.evaluate_every": epochs}
        overrides = [*overrides, *(f"{key}={value}" for key, value in lengths.items())]
    return RecipeRun(label=folder.name, recipe=recipe, command="qat", overrides=overrides)


def epochs_in(recipe: Recipe, seconds: float) -> int:
    """Return the epochs of float training that take `seconds` beside what this machine does now, 3 to 100."""
    data, device = compress.load_data(recipe.data), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = task_of(recipe, data)
    model = compress.build_model(recipe.model, num_classes=len(data.val.labels), task=recipe.task).to(device).train()
    layout = torch.contiguous_format if has_volumes(model) else torch.channels_last
    model.to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    plan = BatchPlan(batch_size=recipe.data.batch_size, epoch=0, drop_last=True)
    skipped = min(_SKIPPED, (steps := min(_SKIPPED + _TIMED, data.train.steps(plan))) // 3)
    start = time.monotonic()
    for step, (images, targets) in enumerate(islice(data.train.batches(plan, device=device), steps)):
        with autocast(device, recipe.train.precision):
            outputs = model(images.contiguous(memory_format=layout))
        task.loss(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == skipped - 1:
            float(next(model.parameters()).detach().sum())  # waits for the GPU
            start = time.monotonic()
    float(next(model.parameters()).detach().sum())
    each = (time.monotonic() - start) / (steps - skipped)
    return min(100, max(3, int(seconds / (each * data.train.steps(plan)))))


def judged(engine: Engine, recipe: Recipe, data: DataSet, limit: int | None) -> Detections:
    task = task_of(recipe, data)
    held = task.metric.make()
    assert isinstance(held, Detections)
    plan = BatchPlan(batch_size=32, limit=limit)
    measure_metric(engine, data.val.batches(plan), replace(task.metric, make=lambda: held))
    return held


def boxes_of(held: Detections) -> list[list[dict[str, torch.Tensor]]]:
    return [[{name: torch.from_numpy(part) for name, part in rows.items()} for rows in pair] for pair in held._images]


def judge(o: argparse.Namespace, size: str, folder: Path) -> None:
    recipe = compress.load_recipe(str(folder / "recipe.yaml"), [f"data.root={o.data}"])
    data = compress.load_data(recipe.data)
    kept = torch.load(folder / _BOXES, weights_only=True)[: o.limit]
    found, truth = zip(*kept, strict=True)
    reference = Detections(data.val.labels, list)
    reference.update(found, truth)
    done = newest_rows(o.out / "rows.jsonl", "key")
    available = {found.name for found in engine_availability() if found.available}
    for engine in [name for name in o.engines if name in available]:
        for variant in ("float", "ptq", "qat"):
            key, names = f"{folder.name} {engine} {variant}", (stem(variant, target_of(engine)), variant)
            files = [file for name in names if (file := folder / f"{name}.onnx").is_file()]
            if key in done or not files or (variant == "float" and engine == "cuda"):
                continue
            batch, precision = (32, None) if engine == "cuda" else (None, "f32" if engine == "openvino" else None)
            options: dict[str, Any] = {"plan": str(o.out / "plan.json"), "floats": "layers"} if engine == "cuda" else {}
            with compress.build_engine(files[0], engine, batch_size=batch, precision=precision, **options) as made:
                seen = judged(made, recipe, data, len(kept))
                row: Row = {"key": key, "run": folder.name, "size": size, "variant": variant, "engine": made.info.label}
            same = all(
                torch.equal(mine["boxes"], own["boxes"])
                for (_, mine), (_, own) in zip(kept, boxes_of(seen), strict=True)
            )
            row |= asdict(compare_evidence(reference, seen)) | {
                "float": reference.compute()["map"],
                "same_truth": same,
                "epochs": [recipe.train.epochs, recipe.qat.epochs if recipe.qat else 0],
                "software": software("torch", "openvino", "onnxruntime"),
            }
            append_row(o.out / "rows.jsonl", row)
            print(key, f"{100 * row['value']:.2f}, {_points(row)} points", flush=True)


def _points(row: Row) -> str:
    return f"{100 * row['difference']:+.2f} ({100 * row['difference_low']:+.2f} to {100 * row['difference_high']:+.2f})"


def write(o: argparse.Namespace) -> str:
    rows = list(newest_rows(o.out / "rows.jsonl", "key").values())
    lines = ["# INT8's cost by the size of a detector", "", "mAP50-95 of float in torch, and points to it.", ""]
    lines += table(["run", "engine", "images", "float", "PTQ", "QAT", "YOLO26: PTQ", "QAT", "epochs"], _cells(rows))
    lines += ["", *sorted({f"{row['engine']}: {listed(row['software'])}." for row in rows}), f"`{command_line()}`", ""]
    return write_text(o.out / "sizes.md", "\n".join(lines)).read_text(encoding="utf-8")


def _cells(rows: list[Row]) -> Iterator[list[str]]:
    pairs = dict.fromkeys((row["run"], row["engine"]) for row in rows)
    for run, engine in pairs:
        of = {row["variant"]: row for row in rows if (row["run"], row["engine"]) == (run, engine)}
        any_row = next(iter(of.values()))
        peers = [f"{points:+.2f}" for points in PEERS[any_row["size"]]]
        cost = [_points(of[variant]) if variant in of else "" for variant in ("ptq", "qat")]
        epochs = " + ".join(map(str, any_row["epochs"]))
        yield [run, engine, str(any_row["images"]), f"{100 * any_row['float']:.2f}", *cost, *peers, epochs]


if __name__ == "__main__":
    main()
