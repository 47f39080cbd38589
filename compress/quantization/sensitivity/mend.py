"""The smallest set of changes that brings a quantized network back to a metric, or to a signal to noise.

1. Changes of the whole network whose cause was found are tried: a head left float, equalization, another calibrator,
   SmoothQuant. The best is kept if it helps, and so on.
2. Formats are chosen for the noisiest layers: their own, another calibrator, a scale for each channel, or float. The
   noises of layers add up (`mixed`), so an integer program finds the cheapest choice under a limit on the noise, and
   the limit is lowered until the network, quantized anew, meets the goal.
3. Changes are taken out again, the dearest first, as long as the goal is met without them: none is left that is not
   needed.

16-bit quantizers are no choice: no target here runs them faster than float.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from compress.errors import QuantizationError
from compress.graph.batches import Batches
from compress.graph.inputs import Inputs
from compress.graph.layers import layers
from compress.quantization.placement.rules import LayerSettings
from compress.quantization.ptq.guard import kept
from compress.quantization.ptq.prepare import float_graph
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.diagnose import Diagnosis, diagnosed, noise_by_layer, whole_effect
from compress.quantization.sensitivity.mixed import FLOAT, choose_formats
from compress.quantization.sensitivity.probe import Effect, Probe, outputs_alone
from compress.quantization.sensitivity.sensitivity import layer_settings
from compress.quantization.spec import ActivationSpec, CalibratorName, QuantSpec, Rule, WeightSpec
from compress.support.meters import task_metric
from compress.support.progress import NoProgress, Progress

TASK = "mend"
_NOISIEST = 16
"""Layers for which other formats than float are tried."""
_LOWERED = 10
"""Times that the limit on the noise is halved."""
_GAIN_DB = 1.0
"""Least gain for which a change of the whole network is kept."""
_MOST_NOISE = 1e6
"""Noise over signal that counts at most."""
_COSTS = {"base": 0.0, "float": 3.0}
"""Cost of a format, others 1; float costs more, and the more so the larger the layer's share of the work."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a specification.

    Attributes:
        text: what it does, in words.
        layer: of one layer; "" = of the whole network.
        cause: why it was tried.
        without: effect of the mended network if this change is taken out; None if it was not measured.
    """

    text: str
    layer: str = ""
    cause: str = ""
    without: Effect | None = None


@dataclass(frozen=True, kw_only=True)
class Mended:
    """Result of `mend`.

    Attributes:
        diagnosis: of the network as it was specified.
        spec: the specification with the changes.
        changes: none of them can be taken out without missing the goal.
        specs: the specification without each change, in their order.
        effect: of the mended network.
        met: True if the goal is met.
        goal: in words.
    """

    diagnosis: Diagnosis
    spec: QuantSpec
    changes: tuple[Change, ...]
    specs: tuple[QuantSpec, ...]
    effect: Effect
    met: bool
    goal: str


Apply = Callable[[QuantSpec], QuantSpec]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A change and the function that applies it."""

    change: Change
    apply: Apply
    cost: float
    key: str = ""


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
        model: float network; not changed. Without a metric its result is one tensor of logits (N, classes).
        example_inputs: inputs that the model is traced with.
        batches: calibration data, as for `quantize`, which can be read repeatedly.
        images: batches that the goal is measured on; without targets, `drop` is of the agreement with float.
        spec: target, rules and methods to begin with.
        drop: largest loss of the metric against float, in its unit (percent points).
        sqnr_db: least signal to noise of the outputs; exactly one of the two is given.
        metric: a `TaskMetric`, or what `compress.support.meters.task_metric` takes; None = top-1 of a classifier.
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
    if (drop is None) == (sqnr_db is None):
        raise QuantizationError("mend takes one goal: drop (points of the metric), or sqnr_db")
    work = _Work(model, example_inputs, list(batches), list(images), metric, drop, sqnr_db, progress or NoProgress())
    work.fixed = frozenset(fixed)
    return work.mended(spec or QuantSpec())


