"""Which quantizers cost a network of the study its metric: groups of layers left float, and other calibrators.

All in torch.

One network is quantized and calibrated, and runs with a part of its quantizers off; each figure is the metric over the
first pictures of the evaluation split, and its difference from float on the same ones. A line of JSON follows each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.errors import RecipeError
from compress.models import build_model
from compress.pipeline.run import task_of
from compress.quantization.placement.place import place
from compress.quantization.placement.read_fx import read_fx
from compress.quantization.ptq.prepare import float_graph
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.probe import Probe
from compress.quantization.sensitivity.subset import Subset, subset_of
from compress.quantization.spec import QuantSpec, Rule
from compress.recipe import load_recipe
from compress.training import load_model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A float network with its data and its metric."""

    model: torch.nn.Module
    spec: QuantSpec
    calibration: list[torch.Tensor]
    images: list[Any]
    metric: Any

    def probe(self, spec: QuantSpec) -> Probe:
        """Return the network quantized so, ready to run with a part of its quantizers."""
        example = self.calibration[0][:2]
        return Probe(self.model, quantize(self.model, example, self.calibration, spec=spec), self.images, self.metric)


def case(folder: Path, images: int) -> Case:
    """Return the float network of a run folder."""
    recipe = load_recipe(folder / "recipe.yaml")
    if recipe.quantization is None:
        raise RecipeError(f"{folder / 'recipe.yaml'} has no quantization")
    data = load_data(recipe.data)
    model = build_model(recipe.model, num_classes=data.val.num_classes, task=recipe.task)
    load_model(model, folder / "float.safetensors")
    size = recipe.data.batch_size
    spec = recipe.quantization.for_target()
    calibration = BatchPlan(batch_size=size, limit=spec.calibration_images)
    return Case(
        model=model.eval(),
        spec=spec,
        calibration=[pictures for pictures, _ in data.train.batches(calibration)],
        images=list(data.val.batches(BatchPlan(batch_size=size, limit=min(images, len(data.val))))),
        metric=task_of(recipe, data).metric,
    )


def subsets(found: Case, groups: Sequence[str]) -> Iterator[tuple[str, Subset]]:
    """Yield all quantizers, those of weights, those of activations, and all but those of each group of layers."""
    graph, _ = float_graph(found.model, found.calibration[0][:2], found.spec)
    view = read_fx(graph)
    whole = subset_of(place(view, found.spec))
    yield "all", whole
    yield "weights alone", replace(whole, edges=frozenset())
    yield "activations alone", replace(whole, weights=frozenset())
    for group in groups:
        rules = tuple(Rule(match=pattern, enable=False) for pattern in group.split(","))
        yield (
            f"float: {group}",
            subset_of(place(view, replace(found.spec, rules=(*found.spec.rules, *rules)))),
        )


def measured(found: Case, groups: Sequence[str], calibrators: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the effect of each subset, then that of all quantizers after each other calibrator or correction."""
    probe = found.probe(found.spec)
    reference = probe.float_score or 0.0
    yield {"case": "float", "score": found.metric.shown(reference)}
    for name, subset in subsets(found, groups):
        yield _row(name, probe, subset, reference)
    for name in calibrators:
        activations: Any = {} if name == "bias_correction" else {"calibrator": name}
        changed = replace(found.spec, activations=replace(found.spec.activations, **activations))
        if name == "bias_correction":
            changed = replace(changed, bias_correction="empirical", insist=True)
        other = found.probe(changed)
        graph, _ = float_graph(found.model, found.calibration[0][:2], changed)
        yield _row(name, other, subset_of(place(read_fx(graph), changed)), reference)


def _row(name: str, probe: Probe, subset: Subset, reference: float) -> dict[str, Any]:
    effect, judge = probe.effect(subset), probe.judge
    score = effect.score or 0.0
    difference = -judge.drop(reference, score)
    shown = {"score": judge.shown(score), "difference": difference, "sqnr_db": effect.sqnr_db}
    return {"case": name, **{key: round(value, 3) for key, value in shown.items()}, "agreement": effect.agreement}


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder with recipe.yaml and float.safetensors")
    parser.add_argument("--images", type=int, default=101)
    parser.add_argument("--float", nargs="*", default=[], help="groups of layers to leave float: globs with commas")
    parser.add_argument("--calibrators", nargs="*", default=[], help="max, entropy, percentile, bias_correction")
    arguments = parser.parse_args()
    found = case(arguments.folder, arguments.images)
    for row in measured(found, arguments.float, arguments.calibrators):
        print(json.dumps({"network": arguments.folder.name, "images": arguments.images, **row}), flush=True)


if __name__ == "__main__":
    main()
