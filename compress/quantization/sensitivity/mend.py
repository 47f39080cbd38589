"""The smallest set of changes that brings a quantized network back to a metric, or to a signal to noise.

1. Changes of the whole network whose cause was found are tried: a head left float, equalization, another calibrator,
   SmoothQuant. The best is kept if it helps, and so on.
2. Formats are chosen for the noisiest layers by an integer program: the cheapest under a limit on the noise, which is
   lowered until the network, quantized anew, meets the goal.
3. Changes that are not needed for the goal are taken out again, the dearest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from compress.errors import QuantizationError
from compress.graph.inputs import Batches, Inputs
from compress.graph.layers import layers
from compress.quantization import QuantSpec, Rule
from compress.quantization.placement.insert import float_graph
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.diagnose import Diagnosis, diagnosed, noise_by_layer
from compress.quantization.sensitivity.sensitivity import (
    FLOAT,
    Effect,
    Judged,
    Probe,
    everywhere,
    format_rule,
    layer_settings,
    lowered,
    probed,
)
from compress.support.progress import NoProgress, Progress

TASK = "mend"
_NOISIEST = 16
"""Layers for which other formats than float are tried."""
_GAIN_DB = 1.0
"""Least gain for which a change of the whole network is kept."""
_MOST_NOISE = 1e6
"""Noise over signal that counts at most."""
_BASE = "base"
"""The format that a layer has already."""
_FP8 = "e4m3"
"""Kind of activations whose ranges no histogram of integers chooses."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a specification.

    Attributes:
        layer: of one layer; "" = of the whole network.
        cause: why it was tried.
        without: effect of the mended network if this change is taken out; None if not measured.
    """

    text: str
    layer: str = ""
    cause: str = ""
    without: Effect | None = None


@dataclass(frozen=True, kw_only=True)
class Mended:
    """Result of `mend`.

    Attributes:
        diagnosis: of the network as it was specified; `effect`: of the mended one.
        changes: none of them can be taken out without missing the goal.
        specs: the specification without each change, in their order.
    """

    diagnosis: Diagnosis
    spec: QuantSpec
    changes: tuple[Change, ...]
    specs: tuple[QuantSpec, ...]
    effect: Effect
    met: bool
    goal: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When a network is mended; exactly one is given.

    Attributes:
        drop: largest loss in points of the metric, or of the agreement where there are no targets.
        sqnr_db: least signal to noise of the outputs.
    """

    drop: float | None = None
    sqnr_db: float | None = None

    def met(self, effect: Effect, probe: Judged) -> bool:
        if self.sqnr_db is not None:
            return effect.sqnr_db >= self.sqnr_db
        if probe.float_score is not None and effect.score is not None:
            lost = probe.judge.drop(probe.float_score, effect.score)
        elif effect.agreement is not None:
            lost = 100 * (1 - effect.agreement)
        else:
            raise QuantizationError("without targets and classes there is no loss in points; give a least SQNR instead")
        return lost <= float(self.drop or 0.0) + 1e-9

    def text(self, probe: Judged) -> str:
        if self.sqnr_db is not None:
            return f"at least {self.sqnr_db:g} dB at the outputs"
        if probe.float_score is None:
            return f"agreement with float within {self.drop:.3g} points of float"
        return f"{probe.judge.title} within {self.drop:.3g} {probe.judge.amount} of float"


@dataclass(frozen=True, kw_only=True)
class _Step:
    change: Change
    cost: float = 1.0
    values: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


