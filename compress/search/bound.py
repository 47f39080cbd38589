"""Corrects the model, tries smaller networks, until one keeps the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compress.search.front import START
from compress.search.lab import Figures
from compress.search.space import Configuration, Space, key_of
from compress.search.timing import Timed
from compress.search.trials import add_starts, ended, results, run_trials
from compress.support.progress import Progress

if TYPE_CHECKING:
    from optuna import Study

NEAR = (1.0, 0.97, 0.92)
"""Shares of a bound that the best networks by the models are looked for at."""

_CORRECTIONS = 3  # rounds of timing networks that the search would begin with
_SMALLER, _STEP = 6, 0.97  # networks that are tried after the trials; how far below the bound each aims


def corrected(
    timed: Timed,
    wanted: Callable[[Timed], Sequence[Configuration]],
    more: Callable[[Timed, Sequence[Configuration]], Timed],
    latency: float | None,
) -> Timed:
    """Time the model's best until one keeps the bound or none are left.

    Rounds correct too short predictions. `more` times networks; a latency of None = one round.
    """
    for turn in range(_CORRECTIONS):
        first = wanted(timed)
        near = first[: len(NEAR)]
        fresh = [c for c in (near if turn else first) if key_of(c) not in timed.samples]
        if not fresh:
            break
        timed = more(timed, fresh)
        times = [timed.samples[key].time for key in map(key_of, near) if key in timed.samples]
        if latency is None or any(time <= latency for time in times):
            break
    return timed


def go_on(
    study: Study,
    space: Space,
    best: Callable[[float], Configuration | None],
    fastest: Configuration,
    evaluate: Callable[[Configuration], Figures],
    *,
    latency: float,
    progress: Progress,
) -> None:
    """Try ever smaller networks, each the best by the models, until one keeps the bound; last of all `fastest`."""
    budget = latency
    for number in range(1, _SMALLER + 1):
        known = {key_of(configuration): (label, figures.ratio) for label, configuration, figures in results(study)}
        ratios = [ratio for label, ratio in known.values() if label.startswith(START)]
        if any(ratio <= latency for ratio in ratios):
            return
        budget *= _STEP * latency / min(ratios, default=latency)
        smaller = best(budget) if number < _SMALLER else None
        configuration = {**space.largest(), **(fastest if smaller is None else smaller)}
        if key_of(configuration) not in known:
            add_starts(study, space, {f"{START} s{number} ({budget:.2f})": configuration})
            run_trials(study, space, evaluate, count=len(ended(study)) + 1, deadline=None, progress=progress)
