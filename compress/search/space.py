"""The choices of each element; configurations to begin with: an integer program for each budget of time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compress.errors import QuantizationError, SearchError
from compress.quantization.sensitivity import choose_formats
from compress.search import SearchSpec
from compress.search.structure import Structure

# Choice by element: {"width layer1.0.conv1": "48", "format layer1.0": "int8", "block layer1.1": "left out"}.
Configuration = Mapping[str, str]

WIDTH, FORMAT, SPARSE, BLOCK = "width", "format", "sparse", "block"
FLOAT, DENSE, SPARSE_24, KEPT, LEFT_OUT = "float", "dense", "2:4", "kept", "left out"

_SPARSE_ENGINES = {"tensorrt", "tensorrt-rtx"}


@dataclass(frozen=True, kw_only=True)
class Space:
    """All configurations of a search.

    Attributes:
        elements: choices that change least first.
        notes: what was left out, and why.
    """

    elements: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> float:
        count = 1.0
        for choices in self.elements.values():
            count *= len(choices)
        return count

    def largest(self) -> dict[str, str]:
        return {element: choices[0] for element, choices in self.elements.items()}


def make_space(structure: Structure, spec: SearchSpec, engine: str, *, block: int = 8) -> Space:
    """Return the choices that a specification allows for a network on an engine.

    Widths are multiples of `block` unless the specification names another.
    """
    elements: dict[str, tuple[str, ...]] = {}
    notes = [f"channels of {layer} stay: they {reason}" for layer, reason in structure.left.items()]
    multiple = spec.multiple or block
    for name, group in structure.groups.items():
        elements[f"{WIDTH} {name}"] = _counts(len(group.classes), spec.widths, multiple)
    for name in structure.units:
        elements[f"{FORMAT} {name}"] = spec.formats
        if spec.sparsity or (spec.sparsity is None and engine in _SPARSE_ENGINES):
            elements[f"{SPARSE} {name}"] = (DENSE, SPARSE_24)
    if spec.sparsity and engine not in _SPARSE_ENGINES:
        notes.append(f"{engine} has no kernels for 2:4, so 2:4 can cost accuracy and win no time there")
    if spec.blocks:
        elements |= {f"{BLOCK} {name}": (KEPT, LEFT_OUT) for name in structure.blocks}
    if not any(len(choices) > 1 for choices in elements.values()):
        raise SearchError(
            "the space is empty: no width, format, sparsity or block of this network can be chosen (search.widths "
            f"{spec.widths} in multiples of {multiple}, search.formats {spec.formats}, search.blocks {spec.blocks}); "
            "allow more in the recipe's `search` section" + ("; " + "; ".join(notes[:3]) if notes else "")
        )
    return Space(elements=elements, notes=tuple(notes))


def key_of(configuration: Configuration) -> str:
    return json.dumps(dict(sorted(configuration.items())))


def widths_of(configuration: Configuration) -> dict[str, int]:
    return {name: int(choice) for name, choice in part(configuration, WIDTH).items()}


def left_out(configuration: Configuration) -> set[str]:
    return {name for name, choice in part(configuration, BLOCK).items() if choice == LEFT_OUT}


def formats_of(structure: Structure, configuration: Configuration) -> dict[str, str]:
    chosen = part(configuration, FORMAT)
    return {layer: chosen.get(unit, FLOAT) for unit, layers in structure.units.items() for layer in layers}


def sparse_layers(structure: Structure, configuration: Configuration) -> list[str]:
    chosen = part(configuration, SPARSE)
    return [layer for unit, own in structure.units.items() if chosen.get(unit) == SPARSE_24 for layer in own]


def part(configuration: Configuration, kind: str) -> dict[str, str]:
    prefix = f"{kind} "
    return {
        element.removeprefix(prefix): choice for element, choice in configuration.items() if element.startswith(prefix)
    }


def _counts(size: int, shares: tuple[float, ...], multiple: int) -> tuple[str, ...]:
    """Channels that may be kept, the most first.

    >>> _counts(64, (0.75, 0.5, 0.25), 8), _counts(20, (0.75, 0.5), 8), _counts(16, (0.5,), 16)
    (('64', '48', '32', '16'), ('20', '16', '8'), ('16',))
    """
    counts = {max(multiple, round(share * size / multiple) * multiple) for share in shares}
    return tuple(str(count) for count in sorted({size, *(c for c in counts if c < size)}, reverse=True))


Predict = Callable[[Configuration], float]
_STEPS, _FULL = 8, 0.985


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """The predicted effect of another choice of one element.

    Attributes:
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
        far = sum(row[current[element]] for element, row in distances.items())
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