def mend(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    drop: float | None = None,
    sqnr_db: float | None = None,
    metric: Any = None,
    fixed: Collection[str] = (),
    progress: Progress | None = None,
) -> Mended:
    """Find the smallest set of changes with which a quantized network meets a goal.

    Args:
        model: float network; not changed.
        example_inputs: for the trace.
        batches: as for `quantize`; they can be read repeatedly.
        images: batches that the goal is measured on; without targets, `drop` is of the agreement with float.
        spec: target, rules and methods to begin with.
        drop: largest loss of the metric against float, in its unit (percent points).
        sqnr_db: least signal to noise of the outputs; exactly one of the two is given.
        metric: as for `sensitivity`.
        fixed: keys of the specification that stay as they are: `head`, `equalize`, `activations`, `smooth`.
        progress: is informed of each network that is tried.

    Raises:
        QuantizationError: no goal or two, no images, or nothing can be quantized.
        CalibrationError: as `quantize`.

    Examples:
        >>> mended = compress.mend(model, images[:1], batches, batches, sqnr_db=5.0)
        >>> mended.met, mended.changes  # good enough as it is
        (True, ())
    """
    goal = Goal(drop=drop, sqnr_db=sqnr_db)
    if (drop is None) == (sqnr_db is None):
        raise QuantizationError("mend takes one goal: drop (points of the metric), or sqnr_db")
    bars, batches = progress or NoProgress(), list(batches)
    bars.start(TASK, 0)
    probe, spec = probed(model, example_inputs, batches, images, spec or QuantSpec(), metric)
    bars.advance(TASK, 1)
    found = diagnosed(probe, example_inputs, spec, bars)
    mended = _Work(spec, example_inputs, batches, probe, found, goal, bars).mended(fixed)
    bars.finish(TASK)
    return mended


@dataclass
class _Work:
    """Tries specifications; each is measured once."""

    spec: QuantSpec
    example: Inputs
    batches: list[Any]
    probe: Probe
    found: Diagnosis
    goal: Goal
    bars: Progress

    def __post_init__(self) -> None:
        self.tried = {repr(self.spec): self.found.quantized}

    def quantized(self, spec: QuantSpec) -> Probe:
        probe = copy(self.probe)
        probe.qmodel = quantize(self.probe.model, self.example, self.batches, spec=spec)
        self.bars.advance(TASK, 1)
        return probe

    def effect(self, spec: QuantSpec) -> Effect:
        if repr(spec) not in self.tried:
            self.tried[repr(spec)] = self.quantized(spec).effect()
        return self.tried[repr(spec)]

    def met(self, steps: list[_Step]) -> bool:
        return self.goal.met(self.effect(_applied(self.spec, steps)), self.probe)

    def mended(self, fixed: Collection[str]) -> Mended:
        steps: list[_Step] = []
        if not self.met(steps):
            steps = self._whole(
                [step for step in _whole_changes(self.spec, self.found) if not step.values.keys() & set(fixed)]
            )
            if not self.met(steps):
                steps += self._layers(steps)
            steps = self._needed(steps)
        spec = _applied(self.spec, steps)
        specs = tuple(_applied(self.spec, [other for other in steps if other is not step]) for step in steps)
        changes = [replace(step.change, without=self.effect(own)) for step, own in zip(steps, specs, strict=True)]
        return Mended(
            diagnosis=self.found,
            spec=spec,
            changes=tuple(changes),
            specs=specs,
            effect=self.effect(spec),
            met=self.met(steps),
            goal=self.goal.text(self.probe),
        )

    def _whole(self, left: list[_Step]) -> list[_Step]:
        """The best change of the whole network, then the best one on top of it, and so on."""
        chosen: list[_Step] = []
        while left and not self.met(chosen):
            before = self.effect(_applied(self.spec, chosen))
            rated = []
            for step in left:
                try:
                    effect = self.effect(_applied(self.spec, [*chosen, step]))
                except QuantizationError:  # no layers that it could change
                    continue
                rated.append((self.goal.met(effect, self.probe), effect.sqnr_db - before.sqnr_db, step))
            met, gain, best = max(rated, key=lambda row: row[:2], default=(False, 0.0, left[0]))
            if not met and gain < _GAIN_DB:
                break
            chosen.append(best)
            left.remove(best)
        return chosen

    def _layers(self, chosen: list[_Step]) -> list[_Step]:
        """The cheapest formats under a limit on the noise, lowered until the goal is met."""
        spec = _applied(self.spec, chosen)
        graph, _ = float_graph(self.probe.model, self.example, replace(spec, adaround=None, bias_correction=None))
        formats = _formats(spec)
        settings = {name: layer_settings(graph, own) for name, own in formats.items()}
        noise = {layer: {FLOAT: 0.0, _BASE: value} for layer, value in self._noise(spec).items()}
        noisiest = sorted(noise, key=lambda layer: -noise[layer][_BASE])[:_NOISIEST]
        for name, own in formats.items():
            for layer, value in self._noise(own, noisiest).items():
                noise[layer][name] = value
        work = {layer.path or layer.name: float(layer.macs or 0) for layer in layers(graph)}
        total = sum(work.values()) or 1.0
        costs = {
            layer: dict.fromkeys(row, 1.0) | {_BASE: 0.0, FLOAT: 3.0 + 20 * work.get(layer, 0.0) / total}
            for layer, row in noise.items()
        }
        limit = sum(row[_BASE] for row in noise.values())
        if self.goal.sqnr_db is not None:
            limit = min(limit, 2 * 10 ** (-self.goal.sqnr_db / 10))
        causes = {row.layer: row.causes[0].text for row in self.found.rows if row.causes}
        steps: list[_Step] = []
        for choice in lowered(noise, costs, limit / 2):
            steps = [
                _Step(
                    change=Change(text=f"{layer}: {name}", layer=layer, cause=causes.get(layer, "")),
                    cost=costs[layer][name],
                    rules=(format_rule(layer, name, settings),),
                )
                for layer, name in choice.formats.items()
                if name != _BASE
            ]
            if self.met([*chosen, *steps]):
                break
        return steps

    def _noise(self, spec: QuantSpec, chosen: Collection[str] | None = None) -> dict[str, float]:
        if spec == self.spec:
            effects = {row.layer: row.alone for row in self.found.rows}
        else:
            effects = noise_by_layer(self.quantized(spec), self.example, spec, self.bars, chosen=chosen)
        return {layer: min(effect.noise, _MOST_NOISE) for layer, effect in effects.items()}

    def _needed(self, steps: list[_Step]) -> list[_Step]:
        if self.met(steps):
            for step in sorted(steps, key=lambda step: -step.cost):
                rest = [other for other in steps if other is not step]
                steps = rest if self.met(rest) else steps
        return steps