class _Work:
    """Tries specifications, and remembers what they gave."""

    def __init__(
        self,
        model: nn.Module,
        example: Inputs,
        batches: list[Any],
        images: list[Any],
        metric: Any,
        drop: float | None,
        sqnr_db: float | None,
        bars: Progress,
    ) -> None:
        self.model, self.example, self.batches, self.images = model, example, batches, images
        self.metric = task_metric(metric) if metric is not None else None
        if metric is None and images:
            self.metric = outputs_alone(model, images[0])
        self.drop, self.sqnr_db, self.bars = drop, sqnr_db, bars
        self.fixed: frozenset[str] = frozenset()
        self.tried: dict[str, Effect] = {}
        self.first: Probe | None = None

    def probe(self, spec: QuantSpec) -> Probe:
        """Quantize anew, and return the network with its images."""
        qmodel = quantize(self.model, self.example, self.batches, spec=spec)
        self.bars.advance(TASK, 1)
        if self.first is None:
            self.first = Probe(self.model, qmodel, self.images, self.metric)
            return self.first
        return self.first.of(qmodel)

    def effect(self, spec: QuantSpec) -> Effect:
        """Return the effect of a specification; each is measured once."""
        key = repr(spec)
        if key not in self.tried:
            self.tried[key] = whole_effect(self.probe(spec))
        return self.tried[key]

    def met(self, effect: Effect) -> bool:
        """Return True if an effect meets the goal."""
        if self.sqnr_db is not None:
            return effect.sqnr_db >= self.sqnr_db
        return self.lost(effect) <= float(self.drop or 0.0) + 1e-9

    def lost(self, effect: Effect) -> float:
        """Return the loss in points: of the metric, or of the agreement where there are no targets."""
        if self.float_score is not None and effect.score is not None:
            return self.judge.drop(self.float_score, effect.score)
        if effect.agreement is None:
            raise QuantizationError("without targets and classes there is no loss in points; give a least SQNR instead")
        return 100 * (1 - effect.agreement)

    def mended(self, spec: QuantSpec) -> Mended:
        """Diagnose, change, and take out what is not needed."""
        self.bars.start(TASK, 0)
        probe = self.probe(spec)
        spec = kept(probe.qmodel, spec)
        self.judge, self.float_score = probe.judge, probe.float_score
        found = diagnosed(self.model, self.example, probe.qmodel, probe, spec, progress=self.bars)
        self.diagnosed = repr(spec)
        self.tried[self.diagnosed] = found.quantized
        steps: list[_Step] = []
        if not self.met(found.quantized):
            steps = self._whole(spec, found)
            if not self.met(self.effect(_applied(spec, steps))):
                steps += self._layers(_applied(spec, steps), found)
            steps = self._needed(spec, steps)
        final = _applied(spec, steps)
        specs = tuple(_applied(spec, [s for s in steps if s is not step]) for step in steps)
        changes = tuple(
            replace(step.change, without=self.effect(rest)) for step, rest in zip(steps, specs, strict=True)
        )
        self.bars.finish(TASK)
        return Mended(
            diagnosis=found, spec=final, changes=changes, specs=specs, effect=self.effect(final),
            met=self.met(self.effect(final)), goal=self._goal(),
        )  # fmt: skip

    def _goal(self) -> str:
        if self.sqnr_db is not None:
            return f"at least {self.sqnr_db:g} dB at the outputs"
        if self.float_score is None:
            return f"agreement with float within {self.drop:.3g} points of float"
        return f"{self.judge.title} within {self.drop:.3g} {self.judge.amount} of float"

    def _whole(self, spec: QuantSpec, found: Diagnosis) -> list[_Step]:
        """Choose among the changes of the whole network: the best one, then the best one on top of it."""
        chosen: list[_Step] = []
        left = [step for step in _whole_changes(spec, found) if step.key not in self.fixed]
        while left:
            before = self.effect(_applied(spec, chosen))
            gains = {}
            for step in left:
                try:
                    effect = self.effect(_applied(spec, [*chosen, step]))
                except QuantizationError:  # no layers that it could change
                    continue
                gains[step.change.text] = (self.met(effect), effect.sqnr_db - before.sqnr_db)
            if not gains or max(gains.values()) < (False, _GAIN_DB):
                return chosen
            best = max(left, key=lambda step: gains.get(step.change.text, (False, float("-inf"))))
            chosen.append(best)
            left.remove(best)
            if gains[best.change.text][0]:
                return chosen
        return chosen

    def _layers(self, spec: QuantSpec, found: Diagnosis) -> list[_Step]:
        """Choose formats for layers: the cheapest under a limit on the noise, lowered until the goal is met."""
        graph, _ = float_graph(self.model, self.example, replace(spec, adaround=None, bias_correction=None))
        settings = layer_settings(graph, spec)
        noise = {layer: {FLOAT: 0.0, "base": value} for layer, value in self._noise(spec, found).items()}
        noisiest = sorted(noise, key=lambda layer: -noise[layer]["base"])[:_NOISIEST]
        for name, other in _formats(spec).items():
            for layer, value in self._noise(other, found, noisiest).items():
                noise[layer][name] = value
        work = {layer.path or layer.name: float(layer.macs or 0) for layer in layers(graph)}
        total = sum(work.values()) or 1.0
        costs = {layer: {name: _COSTS.get(name, 1.0) + (20 * work.get(layer, 0.0) / total if name == FLOAT else 0.0)
                         for name in row} for layer, row in noise.items()}  # fmt: skip
        limit = sum(row.get("base", 0.0) for row in noise.values())
        if self.sqnr_db is not None:
            limit = min(limit, 2 * 10 ** (-self.sqnr_db / 10))
        causes = {row.layer: row.causes[0].text if row.causes else "" for row in found.rows}
        steps: list[_Step] = []
        for _ in range(_LOWERED):
            limit /= 2
            formats = choose_formats(noise, costs, noise_limit=limit).formats
            steps = [_layer_step(layer, name, settings[layer], causes.get(layer, ""), costs[layer][name])
                     for layer, name in formats.items() if name != "base"]  # fmt: skip
            try:
                if self.met(self.effect(_applied(spec, steps))):
                    return steps
            except QuantizationError:  # all layers are float
                return steps
        return steps

    def _noise(self, spec: QuantSpec, found: Diagnosis, chosen: list[str] | None = None) -> dict[str, float]:
        """Return the noise that each layer adds alone; of the network as specified it is known."""
        if repr(spec) == self.diagnosed:
            return {row.layer: min(row.alone.noise, _MOST_NOISE) for row in found.rows}
        effects = noise_by_layer(
            self.model, self.example, self.probe(spec), spec, chosen=chosen, progress=self.bars
        )  # fmt: skip
        return {layer: min(effect.noise, _MOST_NOISE) for layer, effect in effects.items()}

    def _needed(self, spec: QuantSpec, steps: list[_Step]) -> list[_Step]:
        """Return the steps without those that the goal is met without, the dearest tried first."""
        if not self.met(self.effect(_applied(spec, steps))):
            return steps
        for step in sorted(steps, key=lambda s: -s.cost):
            rest = [other for other in steps if other is not step]
            if self.met(self.effect(_applied(spec, rest))):
                steps = rest
        return steps


