"""Which layers stay float so that a file is faster on an engine and keeps a floor of accuracy.

Layers of a kind, then groups of layers that are alike, are left float in turn with the file in which they are not. The
fastest choice under a limit on the noise is built; the limit is bisected.
"""

from __future__ import annotations

import glob
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.engines.registry import build_engine
from compress.errors import CalibrationError, CompressWarning, QuantizationError
from compress.export.onnx import export_onnx
from compress.files import cache_folder, write_json
from compress.graph.inputs import model_inputs
from compress.measure.latency import RUNS_PER_TURN, Latency, latency_ratio, paired_interval, time_files
from compress.onnx_ptq.quantize import QuantizedFile, quantize_onnx_file
from compress.onnx_ptq.source import feeds, inputs_of_file, load_source, one_image
from compress.pipeline.run import read_kept
from compress.quantization import QuantSpec, Rule
from compress.quantization.placement.view import GraphView
from compress.quantization.sensitivity import FLOAT, Effect, Goal, Judged, lowered, metric_for, sqnr, targets_of
from compress.support.process import core_count, processor_name
from compress.support.progress import NoProgress, Progress

TASK = "tune"
LEAST_GAIN = 0.02  # of float's time, that a quantized file must save to be recommended
_QUANTIZED = "quantized"
_TIE = 1e-9  # milliseconds by which a layer is rather quantized
_HELD, _FEW = 5, 2  # one batch of so many is held back; trials are calibrated with so many
_MOST_NOISE = 1e6
_RUNS, _SECONDS, _TURNS = 1000, 1.0, 6  # most runs and seconds of a quick file; least turns that say which is faster
# Choices that are built at the end where the rules' file keeps the floor, and where it does not.
_BUILDS, _SEARCHED = 1, 4


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that are alike; `gain_ms` is saved if they are float, None if not tried."""

    pattern: str
    layers: tuple[str, ...]
    kind: str = ""
    gain_ms: float | None = None
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Form:
    """The file `float`, `rules` or `tuned`; `ratio` is its time over float's."""

    label: str
    path: Path
    effect: Effect
    kept: bool
    ms: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The recommended file, the best quantized one, and what was tried."""

    choice: str
    path: Path
    why: str
    goal: str
    images: int
    minutes: float
    forms: tuple[Form, ...]
    groups: tuple[Group, ...]
    quantized: QuantizedFile


def choices(groups: Iterable[Group]) -> Iterator[tuple[Group, ...]]:
    """Groups to leave float: the fastest choice, then the fastest under less and less noise."""
    tried = {group.pattern: group for group in groups if group.gain_ms is not None}
    gains = {name: group.gain_ms or 0.0 for name, group in tried.items()}
    cost = {name: {FLOAT: max(0.0, -gain) + _TIE, _QUANTIZED: max(0.0, gain)} for name, gain in gains.items()}
    noise = {name: {FLOAT: 0.0, _QUANTIZED: group.noise} for name, group in tried.items()}
    last: list[str] | None = None
    for choice in lowered(noise, cost, sum(group.noise for group in tried.values())) if tried else ():
        names = [name for name, chosen in choice.formats.items() if chosen == FLOAT]
        if names != last:
            yield tuple(tried[name] for name in names)
        last = names


def tune(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    *,
    out: Path | str,
    images: Iterable[Any] | None = None,
    spec: QuantSpec | None = None,
    engine: str | None = None,
    minutes: float = 5.0,
    drop: float | None = None,
    sqnr_db: float | None = None,
    metric: Any = None,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Tuned:
    """Choose the layers that stay float by their time on an engine, with a floor of accuracy.

    Args:
        model: float ONNX file, or a network, exported beside `out`.
        batches: as for `quantize_onnx`.
        out: the tuned file is `<name>.tuned.onnx`.
        images: for the floor; None = every fifth batch, which calibration does not see.
        spec: as there.
        engine: None = the target's.
        minutes: after which no group is tried.
        drop: of `mend`.
        sqnr_db: of `mend`.
        metric: of `mend`.
        precision: as there.
        progress: is informed of each group.

    Examples:
        >>> found = compress.tune("float.onnx", batches, out="new.onnx", sqnr_db=5.0, engine="openvino")
        >>> found.choice in ("float", "rules", "tuned")
        True
    """
    if (drop is None) == (sqnr_db is None) or not 0 < minutes < math.inf:
        raise QuantizationError("tune takes one floor, drop (points of the metric) or sqnr_db, and minutes above 0")
    data, out = list(batches), Path(out)
    held, step = list(images or ()), min(_HELD, len(data))
    if images is None and step > 1:
        held = data[step - 1 :: step]
        data = [batch for place, batch in enumerate(data) if place % step != step - 1]
    if not data or not held:
        raise CalibrationError(
            "tuning needs two batches of images or more, because one of five is held back to judge accuracy: give more"
        )
    if isinstance(model, nn.Module):
        example = tuple(x[:1] for x in model_inputs(model, data[0]))
        model = export_onnx(model, example, out.with_name(f"{out.stem}.float.onnx"))
    spec = spec or QuantSpec()
    goal, path = Goal(drop=drop, sqnr_db=sqnr_db), Path(model)
    with TemporaryDirectory(prefix="compress-tune-") as folder:
        trial, own = Path(folder) / "trial.onnx", engine or spec.only_target
        return _Work(path, spec, own, data, goal, trial, minutes, precision).tuned(held, metric, out, progress)


def alike(view: GraphView, layers: Iterable[str]) -> list[Group]:
    """Groups of layers, those with most to compute first."""
    wanted, found, work, kinds = set(layers), dict[str, list[str]](), dict[str, int](), dict[str, str]()
    for node in view.nodes:
        if node.layer not in wanted:
            continue
        wanted.remove(node.layer)
        weight = node.parameters.weight() if node.parameters else None
        shapes = [list(x.shape[1:]) if x.shape else [] for x in (*node.inputs, node)]
        form = [] if weight is None else list(weight.shape)
        pattern = f"{node.kind} {shapes} {form} > {' '.join(sorted({user.kind for user in node.consumers}))}"
        found.setdefault(pattern, []).append(node.layer)
        work[pattern] = work.get(pattern, 0) + math.prod(shapes[-1]) * math.prod(form[1:])
        depthwise, pixel = form[1:2] == [1], math.prod(shapes[-1][1:]) == 1
        kinds[pattern] = node.kind + " depthwise" * depthwise + " of a pixel" * pixel
    return [
        Group(pattern=name, layers=tuple(found[name]), kind=kinds[name])
        for name in sorted(found, key=lambda name: -work[name])
    ]


@dataclass
class _Work:
    path: Path
    spec: QuantSpec
    engine: str
    data: list[Any]
    goal: Goal
    trial: Path
    minutes: float
    precision: str

    def tuned(self, held: list[Any], metric: Any, out: Path, bars: Progress | None) -> Tuned:
        self.start, self.bars, self.slowest_ms = time.monotonic(), bars or NoProgress(), 0.0
        inputs = inputs_of_file(source := load_source(self.path))
        self.pieces = [list(feeds([batch], inputs)) for batch in held]
        first = self.pieces[0][0]
        self.feed = one_image(source.proto, first) or first
        # The reference is the float file in float32: an engine that computes it in fp16 may lose accuracy itself.
        outputs = list(self.outputs(self.path, "onnxruntime"))
        targets = [target for batch in held for target in targets_of(batch, len(inputs))]
        self.judged = Judged(outputs, targets, metric_for(outputs[0], metric))
        forms, begun = [self.form(FLOAT, self.path)], time.monotonic()
        if not forms[0].kept:
            warnings.warn(
                f"tune: on {self.engine} the float file itself misses the floor ({self.goal.text(self.judged)}): it "
                f"keeps {forms[0].effect.sqnr_db:.1f} dB to ONNX Runtime, which computes in float32",
                CompressWarning,
                stacklevel=4,
            )
        files = {"rules": self.made((), self.data, out)}
        forms.append(self.form("rules", files["rules"].path))
        self.built, groups = time.monotonic() - begun, list[Group]()
        unquiet = self.timed({form.label: form.path for form in forms})["rules"].unquiet
        if not unquiet:
            groups = self.tried(files["rules"], noisy=not forms[1].kept)
            if found := self.fastest(groups, out.with_name(f"{out.stem}.tuned.onnx"), noisy=not forms[1].kept):
                files["tuned"], form = found
                forms.append(form)
            # Two builds of a file may differ by a tenth on OpenVINO: the slower one counts.
            builds = [self.timed({form.label: form.path for form in forms}) for _ in range(2)]
            unquiet = next((row.unquiet for rows in builds for row in rows.values() if row.unquiet), "")
            for place, form in enumerate(() if unquiet else forms):
                ratio = max(latency_ratio(rows[form.label], rows[FLOAT]) for rows in builds)
                forms[place] = replace(form, ms=builds[0][form.label].p50_ms, ratio=ratio)
        return self.result(forms, groups, files, unquiet)

    def outputs(self, path: Path, engine: str) -> Iterator[Any]:
        with build_engine(path, engine) as built:
            for pieces in self.pieces:
                runs = [list(built.run(piece).values()) for piece in pieces]
                found = [
                    torch.from_numpy(np.concatenate(x) if x[1:] else np.array(x[0])) for x in zip(*runs, strict=True)
                ]
                yield found[0] if len(found) == 1 else tuple(found)

    def form(self, label: str, path: Path) -> Form:
        results = list(self.outputs(path, self.engine))
        effect = self.judged.effect_of(results)
        if self.goal.sqnr_db is None:
            kept = self.goal.met(effect, self.judged)
        else:  # in each batch: a choice that just keeps the mean misses it on other images
            pairs = zip(self.judged.reference, map(self.judged.judge.select, results), strict=True)
            kept = all(sqnr(reference, result) >= self.goal.sqnr_db for reference, result in pairs)
        return Form(label=label, path=path, effect=effect, kept=kept)

    def fastest(self, groups: list[Group], out: Path, *, noisy: bool) -> tuple[QuantizedFile, Form] | None:
        # The fastest choice that keeps the floor, by bisection; without one, the last that was built.
        found, rest = list(filter(None, choices(groups))), [group for group in groups if group.gain_ms is None]
        if noisy and rest:  # their noise is not known: first those with least to compute
            quiet = found[-1] if found else ()
            found += [(*quiet, *rest[len(rest) // 2 :]), (*quiet, *rest)]
        low, high, last = 0, len(found), -1
        built: dict[int, tuple[QuantizedFile, Form]] = {}
        while low < high:
            middle = (low + high) // 2
            try:
                made = self.made(found[middle], self.data, out)
            except QuantizationError:  # nothing is left to quantize
                high = middle
                continue
            last, built[middle] = middle, (made, self.form("tuned", made.path))
            if built[middle][1].kept:
                high = middle
            else:
                low = middle + 1
        best = min((place for place, (_, form) in built.items() if form.kept), default=last)
        if best != last:  # another choice was built over it
            return self.made(found[best], self.data, out), built[best][1]
        return built.get(best)

    def made(self, chosen: Iterable[Group], data: Sequence[Any], out: Path) -> QuantizedFile:
        rules = [Rule(match=glob.escape(layer), enable=False) for group in chosen for layer in group.layers]
        spec = replace(self.spec, rules=(*self.spec.rules, *rules))
        return quantize_onnx_file(self.path, data, spec=spec, out=out, precision=self.precision)

    def timed(self, files: dict[str, Path]) -> dict[str, Latency]:
        batch = len(next(iter(self.feed.values())))
        seconds = max(_SECONDS, 1.2e-3 * self.slowest_ms * _TURNS * (RUNS_PER_TURN + 1))
        rows = time_files(files, self.engine, batch_size=batch, inputs=self.feed, runs=_RUNS, seconds=seconds)
        self.slowest_ms = max(self.slowest_ms, *(row.p50_ms for row in rows.values()))
        return rows

    def tried(self, rules: QuantizedFile, *, noisy: bool) -> list[Group]:
        names = {x for row in rules.placement.decisions if row.decision == "quantize" for x in row.layer.split()}
        groups, few, cache = alike(rules.view, names), self.data[: _FEW if noisy else 1], cached()
        key = f"{self.engine} {self.precision} {self.spec.only_target}, {processor_name()}, {core_count()} cores"
        times, noise = cache.setdefault(key, {}), 0.0
        base, groups = self.kinds(rules.path, groups, few)
        chosen = [group for group in groups if group.gain_ms is not None]
        if noisy:
            noise = min(self.form("", self.made(chosen, few, self.trial).path).effect.noise, _MOST_NOISE)
        self.bars.start(TASK, len(groups))
        longest, until = self.built, self.start + 60 * self.minutes - (_SEARCHED if noisy else _BUILDS) * self.built
        for place, group in enumerate(groups):
            begun, gain, left = time.monotonic(), times.get(group.pattern), 0.0
            if begun + longest > until:
                break
            if group in chosen:
                continue
            if gain is None or noisy:
                try:
                    path = self.made([*chosen, group], few, self.trial).path
                except QuantizationError:  # nothing is left to quantize
                    continue
                gain = self.gain(base, path) / len(group.layers) if gain is None else gain
                left = self.form("", path).effect.noise if noisy else 0.0
            if math.isfinite(gain):
                times[group.pattern] = gain
                noise_of = max(0.0, noise - min(left, _MOST_NOISE))
                groups[place] = replace(group, gain_ms=gain * len(group.layers), noise=noise_of)
            longest = max(longest, time.monotonic() - begun)
            self.bars.advance(TASK)
        self.bars.finish(TASK)
        write_json(_cache(), cache)
        return groups

    def kinds(self, base: Path, groups: list[Group], few: Sequence[Any]) -> tuple[Path, list[Group]]:
        # A layer that is left float alone pays for casts at both ends, which its kind as a whole may not.
        chosen: dict[str, Group] = {}
        ways = [[group for group in groups if group.kind == kind] for kind in dict.fromkeys(x.kind for x in groups)]
        for place, way in enumerate([*ways, groups[len(groups) // 2 :]]):  # at last those with least to compute
            own, spent = [group for group in way if group.pattern not in chosen], time.monotonic() - self.start
            if len(own) < 2 or spent > 60 * self.minutes / 3:
                continue
            try:
                made = self.made([*chosen.values(), *own], few, self.trial.with_name(f"kind{place}.onnx")).path
            except QuantizationError:  # nothing is left to quantize
                continue
            if (gain := self.gain(base, made)) > 0:
                base, layers = made, sum(len(group.layers) for group in own)
                chosen |= {x.pattern: replace(x, gain_ms=gain * len(x.layers) / layers) for x in own}
        return base, [chosen.get(group.pattern, group) for group in groups]

    def gain(self, rules: Path, left: Path) -> float:
        """Milliseconds saved; 0 if that is not sure, NaN on a busy machine."""
        timed = self.timed({"rules": rules, "left": left})
        if timed["rules"].unquiet or timed["left"].unquiet:
            return math.nan
        low, high = paired_interval(timed["left"].turns_ms, timed["rules"].turns_ms)
        sure = len(timed["left"].turns_ms) >= _TURNS and not low <= 1 <= high
        return timed["rules"].p50_ms * (1 - latency_ratio(timed["left"], timed["rules"])) if sure else 0.0

    def result(self, forms: list[Form], groups: list[Group], files: dict[str, QuantizedFile], unquiet: str) -> Tuned:
        near, goal = [form for form in forms[1:] if form.kept], self.goal.text(self.judged)
        best = min(near or forms[-1:], key=lambda form: form.ratio or 1.0)
        times = ", ".join(
            f"{x.label} {1 / x.ratio:.2f}x float's speed{'' if x.kept else ', which misses the floor'}"
            for x in forms[1:]
            if x.ratio is not None
        )
        left, choice = sum(group.gain_ms is None for group in groups), forms[0]
        if unquiet and near:
            choice, why = best, f"not measured and not tuned: {unquiet}; begin again when nothing else runs"
        elif not near:
            why = (
                f"no quantized file keeps the floor ({goal}){f'; not measured: {unquiet}' if unquiet else ''}; " + _MEND
            )
        elif (best.ratio or 1.0) > 1 - LEAST_GAIN:
            why = f"no quantized file is {LEAST_GAIN:.0%} faster than float on {self.engine} ({times})"
        else:
            choice, why = best, f"the fastest on {self.engine} that keeps the floor: {times}"
        why += f"; {left} of {len(groups)} groups of layers were not tried: give it more time" if left else ""
        return Tuned(
            choice=choice.label,
            path=choice.path,
            why=why,
            goal=goal,
            images=sum(len(next(iter(piece.values()))) for pieces in self.pieces for piece in pieces),
            minutes=(time.monotonic() - self.start) / 60,
            forms=tuple(forms),
            groups=tuple(groups),
            quantized=files[best.label],
        )


_MEND = "`inspect parity --onnx FILE --data DATA --mend-sqnr 20` finds what it takes"


def _cache() -> Path:
    return cache_folder() / "tuned.json"


def cached() -> dict[str, dict[str, float]]:
    """Milliseconds that a float layer saves, by machine and pattern."""
    return read_kept(_cache(), dict[str, dict[str, float]], {}, "delete it, and layers are timed again")
