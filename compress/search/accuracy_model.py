"""Cost in accuracy of each choice alone; costs add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from compress.graph.inputs import flat_tensors
from compress.quantization.placement.insert import float_graph, read_fx
from compress.quantization.placement.place import place
from compress.quantization.sensitivity import run_subset, subset_of
from compress.search.lab import Lab, build, quantization_of, with_formats
from compress.search.network import apply, distance
from compress.search.space import FLOAT, FORMAT, Configuration
from compress.support.progress import Progress
from compress.training.optim import recalibrate_batchnorm

TASK = "accuracy model"
_MOST = 1e6  # error of a choice whose outputs are not finite: the integer program needs a number


@dataclass(frozen=True, kw_only=True)
class AccuracyModel:
    """Costs of choices: squared error added to outputs, over their variance."""

    distance: Mapping[str, Mapping[str, float]]

    def predict(self, configuration: Configuration) -> float:
        return sum(self.distance.get(element, {}).get(choice, 0.0) for element, choice in configuration.items())


def rate_choices(lab: Lab, *, progress: Progress) -> AccuracyModel:
    elements = {element: choices for element, choices in lab.space.elements.items() if len(choices) > 1}
    again = apply(lab.structure, {})
    recalibrate_batchnorm(again, lab.fit)
    with torch.no_grad():
        plain, measured_again = _outputs(lab, lab.structure.graph), _outputs(lab, again)
    progress.start(TASK, sum(len(choices) for choices in elements.values()))
    distances = {element: dict.fromkeys(choices, 0.0) for element, choices in elements.items()}
    formats = [element for element in elements if element.startswith(FORMAT)]
    for name in sorted({choice for element in formats for choice in elements[element]} - {FLOAT}):
        for element, far in _formats_alone(lab, formats, name, plain):
            distances[element][name] = far
            progress.advance(TASK)
    for element in [element for element in elements if element not in formats]:
        for choice in elements[element]:
            distances[element][choice] = _alone(lab, element, choice, measured_again)
            progress.advance(TASK)
    progress.finish(TASK)
    return AccuracyModel(distance=distances)


def _formats_alone(
    lab: Lab, elements: Sequence[str], name: str, reference: list[torch.Tensor]
) -> Iterator[tuple[str, float]]:
    base = replace(lab.quantization, adaround=None, bias_correction=None)
    lab = replace(lab, quantization=base)
    network = build(lab, {}, steps=0)
    whole = with_formats(lab, network, dict.fromkeys(elements, name), quick=True)
    view = read_fx(float_graph(network, lab.fit[0][:2], base)[0])
    for element in elements:
        spec = quantization_of(lab, network, {element: name})
        subset = subset_of(place(view, spec)) if spec is not None else None
        if subset is None or not isinstance(whole, fx.GraphModule):
            yield element, 0.0
            continue
        yield element, _bounded(distance(_outputs(lab, partial(run_subset, whole, subset)), reference))


def _alone(lab: Lab, element: str, choice: str, reference: list[torch.Tensor]) -> float:
    if lab.space.largest().get(element) == choice:
        return 0.0
    with torch.no_grad():
        return _bounded(distance(_outputs(lab, build(lab, {element: choice}, steps=0)), reference))


def _bounded(far: float) -> float:
    return min(far, _MOST) if far == far else _MOST  # NaN differs from itself


def _outputs(lab: Lab, network: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    rows = [[x.cpu() for x in flat_tensors(network(images))] for images in lab.held]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]
