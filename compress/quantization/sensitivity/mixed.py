"""Mixed precision: a format for each layer, with the least noise for a cost, or the least cost for a noise.

The noises of layers that are quantized alone are nearly independent, so their powers add up (compress.quantization.
sensitivity measures them), and so do the times of layers that run one after the other. With one binary x for each layer
and format this is an integer program:

    minimize  sum noise[l, f] x[l, f]   subject to   sum cost[l, f] x[l, f] <= budget,   sum_f x[l, f] = 1 for every l

(a multiple-choice knapsack), or the same with noise and cost exchanged. HAWQ-V3 (arXiv 2011.10680, section 3.4) solves
it with a second-order bound in place of the noise. scipy's HiGHS solves a network of some hundred layers in
milliseconds. The sum of powers ranks choices; the accuracy and the time of a choice are measured afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint

from compress.errors import QuantizationError
from compress.quantization.placement.rules import LayerSettings
from compress.quantization.sensitivity.highs import solve
from compress.quantization.spec import QuantSpec, Rule

FLOAT = "float"
"""The format of a layer that is not quantized."""

Table = Mapping[str, Mapping[str, float]]
"""A number for each layer and format: table[layer][format]."""


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
    """Return the formats with the least noise within a budget, or with the least cost within a noise.

    Args:
        noise: power of the noise over that of the signal, of each layer alone in each format; 0 for float.
        cost: cost of each layer in each format, in any unit; formats that one of the tables lacks are not chosen.
        budget: largest sum of costs.
        noise_limit: largest sum of noises; exactly one of the two is given.

    Raises:
        QuantizationError: both limits or none, no common format of a layer, or a limit too low.
    """
    if (budget is None) == (noise_limit is None):
        raise QuantizationError("choose_formats takes one of budget and noise_limit")
    options = [(layer, name) for layer in noise for name in noise[layer] if name in cost.get(layer, {})]
    missing = [layer for layer in noise if layer not in {known for known, _ in options}]
    if missing or not options:
        raise QuantizationError(f"no format has both a noise and a cost for {', '.join(missing) or 'any layer'}")
    noises = np.array([noise[layer][name] for layer, name in options])
    costs = np.array([cost[layer][name] for layer, name in options])
    goal, limited = (noises, costs) if budget is not None else (costs, noises)
    limit = budget if budget is not None else noise_limit
    chosen = _solve(goal, limited, float(limit or 0.0), [layer for layer, _ in options])
    if chosen is None:
        least = sum(min(limited[i] for i, (own, _) in enumerate(options) if own == layer) for layer in noise)
        name = "cost" if budget is not None else "noise"
        raise QuantizationError(
            f"the limit on the {name} is {limit:.6g}, and the least that formats allow is {least:.6g}"
        )
    return Choice(
        formats={layer: name for (layer, name), on in zip(options, chosen, strict=True) if on},
        noise=float(noises[chosen].sum()),
        cost=float(costs[chosen].sum()),
    )


def front(noise: Table, cost: Table, *, points: int = 12) -> tuple[Choice, ...]:
    """Return choices from the cheapest to the one with the least noise, none of them beaten in both by another.

    Args:
        noise: as for `choose_formats`.
        cost: as for `choose_formats`.
        points: number of budgets, from the least cost to that of the least noise, closer together near the least cost,
            where each layer left float gains most.

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


def _solve(
    goal: NDArray[np.float64], limited: NDArray[np.float64], limit: float, owners: Sequence[str]
) -> NDArray[np.bool_] | None:
    """Return the binary choice of one option for each owner with the least goal; None if the limit cannot be met."""
    rows = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    one_each = np.zeros((len(rows), len(owners)))
    for column, owner in enumerate(owners):
        one_each[rows[owner], column] = 1
    # Noises span many powers of ten: in units of the limit and of the largest goal the solver's tolerance is fine
    unit = abs(limit) or float(np.abs(limited).max()) or 1.0
    slack = limit / unit + 1e-12
    result = solve(
        goal / (np.abs(goal).max() or 1.0),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(limited[None] / unit, -np.inf, slack)],
        integrality=np.ones(len(owners)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    return None if result.x is None else np.asarray(result.x > 0.5)


def mixed_spec(
    spec: QuantSpec, choice: Mapping[str, str], settings: Mapping[str, Mapping[str, LayerSettings]], *, base: str
) -> QuantSpec:
    """Return `spec` with a rule for every layer whose format is not `base`, for `ptq` and `qat`.

    Args:
        spec: specification of the format `base`, in which all layers are quantized.
        choice: format by layer.
        settings: settings of each format but `float`, by layer (`layer_settings`).
        base: name of the format of `spec` itself.
    """
    rules = []
    for layer, name in choice.items():
        if name == FLOAT:
            rules.append(Rule(match=layer, enable=False))
        elif name != base:
            own = settings[name][layer]
            rules.append(Rule(match=layer, weights=own.weights, activations=own.activations))
    return replace(spec, rules=(*spec.rules, *rules))


def with_weight_bits(spec: QuantSpec, num_bits: int) -> QuantSpec:
    """Return `spec` with weights of `num_bits` everywhere, in its rules too."""
    rules = tuple(
        replace(rule, weights=replace(rule.weights, num_bits=num_bits)) if rule.weights else rule for rule in spec.rules
    )
    return replace(spec, weights=replace(spec.weights, num_bits=num_bits), rules=rules)
