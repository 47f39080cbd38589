"""Mixed precision: a format for each layer, with the least noise for a cost, or the least cost for a noise.

The noises of layers that are quantized alone are nearly independent, so their powers add up, and so do the times of
layers. With one binary x for each layer and format this is an integer program:

    minimize  sum noise[l, f] x[l, f]   subject to   sum cost[l, f] x[l, f] <= budget,   sum_f x[l, f] = 1 for every l

(a multiple-choice knapsack), or with noise and cost exchanged. HAWQ-V3 (arXiv 2011.10680, section 3.4) solves it with a
second-order bound in place of the noise. The accuracy and the time of a choice are measured afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from compress.errors import QuantizationError
from compress.quantization.placement.rules import LayerSettings
from compress.quantization.spec import QuantSpec, Rule

FLOAT = "float"
"""The format of a layer that is not quantized."""

Table = Mapping[str, Mapping[str, float]]
"""A number for each layer and format: table[layer][format]."""

_Rows = Sequence[NDArray[np.float64]]
"""A number for each option of each layer."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A format for every layer.

    Attributes:
        formats: format of each layer.
        noise: sum over layers of the power of the noise over that of the signal.
        cost: sum over layers, in the unit of the cost table.
    """

    formats: Mapping[str, str]
    noise: float
    cost: float


def choose_formats(
    noise: Table, cost: Table, *, budget: float | None = None, noise_limit: float | None = None
) -> Choice:
    """The formats with the least noise within a budget, or with the least cost within a noise limit (one is given).

    `noise` is the power of the noise over that of the signal, of each layer alone in each format, `cost` is in any
    unit; formats that one of the tables lacks are not chosen.

    Raises:
        QuantizationError: both limits or none, no common format of a layer, or a limit too low.
    """
    if (budget is None) == (noise_limit is None):
        raise QuantizationError("choose_formats takes one of budget and noise_limit")
    options = {layer: [name for name in row if name in cost.get(layer, {})] for layer, row in noise.items()}
    missing = [layer for layer, names in options.items() if not names]
    if missing or not options:
        raise QuantizationError(f"no format has both a noise and a cost for {', '.join(missing) or 'any layer'}")
    noises, costs = (
        [np.array([table[layer][name] for name in names], dtype=float) for layer, names in options.items()]
        for table in (noise, cost)
    )
    if budget is not None:
        chosen = _least(noises, costs, budget, "cost")
    else:
        chosen = _least(costs, noises, float(noise_limit or 0.0), "noise")
    formats = {layer: names[place] for (layer, names), place in zip(options.items(), chosen, strict=True)}
    return Choice(
        formats=formats,
        noise=sum(noise[layer][name] for layer, name in formats.items()),
        cost=sum(cost[layer][name] for layer, name in formats.items()),
    )


def front(noise: Table, cost: Table, *, points: int = 12) -> tuple[Choice, ...]:
    """Choices from the cheapest to the one with the least noise, none of them beaten in both by another.

    Budgets lie closer together near the least cost, where each layer left float gains most.

    Raises:
        QuantizationError: as `choose_formats`.
    """
    lowest = sum(min(row[f] for f in row if f in cost[layer]) for layer, row in noise.items())
    quiet = choose_formats(noise, cost, noise_limit=lowest)
    cheap = min(sum(min(cost[layer][f] for f in noise[layer] if f in cost[layer]) for layer in noise), quiet.cost)
    found: list[Choice] = []
    for budget in cheap + (quiet.cost - cheap) * np.linspace(0, 1, max(points, 2)) ** 2:
        choice = choose_formats(noise, cost, budget=float(budget) + 1e-9 * abs(quiet.cost))
        if not found or choice.noise < found[-1].noise:
            found.append(choice)
    return tuple(found)


def _least(goals: _Rows, limited: _Rows, limit: float, what: str) -> list[int]:
    """The option of each row with the least sum of goals whose sum of limited numbers is within the limit.

    Choices are extended row by row (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11), and dropped
    if the limit is out of reach, another one has no more of both sums, or the bound is above a known choice.

    Raises:
        QuantizationError: no choice meets the limit; `what` names what is limited.
    """
    room = limit + 1e-9 * (abs(limit) or max(np.abs(row).max() for row in limited))
    least = [row.min() for row in limited]
    if sum(least) > room:
        raise QuantizationError(
            f"the limit on the {what} is {limit:.6g}, and the least that formats allow is {sum(least):.6g}"
        )
    price, known = _price(goals, limited, room)
    known += 1e-9 * (abs(known) + price * abs(room))  # what rounding may add to a bound
    priced = [(goal + price * size).min() for goal, size in zip(goals, limited, strict=True)]
    sums, sizes, chosen = np.zeros(1), np.zeros(1), []
    for row, (goal, size) in enumerate(zip(goals, limited, strict=True)):
        sums, sizes = np.add.outer(sums, goal).ravel(), np.add.outer(sizes, size).ravel()
        bound = sums + price * (sizes - room) + sum(priced[row + 1 :])
        order = np.lexsort((sums, sizes))
        order = order[(sizes[order] + sum(least[row + 1 :]) <= room) & (bound[order] <= known)]
        best = np.minimum.accumulate(sums[order])
        order = order[np.diff(best, prepend=np.inf) < 0]
        sums, sizes = sums[order], sizes[order]
        chosen.append(order)
    found, place = [], int(sums.argmin())
    for goal, order in zip(reversed(goals), reversed(chosen), strict=True):
        place, option = divmod(int(order[place]), len(goal))
        found.append(option)
    return found[::-1]


def _price(goals: _Rows, limited: _Rows, room: float) -> tuple[float, float]:
    """By bisection, the least price of the limited numbers at which a choice fits, and the sum of its goals."""
    unit = max(np.abs(row).max() for row in goals) / (max(np.abs(row).max() for row in limited) or 1.0) or 1.0
    price, low, high, known = 0.0, 1e-12 * unit, 1e12 * unit, np.inf
    for _ in range(60):
        chosen = [int(np.argmin(goal + price * size)) for goal, size in zip(goals, limited, strict=True)]
        if sum(size[i] for size, i in zip(limited, chosen, strict=True)) <= room:
            high, known = price, float(sum(goal[i] for goal, i in zip(goals, chosen, strict=True)))
        else:
            low = max(low, price)
        price = min(high, float(np.sqrt(low * high)))
    return high, known


def mixed_spec(
    spec: QuantSpec, choice: Mapping[str, str], settings: Mapping[str, Mapping[str, LayerSettings]], *, base: str
) -> QuantSpec:
    """`spec`, of format `base`, with a rule for every layer whose format is not `base`.

    `settings`: those of each format but `float`, by layer (`layer_settings`).
    """
    rules = (format_rule(layer, name, settings) for layer, name in choice.items() if name != base)
    return replace(spec, rules=(*spec.rules, *rules))


def format_rule(layer: str, name: str, settings: Mapping[str, Mapping[str, LayerSettings]]) -> Rule:
    """The rule that gives a layer a format, whose settings are those of `mixed_spec`."""
    if name == FLOAT:
        return Rule(match=layer, enable=False)
    own = settings[name][layer]
    return Rule(match=layer, weights=own.weights, activations=own.activations)


Owner = TypeVar("Owner", QuantSpec, Rule)


def everywhere(spec: QuantSpec, part: Literal["weights", "activations"], **changes: Any) -> QuantSpec:
    """`spec` with changes of its weights or of its activations, in its rules too."""

    def changed(owner: Owner) -> Owner:
        own = getattr(owner, part)
        return replace(owner, **{part: replace(own, **changes)}) if own else owner

    return replace(changed(spec), rules=tuple(map(changed, spec.rules)))
