"""An integer program for each budget of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compress.errors import QuantizationError
from compress.quantization.sensitivity.mixed import choose_formats
from compress.search.space import BLOCK, FORMAT, SPARSE, WIDTH, Configuration, Space

Predict = Callable[[Configuration], float]
_STEPS, _FULL = 8, 0.985


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """The predicted effect of another choice of one element.

    Attributes:
        element: such as `width layer1.0.conv1`.
        chosen: its choice.
        choice: the other one.
        time: change in times of the float network.
        distance: change of its error.
    """

    element: str
    chosen: str
    choice: str
    time: float
    distance: float


def best_within(
    space: Space, distances: Mapping[str, Mapping[str, float]], predict: Predict, budget: float
) -> Configuration | None:
    """Least sum of distances within a predicted time, or None."""
    current: dict[str, str] = space.largest()
    best: tuple[float, dict[str, str]] | None = None
    limit = budget
    for _ in range(_STEPS):
        now = predict(current)
        times = {
            element: {choice: predict({**current, element: choice}) - now for choice in space.elements[element]}
            for element in distances
        }
        least = {element: min(row.values()) for element, row in times.items()}
        shifted = {e: {c: value - least[e] for c, value in row.items()} for e, row in times.items()}
        try:
            chosen = choose_formats(distances, shifted, budget=max(limit - now - sum(least.values()), 0.0))
            current = {**current, **chosen.formats}
        except QuantizationError:
            current = {**current, **{e: min(row, key=lambda c: row[c]) for e, row in times.items()}}
        got = predict(current)
        far = _sum(distances, current)
        if got <= budget and (best is None or far < best[0]):
            best = (far, dict(current))
        if _FULL * budget <= got <= budget:
            break
        limit *= min(max(budget / got, 0.8), 1.1)
    return None if best is None else _filled(distances, predict, budget, best[1])


def _filled(
    distances: Mapping[str, Mapping[str, float]], predict: Predict, budget: float, chosen: dict[str, str]
) -> Configuration:
    """Change choices for better ones while time allows, largest gain first."""
    while True:
        gains = sorted(
            (
                (row[chosen[element]] - error, element, choice)
                for element, row in distances.items()
                for choice, error in row.items()
                if error < row[chosen[element]]
            ),
            reverse=True,
        )
        for _, element, choice in gains:
            if predict({**chosen, element: choice}) <= budget:
                chosen = {**chosen, element: choice}
                break
        else:
            return chosen


def _sum(distances: Mapping[str, Mapping[str, float]], configuration: Configuration) -> float:
    return sum(row[configuration[element]] for element, row in distances.items())


def uniform(space: Space, *, width: float = 1.0, format_: str = "", sparse: bool = False) -> Configuration:
    """One share of the channels, one format, 2:4 or not, everywhere."""
    chosen: dict[str, str] = {}
    for element, choices in space.elements.items():
        kind = element.partition(" ")[0]
        if kind == WIDTH:
            full = int(choices[0])
            chosen[element] = min(choices, key=lambda c: abs(int(c) - width * full))
        elif kind == FORMAT:
            chosen[element] = format_ if format_ in choices else choices[0]
        elif kind == SPARSE:
            chosen[element] = choices[-1] if sparse else choices[0]
        elif kind == BLOCK:
            chosen[element] = choices[0]
    return chosen


def otherwise(
    space: Space, distances: Mapping[str, Mapping[str, float]], predict: Predict, chosen: Configuration
) -> tuple[Otherwise, ...]:
    """The neighbouring choices of every element, and their effects."""
    now = predict(chosen)
    rows: list[Otherwise] = []
    for element, choices in space.elements.items():
        if len(choices) < 2 or element not in chosen:
            continue
        place = choices.index(chosen[element])
        rows += [
            Otherwise(
                element=element,
                chosen=chosen[element],
                choice=other,
                time=predict({**chosen, element: other}) - now,
                distance=distances[element][other] - distances[element][chosen[element]],
            )
            for other in choices[max(place - 1, 0) : place] + choices[place + 1 : place + 2]
        ]
    return tuple(rows)
