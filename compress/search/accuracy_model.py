"""What each choice costs in accuracy by itself, from pictures alone; the costs of several choices add up.

The error that a choice adds to the network's outputs is measured with everything else as it was, after BatchNorm's
statistics were measured again. Statistics of some hundred pictures differ from those of the training, by an error that
would be counted once for every choice; so the network that nothing was taken from has them measured again, too. Errors
of choices are nearly independent, so their powers add up, as in mixed precision. The
first and second order of the loss, which need no network to be built, stand beside it for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compress.graph.inputs import flat_tensors
from compress.progress import Progress
from compress.search.criteria import channel_scores
from compress.search.lab import Lab, build, with_formats
from compress.search.network import Scores, apply, distance
from compress.search.space import FORMAT, WIDTH, Configuration
from compress.training import recalibrate_batchnorm

TASK = "accuracy model"
_MOST = 1e6  # of a choice that leaves nothing of the outputs; the integer program needs a finite number

Table = Mapping[str, Mapping[str, float]]
"""A number for each element and choice."""


@dataclass(frozen=True, kw_only=True)
class AccuracyModel:
    """Costs of choices.

    Attributes:
        distance: squared error that a choice alone adds to the outputs, over their variance.
        taylor, fisher: change of the loss by first and by second order; of widths alone.
    """

    distance: Table
    taylor: Table
    fisher: Table

    def predict(self, configuration: Configuration, by: str = "distance") -> float:
        """The sum over the choices of a configuration."""
        table: Table = getattr(self, by)
        return sum(table.get(element, {}).get(choice, 0.0) for element, choice in configuration.items())


def rate_choices(lab: Lab, *, progress: Progress) -> AccuracyModel:
    """Measure every choice alone, against the float network, on the pictures held back."""
    elements = {element: choices for element, choices in lab.space.elements.items() if len(choices) > 1}
    again = apply(lab.structure, {})
    recalibrate_batchnorm(again, lab.fit)
    with torch.no_grad():
        plain, measured_again = _outputs(lab, lab.structure.graph), _outputs(lab, again)
    progress.start(TASK, sum(len(choices) for choices in elements.values()))
    distances: dict[str, dict[str, float]] = {}
    for element, choices in elements.items():
        reference = plain if element.startswith(FORMAT) else measured_again
        for choice in choices:
            distances.setdefault(element, {})[choice] = _alone(lab, element, choice, reference)
            progress.advance(TASK)
    progress.finish(TASK)
    widths = {element: choices for element, choices in elements.items() if element.startswith(WIDTH)}
    orders = {name: channel_scores(lab.structure, name, lab.fit) for name in ("taylor", "fisher")}
    return AccuracyModel(
        distance=distances,
        taylor=_lost(lab, widths, orders["taylor"]),
        fisher=_lost(lab, widths, orders["fisher"]),
    )


def _alone(lab: Lab, element: str, choice: str, reference: list[torch.Tensor]) -> float:
    if lab.space.largest().get(element) == choice and choice not in {"int8", "int4"}:
        return 0.0
    configuration = {element: choice}
    network = with_formats(lab, build(lab, configuration, steps=0), configuration, quick=True)
    with torch.no_grad():
        far = distance(_outputs(lab, network), reference)
    return min(far, _MOST) if far == far else _MOST  # NaN differs from itself


def _lost(lab: Lab, widths: Mapping[str, tuple[str, ...]], scores: Scores) -> dict[str, dict[str, float]]:
    """Sum of the scores of the channels that each width removes, which the search's own criterion chooses."""
    table: dict[str, dict[str, float]] = {}
    for element, choices in widths.items():
        name = element.removeprefix(f"{WIDTH} ")
        order = lab.scores[name].argsort(descending=True, stable=True)
        table[element] = {choice: float(scores[name][order[int(choice) :]].sum()) for choice in choices}
    return table


def _outputs(lab: Lab, network: torch.nn.Module) -> list[torch.Tensor]:
    """Output tensors for all pictures held back."""
    rows = [[x.cpu() for x in flat_tensors(network(images))] for images in lab.held]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]
