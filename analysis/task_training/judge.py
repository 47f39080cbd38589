"""PTQ, files, and the accuracy of networks that another machine has trained: on OpenVINO and ONNX Runtime.

Each figure is appended to a file as it comes, so that the same command goes on after a stop. Torch is left out: the
float network and that after QAT were judged where they were trained. The run folders hold the files afterwards, and
`python -m compress bench FOLDER --batch-size 1` measures their latency.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compress.data.load import load_data
from compress.engines.registry import target_of
from compress.measure.bootstrap import compare_evidence
from compress.pipeline.folder import open_run
from compress.pipeline.network import stem
from compress.pipeline.run import Run
from compress.pipeline.steps.answers import answers_of
from compress.pipeline.steps.export import networks, write_file
from compress.pipeline.steps.float import build_float, float_step
from compress.pipeline.steps.judge import evaluation_batch, judge
from compress.pipeline.steps.ptq import ptq_step
from compress.pipeline.steps.qat import qat_step
from compress.recipe import Recipe, load_recipe
from compress.tasks.evidence import Evidence
from compress.variants import Variant

ENGINES = (("onnxruntime", None), ("openvino", "f32"))
VARIANTS = (Variant.FLOAT, Variant.PTQ, Variant.QAT)


def files(run: Run) -> None:
    """Write the ONNX files of a run folder that are missing, for each of its targets."""
    named = [variant.onnx_file for variant in VARIANTS]
    named += [f"{stem(variant, target)}.onnx" for variant in VARIANTS[1:] for target in run.further_targets]
    if all(run.path(name).is_file() for name in named):
        return
    network = float_step(run, build_float(run.recipe))
    calibrated = ptq_step(run, network)
    trained = qat_step(run, network, calibrated)
    models = dict(zip(VARIANTS, (network, calibrated, trained), strict=True))
    for variant, model, path, target in networks(run, models):
        if not path.is_file():
            write_file(run, variant, model, path, target)


def judged(run: Run, engines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the metric of each network on each engine, with the interval of its difference from float on the same.

    An engine is given the file of its own target where the recipe names that, else the first target's.
    """
    metric = run.task.metric
    for name, precision in (row for row in ENGINES if row[0] in engines):
        reference: Evidence | None = None
        for variant in VARIANTS:
            given = answers_of(run)
            with run.files(variant).engine(name, batch_size=evaluation_batch(run), precision=precision) as built:
                seen = judge(run, built, preprocessing=run.data.val.preprocessing, answers=given)
            file, own = run.files(variant).of(name).name, variant.is_quantized and has_own_file(run.recipe, name)
            row: dict[str, Any] = {"variant": str(variant), "engine": seen.label, "file": file, "own": own}
            row["metric"] = metric.name
            row |= {"images": seen.images}
            row |= {"values": {key: metric.shown(value) for key, value in seen.values.items()}}
            reference = reference or given.evidence
            if variant is not Variant.FLOAT and reference is not None and given.evidence is not None:
                found = compare_evidence(reference, given.evidence)
                ends = (found.difference, found.difference_low, found.difference_high)
                row |= {"difference": [metric.shown(value) for value in ends], "measurable": found.measurable}
            yield row


def has_own_file(recipe: Recipe, engine: str) -> bool:
    """Return True if a recipe's run makes a file that is placed for an engine."""
    return recipe.quantization is not None and target_of(engine) in recipe.quantization.targets


def main() -> None:
    """Judge run folders from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="as `pack` has made them")
    parser.add_argument("--out", type=Path, required=True, help="file that takes a line of JSON for each figure")
    known = [name for name, _ in ENGINES]
    parser.add_argument("--engines", nargs="+", default=known, choices=known)
    arguments = parser.parse_args()
    for folder in arguments.folders:
        recipe = load_recipe(folder / "recipe.yaml")
        data = load_data(recipe.data)
        opened = open_run(folder, recipe, "qat", resume=True, data=data.fingerprints())
        try:
            run = Run(recipe=recipe, folder=opened, data=data, resume=True)
            files(run)
            for row in judged(run, arguments.engines):
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"network": folder.name, **row}) + "\n")
                print(folder.name, row["variant"], row["engine"], row["values"], row.get("difference"), flush=True)
        finally:
            opened.release()


if __name__ == "__main__":
    main()
