"""The metric of float networks and of what ways of QAT have made of them, on OpenVINO f32, on several splits.

    python -m analysis.task_training.judge_ways runs/yolo-*/yolo --roots val=bccd test=bccd_test --out results/...jsonl

A root is a folder of the data whose evaluation split is judged: a way can be chosen by pictures that the figures which
are reported do not come from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.data.base import BatchPlan, Split
from compress.data.load import load_data
from compress.engines import build_engine
from compress.export.onnx import export_onnx
from compress.measure import measure_metric
from compress.meters import TaskMetric
from compress.pipeline.run import task_of
from compress.pipeline.steps.float import build_float
from compress.quantization.placement.insert import insert_quantizers
from compress.recipe import Recipe, load_recipe
from compress.training import load_model
from compress.variants import Variant

_BATCH = 8


@dataclass(frozen=True)
class Pictures:
    """A split in batches, iterable more than once."""

    split: Split

    def __iter__(self) -> Iterator[Any]:
        return iter(self.split.batches(BatchPlan(batch_size=_BATCH)))


def splits_of(recipe: Recipe, roots: Mapping[str, str]) -> dict[str, Pictures]:
    """Return the evaluation split of each root, decoded as the recipe's."""
    built_in = recipe.data.name.rpartition(":")[2]
    found = {name: load_data(replace(recipe.data, root=root, name=built_in)) for name, root in roots.items()}
    return {name: Pictures(data.val) for name, data in found.items()}


def figures(file: Path, metric: TaskMetric, splits: Mapping[str, Pictures]) -> Iterator[dict[str, Any]]:
    """Yield the metric of a file on each split."""
    for name, pictures in splits.items():
        with build_engine(file, "openvino", precision="f32") as engine:
            seen = measure_metric(engine, pictures, metric)
        values = {key: metric.shown(value) for key, value in seen.values.items()}
        yield {"split": name, "engine": seen.label, "images": seen.images, "values": values}


def networks(folder: Path, recipe: Recipe, example: Tensor) -> Iterator[tuple[Variant, nn.Module]]:
    """Yield the float network that a recipe loads, and the trained one of its run folder."""
    model = build_float(recipe).model.eval()
    yield Variant.FLOAT, model
    assert recipe.quantization is not None
    trained = insert_quantizers(model, example, recipe.quantization.for_target())
    load_model(trained, folder / Variant.QAT.weights_file)
    yield Variant.QAT, trained.eval()


def main() -> None:
    """Judge run folders of `qat_again` from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="as `pack` has made them, all of one float network")
    parser.add_argument("--roots", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="file that takes a line of JSON for each figure")
    arguments = parser.parse_args()
    roots = dict(one.split("=", 1) for one in arguments.roots)
    for number, folder in enumerate(arguments.folders):
        recipe = load_recipe(folder / "recipe.yaml")
        splits = splits_of(recipe, roots)
        metric = task_of(recipe, load_data(recipe.data)).metric
        example = next(iter(next(iter(splits.values()))))[0][:2]
        for variant, model in networks(folder, recipe, example):
            if variant is Variant.FLOAT and number:
                continue
            way = "float" if variant is Variant.FLOAT else folder.parent.name
            file = export_onnx(model, example, folder / variant.onnx_file)
            for row in figures(file, metric, splits):
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"way": way, **row}) + "\n")
                print(way, row["split"], row["values"][metric.name], flush=True)


if __name__ == "__main__":
    main()