def _applied(spec: QuantSpec, steps: Iterable[_Step]) -> QuantSpec:
    for step in steps:
        spec = step.apply(spec)
    return spec


def _whole_changes(spec: QuantSpec, found: Diagnosis) -> list[_Step]:
    """Return the changes of the whole network that the causes suggest."""
    kinds: dict[str, str] = {}
    for row in found.rows:
        for cause in row.causes:
            kinds.setdefault(cause.kind, f"{row.layer}: {cause.text}")
    steps = []

    def add(cause: str, text: str, **keys: Any) -> None:
        change = Change(text=text, cause=cause)
        steps.append(_Step(change=change, apply=lambda s: replace(s, **keys), cost=1.0, key=next(iter(keys))))

    if spec.head == "quantize":
        add("the head is quantized (head: quantize)", "head: auto, which leaves a detection head float", head="auto")
    if "channel ranges" in kinds and not spec.equalize and spec.batchnorm == "fold":
        add(kinds["channel ranges"], "equalize: true, channels of neighbouring layers trade scale", equalize=True)
    if (
        "saturation" in kinds
        and spec.activations.calibrator in {"entropy", "percentile"}
        and not _eight_bit_float(spec)
    ):
        own = replace(spec.activations, calibrator="mse")
        add(kinds["saturation"], "calibrator: mse, which weighs what is clipped against finer steps", activations=own)
    if "outlier channels" in kinds and spec.smooth is None:
        add(kinds["outlier channels"], "smooth: auto, outliers of channels move into the weights", smooth="auto")
    return steps


def _eight_bit_float(spec: QuantSpec) -> bool:
    """Return True if activations are in FP8, whose ranges no histogram of integers chooses."""
    return spec.activations.kind == "e4m3"


def _formats(spec: QuantSpec) -> dict[str, QuantSpec]:
    """Return the specification with other formats everywhere, by name."""
    names: tuple[CalibratorName, ...] = ("max", "mse", "percentile")
    own = spec.activations.resolved(whole=False)
    found = {
        f"calibrator {name}": replace(spec, activations=replace(own, calibrator=name))
        for name in names
        if name != own.calibrator and not (_eight_bit_float(spec) and name == "mse")
    }
    if spec.weights.axis is None:
        found["a scale for each channel"] = replace(spec, weights=replace(spec.weights, axis=0))
    return found


def _layer_step(layer: str, name: str, own: LayerSettings, cause: str, cost: float) -> _Step:
    """Return the change of one layer to a format."""
    if name == FLOAT:
        rule = Rule(match=layer, enable=False)
    else:
        activations: ActivationSpec = own.activations
        weights: WeightSpec = own.weights
        if name.startswith("calibrator "):
            activations = replace(activations, calibrator=name.removeprefix("calibrator "))  # type: ignore[arg-type]
        else:
            weights = replace(weights, axis=0)
        rule = Rule(match=layer, weights=weights, activations=activations)
    change = Change(text=f"{layer}: {name}", layer=layer, cause=cause)
    return _Step(change=change, apply=lambda s: replace(s, rules=(*s.rules, rule)), cost=cost)