def _applied(spec: QuantSpec, steps: Iterable[_Step]) -> QuantSpec:
    for step in steps:
        spec = replace(spec, **step.values, rules=(*spec.rules, *step.rules))
    return spec


def _whole_changes(spec: QuantSpec, found: Diagnosis) -> list[_Step]:
    kinds: dict[str, str] = {}
    for row in found.rows:
        for cause in row.causes:
            kinds.setdefault(cause.kind, f"{row.layer}: {cause.text}")
    steps = []

    def add(cause: str, text: str, key: str, value: Any) -> None:
        steps.append(_Step(change=Change(text=text, cause=cause), values={key: value}))

    own = spec.activations
    if spec.head == "quantize":
        add("the head is quantized (head: quantize)", "head: auto, which leaves a detection head float", "head", "auto")
    if "channel ranges" in kinds and not spec.equalize and spec.batchnorm == "fold":
        add(kinds["channel ranges"], "equalize: true, channels of neighbouring layers trade scale", "equalize", True)
    if "saturation" in kinds and own.calibrator in {"entropy", "percentile"} and own.kind != _FP8:
        text = "calibrator: mse, which weighs what is clipped against finer steps"
        add(kinds["saturation"], text, "activations", replace(own, calibrator="mse"))
    if "outlier channels" in kinds and spec.smooth is None:
        add(kinds["outlier channels"], "smooth: auto, outliers of channels move into the weights", "smooth", "auto")
    return steps


def _formats(spec: QuantSpec) -> dict[str, QuantSpec]:
    own = spec.activations.resolved(whole=False)
    names = {"max", "mse", "percentile"} - {own.calibrator, "mse" if own.kind == _FP8 else own.calibrator}
    found = {f"calibrator {name}": everywhere(spec, "activations", calibrator=name) for name in sorted(names)}
    if spec.weights.axis is None:
        found["a scale for each channel"] = everywhere(spec, "weights", axis=0)
    return found
