"""From a trained network to a measured front and a choice; both models are kept on disk. NSGA-II in any processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from compress.engines.registry import ENGINES, target_of
from compress.errors import CompressError, EngineError, EngineUnavailableError, SearchError, near_misses
from compress.files import read_json, write_json
from compress.graph.inputs import Batches, Inputs, device_of, model_inputs
from compress.measure.latency import NOT_MEASURED
from compress.quantization import QuantSpec
from compress.search import SearchSpec, check_search_spec
from compress.search.lab import (
    REFERENCE,
    Figures,
    Lab,
    Speed,
    build,
    engines_of,
    export,
    measure,
    time_engines,
    with_formats,
)
from compress.search.models import (
    Check,
    Distances,
    Sample,
    Timed,
    channel_block,
    check,
    fit,
    predicted_distance,
    rank_correlation,
    rate_choices,
    time_more,
    time_space,
)
from compress.search.network import apply, channel_scores
from compress.search.space import (
    Configuration,
    Otherwise,
    Space,
    analyse,
    best_within,
    key_of,
    make_space,
    otherwise,
    uniform,
)
from compress.support.imports import any_failure
from compress.support.meters import TaskMetric, amount_of
from compress.support.process import is_alive
from compress.support.progress import NoProgress, Progress
from compress.support.text import scored, signed
from compress.variants import Variant
from compress.version import install_hint

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


FLOAT_POINT, START = "float", "start"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration and what was measured of it.

    Attributes:
        label: `float`, `width 0.5`, `trial 17`, ...
        predicted_ratio: over float's time, by a model not fitted to it.
        predicted_distance: by the accuracy model.
    """

    label: str
    configuration: Configuration
    figures: Figures
    predicted_ratio: float
    predicted_distance: float

    @property
    def is_baseline(self) -> bool:
        return not self.label.startswith((START, "trial"))


@dataclass(frozen=True, kw_only=True)
class Front:
    """The result of a search.

    Attributes:
        lab: with which its networks are built.
        points: all that were measured, the float network first.
        chosen: keeps the bound, before fine-tuning; None without a bound.
        timed: the latency model and its check.
        failed: configurations that could not be built or run, with the reason.
        notes: sentences for the user.

    Examples:
        >>> front = compress.search(model, images, batches, latency=0.5)  # doctest: +SKIP
        >>> network = front.network(front.chosen)  # doctest: +SKIP
    """

    lab: Lab
    points: tuple[Point, ...]
    chosen: Point | None
    timed: Timed
    accuracy: Distances
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[Point, ...]:
        """Points that no other beats, fastest first."""
        return pareto(self.points)

    def network(self, point: Point) -> nn.Module:
        """A point's float network as measured: pruned and reconstructed."""
        return build(self.lab, point.configuration)

    def quantized(self, point: Point, network: nn.Module | None = None) -> nn.Module:
        """The network of a point, or `network`, with its formats."""
        return with_formats(self.lab, network or self.network(point), point.configuration)

    def otherwise(self, point: Point) -> tuple[Otherwise, ...]:
        """Predicted effects of the neighbouring choices of each element."""
        lab = self.lab
        return otherwise(
            lab.space, self.accuracy, lambda c: self.timed.model.predict(lab.costs.of(c)), point.configuration
        )

    def accuracy_check(self) -> float:
        """Rank correlation of the accuracy model with measured distance."""
        rows = [point for point in self.points if point.configuration]
        measured = [point.figures.distance for point in rows]
        return rank_correlation([predicted_distance(self.accuracy, point.configuration) for point in rows], measured)

    @property
    def latency_check(self) -> Check:
        """Of the latency model before the trials, on unseen networks."""
        return self.timed.check

    @property
    def candidate_check(self) -> Check:
        """Predictions for candidates, each by a model not fitted to it."""
        rows = [p for p in self.points if p.configuration]
        return check([p.predicted_ratio for p in rows], [p.figures.ratio for p in rows])

    @property
    def repeat_check(self) -> Check:
        """Two measurements of the same networks; no prediction can be closer."""
        samples = self.timed.samples
        rows = [
            (samples[key].time, p.figures.ratio) for p in self.points if (key := key_of(p.configuration)) in samples
        ]
        return check([first for first, _ in rows], [second for _, second in rows])


def pareto(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points that no other beats in time and distance, fastest first.

    >>> pareto([])
    ()
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.figures.ratio, p.figures.distance)):
        if not found or point.figures.distance < found[-1].figures.distance:
            found.append(point)
    return tuple(found)


def choose(points: Iterable[Point], *, latency: float | None = None, max_drop: float | None = None) -> Point:
    """The least distance within a time, or the fastest of those that lose little agreement.

    `latency` is in float's times, `max_drop` in percent points of held-out images.
    """
    front = pareto(points)
    if latency is not None:
        within = [point for point in front if point.figures.ratio <= latency]
        if not within:
            fastest = front[0]
            raise SearchError(
                f"latency {latency:g} cannot be met: the fastest network found, {fastest.label}, takes "
                f"{fastest.figures.ratio:.3f} of the float network's time; ask for that or more, or allow more in "
                "the recipe's `search` section (smaller widths, blocks, formats)"
            )
        return min(within, key=lambda point: point.figures.distance)
    near = [point for point in front if lost(point) <= float(max_drop or 0.0) + 1e-9]
    if not near:
        best = min(front, key=lambda point: (lost(point), point.figures.ratio))
        raise SearchError(
            f"max_drop {max_drop:g} cannot be met: the best network found, {best.label}, loses {lost(best):.2f} points "
            f"at {best.figures.ratio:.3f} of the float network's time; ask for more"
        )
    return min(near, key=lambda point: point.figures.ratio)


def lost(point: Point) -> float:
    if point.figures.agreement is None:
        raise SearchError("max_drop compares classes, and the network's outputs are no logits; ask for a latency")
    return 100 * (1 - point.figures.agreement)


@dataclass(frozen=True, kw_only=True)
class Attempt(Speed):
    """A fine-tuned and measured network.

    Attributes:
        variant: its best on the engine.
        score: metric on the engine, whole split.
        drop: points lost there.
    """

    label: str
    folder: str
    variant: str
    file: str
    score: float
    drop: float


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Largest share of float's time, or most points lost."""

    latency: float | None = None
    max_drop: float | None = None
    unit: str = "%"

    def keeps(self, made: Attempt) -> bool:
        if self.latency is not None:
            return made.ratio <= self.latency
        return made.drop <= float(self.max_drop or 0.0) + 1e-9

    @property
    def words(self) -> str:
        if self.latency is not None:
            return f"at most {self.latency:g} of the float network's latency"
        return " ".join(f"at most {self.max_drop:g} {amount_of(self.unit)} lost".split())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search with its fine-tuned networks.

    Attributes:
        scores: the metric on the engine before fine-tuning, by label of the point; `float` among them.
        chosen: the best that keeps the bound, or None.
        images: of the evaluation split that `scores` were measured on.
    """

    bound: Bound
    front: Front
    metric: TaskMetric
    scores: Mapping[str, float]
    attempts: tuple[Attempt, ...]
    chosen: Attempt | None
    images: int
    folder: Path
    labels: Mapping[str, Point] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", {point.label: point for point in self.front.points})

    @property
    def point(self) -> Point:
        return self.labels[self.chosen.label] if self.chosen is not None else self.front.front[0]

    @property
    def advice(self) -> str:
        made, metric = self.chosen, self.metric
        if made is None:
            return f"No network keeps the bound, {self.bound.words}; the table says how near each came."
        if made.ratio >= 1 and not made.unquiet:
            return (
                f"Keep the float network: of those that keep the bound, {self.bound.words}, the fastest is "
                f"{made.folder} ({_kind(made)}), which takes {made.ratio:.2f} of its latency."
            )
        speed = f"at {made.ratio:.2f} of the float network's latency"
        speed = f"(latency {NOT_MEASURED})" if made.unquiet else speed
        below = (made.drop >= 0) == (metric.direction == "higher")
        lost = f"{scored(abs(made.drop), metric.unit)} {metric.amount}".rstrip()
        same = signed(made.drop, metric.unit).startswith("±")
        side = "as accurate as it" if same else f"{lost} {'below' if below else 'above'} it"
        return (
            f"Take {made.folder} ({_kind(made)}): {metric.text(made.score)} {metric.title} {speed}, "
            f"{side}{self._beside(made)}."
        )

    def _beside(self, made: Attempt) -> str:
        others = [other for other in self.attempts if other is not made and self.bound.keeps(other)]
        if others:
            rows = [f"{x.label} has {self.metric.text(x.score)} at {x.ratio_text(2)}" for x in others]
            return f"; fine-tuned as well, {', '.join(rows)}"
        uniform = [p for p in self.front.points if p.is_baseline and p.configuration and p.figures.ratio <= made.ratio]
        rival = min(uniform, key=lambda p: p.figures.distance, default=None)
        if rival is None or self.point.figures.distance >= rival.figures.distance:
            return ""
        return (
            f"; before fine-tuning its error is {self.point.figures.distance:.3f}, that of the best uniform choice "
            f"that is as fast ({rival.label}) {rival.figures.distance:.3f}"
        )


def _kind(made: Attempt) -> str:
    return made.label if made.variant == str(Variant.FLOAT) else f"{made.label}; {made.variant}"


# Errors of uniform choices that agree to so many digits are taken for the same, and the faster one is better.
_DIGITS = 2

_LIKELY = 0.5  # by drop the first point that is tried is the fastest with at most this error


def order(front: Front, bound: Bound) -> list[Point]:
    """Return the points to fine-tune, the most promising first.

    By latency: those within the bound, the most accurate and the best uniform one first. By drop: the middle of the
    front, of which `after` halves what is left.
    """
    others = sorted((p for p in front.points if p.configuration), key=lambda p: p.figures.ratio)
    if not others:
        raise SearchError(f"no candidate could be measured: {'; '.join(list(front.failed.values())[:3])}")
    rows = [point for point in front.front if point.configuration] or others[:1]  # the float network is the fastest
    if bound.latency is not None:
        within = [point for point in rows if point.figures.ratio <= bound.latency] or rows[:1]
        first, *rest = sorted(within, key=lambda point: point.figures.distance)
        uniform = _uniform(others, bound.latency)
        second = [uniform] if uniform is not None and uniform is not first else []
        return [first, *second, *(point for point in rest if point is not uniform)]
    faster = [point for point in rows if point.figures.ratio < 1] or rows[:1]
    likely = [point for point in faster if point.figures.distance <= _LIKELY] or faster[-1:]
    return [likely[0], *(point for point in faster if point is not likely[0])]


def _uniform(points: Sequence[Point], latency: float) -> Point | None:
    within = [point for point in points if point.is_baseline and point.figures.ratio <= latency]
    key = lambda point: (round(point.figures.distance, _DIGITS), point.figures.ratio)  # noqa: E731
    return min(within, key=key, default=None)


def after(waiting: Sequence[Point], point: Point, made: Attempt, bound: Bound) -> list[Point]:
    if bound.latency is not None:
        if bound.keeps(made):
            return [] if point.is_baseline else [p for p in waiting if p.is_baseline][:1]
        faster = [p for p in waiting if p.figures.ratio < point.figures.ratio]
        fast = [p for p in faster if p.figures.ratio < point.figures.ratio * min(1.0, bound.latency / made.ratio)]
        return sorted(fast or faster, key=lambda p: p.figures.distance)
    ahead = (
        [p for p in waiting if p.figures.ratio < point.figures.ratio]
        if bound.keeps(made)
        else [p for p in waiting if p.figures.distance < point.figures.distance]
    )
    ahead.sort(key=lambda p: p.figures.ratio)
    middle = len(ahead) // 2
    return ahead[middle : middle + 1] + ahead[:middle] + ahead[middle + 1 :]


def best(attempts: Sequence[Attempt], bound: Bound) -> Attempt | None:
    kept = [made for made in attempts if bound.keeps(made)]
    if bound.latency is not None:
        return min(kept, key=lambda made: (made.drop, made.ratio), default=None)
    return min(kept, key=lambda made: (made.ratio, made.drop), default=None)


TASK = "trials"
_LABEL, _FIGURES, _ERROR, _WORKER = "label", "figures", "error", "worker"
_LONG = 20.0  # a trial of another machine that takes so many times the median is taken for lost
_PATIENCE_S = 0.5
_LEAST = 3  # trials that are made even after the deadline: without one, the earlier work would have no result


def optuna() -> ModuleType:
    try:
        import optuna  # optional: an extra of the package
    except ImportError as error:
        raise SearchError(f"search needs Optuna: {install_hint('search')}") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_study(storage: str, name: str, *, seed: int, population: int, create: bool = True) -> Study:
    """Open the study of a search; `create` makes one.

    A URL of Optuna, or a file that processes append to; the seed is this worker's.
    """
    library = optuna()
    sampler = library.samplers.NSGAIISampler(population_size=max(population, 2), seed=seed)
    with any_failure(lambda error: SearchError(f"storage {storage!r} cannot be used for the search {name!r}: {error}")):
        backend: Any = storage
        if "://" not in storage:
            Path(storage).parent.mkdir(parents=True, exist_ok=True)
            journal = library.storages.journal
            lock = journal.JournalFileOpenLock(storage)
            backend = library.storages.JournalStorage(journal.JournalFileBackend(storage, lock_obj=lock))
        if not create:
            return library.load_study(study_name=name, storage=backend, sampler=sampler)
        return library.create_study(
            study_name=name,
            storage=backend,
            sampler=sampler,
            directions=["minimize", "minimize"],
            load_if_exists=True,
        )


def add_starts(study: Study, space: Space, starts: Mapping[str, Configuration]) -> None:
    known = {key_of(configuration_of(trial)) for trial in study.get_trials(deepcopy=False)}
    for label, configuration in starts.items():
        whole = {**space.largest(), **configuration}
        if key_of(whole) not in known:
            known.add(key_of(whole))
            study.enqueue_trial(whole, user_attrs={_LABEL: label})


def run_trials(
    study: Study,
    space: Space,
    evaluate: Callable[[Configuration], Figures],
    *,
    count: int,
    deadline: float | None,
    progress: Progress,
) -> None:
    """Run trials until the study has `count` that ended, of all processes.

    After `deadline` (`time.monotonic`) only the first three begin; others' starts are not waited for.
    """
    seen, since = len(ended(study)), dict[int, float]()
    progress.start(TASK, count, done=min(seen, count))
    while True:
        reclaim(study, since)
        now = len(ended(study))
        for _ in range(min(now, count) - min(seen, count)):
            progress.advance(TASK)
        seen = now
        if now >= count or (now >= _LEAST and deadline is not None and time.monotonic() > deadline):
            break
        if now + len(_running(study)) >= count:
            time.sleep(_PATIENCE_S)  # others are at work on the last ones, and one of them may be lost
            continue
        _run_one(study, space, evaluate)
    progress.finish(TASK)


def _run_one(study: Study, space: Space, evaluate: Callable[[Configuration], Figures]) -> None:
    known = {
        key_of(configuration_of(trial)): trial.user_attrs[_FIGURES]
        for trial in study.get_trials(deepcopy=False)
        if _FIGURES in trial.user_attrs
    }
    trial = study.ask()
    trial.set_user_attr(_WORKER, [socket.gethostname(), os.getpid()])
    configuration = {name: trial.suggest_categorical(name, choices) for name, choices in space.elements.items()}
    state = optuna().trial.TrialState
    try:
        stored = known.get(key_of(configuration))
        figures = evaluate(configuration) if stored is None else Figures(**json.loads(stored))
    except CompressError as error:
        trial.set_user_attr(_ERROR, str(error))
        study.tell(trial, state=state.FAIL)
        return
    except BaseException:
        study.tell(trial, state=state.FAIL)
        raise
    try:
        trial.set_user_attr(_FIGURES, json.dumps(asdict(figures)))
        study.tell(trial, [figures.ratio, figures.distance])
    except (ValueError, RuntimeError):  # another host took this one for lost, and tries the configuration again
        return


def reclaim(study: Study, since: dict[int, float]) -> int:
    """Queue the trials of lost workers again; return how many.

    `since` takes when this process first saw each trial run, on its own clock.
    """
    state = optuna().trial.TrialState
    durations = [trial.duration.total_seconds() for trial in ended(study) if trial.duration is not None]
    limit = _LONG * sorted(durations)[len(durations) // 2] if durations else None
    count = 0
    for trial in _running(study):
        host, pid = trial.user_attrs.get(_WORKER, (socket.gethostname(), None))
        age = time.monotonic() - since.setdefault(trial.number, time.monotonic())
        here = host == socket.gethostname()
        lost = (pid is not None and not is_alive(pid)) if here else (limit is not None and age > max(limit, 60.0))
        if not lost:
            continue
        try:
            study.tell(trial.number, state=state.FAIL)
        except (ValueError, RuntimeError):  # another worker was faster
            continue
        label = trial.user_attrs.get(_LABEL)
        study.enqueue_trial(configuration_of(trial), user_attrs={_LABEL: label} if label else None)
        count += 1
    return count


def results(study: Study) -> list[tuple[str, dict[str, str], Figures]]:
    found: dict[str, tuple[str, dict[str, str], Figures]] = {}
    for trial in study.get_trials(deepcopy=False):
        if _FIGURES not in trial.user_attrs:
            continue
        configuration, label = configuration_of(trial), trial.user_attrs.get(_LABEL)
        known = found.get(key_of(configuration))
        if known is None:
            figures = Figures(**json.loads(trial.user_attrs[_FIGURES]))
            found[key_of(configuration)] = (label or f"trial {trial.number}", configuration, figures)
        elif label:  # NSGA-II came upon a start that a lost worker had taken
            found[key_of(configuration)] = (label, configuration, known[2])
    return list(found.values())


def failures(study: Study) -> dict[str, str]:
    return {
        trial.user_attrs.get(_LABEL) or f"trial {trial.number}": trial.user_attrs[_ERROR]
        for trial in study.get_trials(deepcopy=False)
        if _ERROR in trial.user_attrs
    }


def ended(study: Study) -> Sequence[FrozenTrial]:
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and (_FIGURES in trial.user_attrs or _ERROR in trial.user_attrs)
    ]


def configuration_of(trial: FrozenTrial) -> dict[str, str]:
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


def _running(study: Study) -> list[FrozenTrial]:
    return list(study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.RUNNING,)))


PLAN = "plan.json"
_ANEW = "name another folder (out), or remove this one"


def write_plan(folder: Path, lab: Lab, timed: Timed, accuracy: Distances) -> Path:
    return write_json(
        folder / PLAN,
        {
            "identity": identity(lab),
            "engine": lab.engine,
            "block": lab.block,
            "check": {"predicted": timed.check.predicted, "measured": timed.check.measured},
            "smallest": timed.smallest,
            "cached": timed.cached,
            "samples": [[json.loads(key), s.time, dict(s.layers)] for key, s in timed.samples.items()],
            "accuracy": {"distance": accuracy},
        },
    )


def read_plan(folder: Path, lab: Lab, *, needed: bool, resume: bool) -> tuple[Timed, Distances] | None:
    """Return the models of the search in a folder; None if there is none."""
    path = folder / PLAN
    if not path.is_file():
        if needed:
            raise SearchError(f"{folder} holds no search: begin it without --worker, and let workers join afterwards")
        return None
    if not resume:
        raise SearchError(f"{folder} holds a search already; resume goes on with it, or {_ANEW}")
    try:
        tree = read_json(path)
        if tree["identity"] != identity(lab):
            raise SearchError(f"{folder} holds a search of another network, space or engine; {_ANEW}")
        return _timed(tree, lab), tree["accuracy"]["distance"]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SearchError(f"{path} cannot be read ({error}); {_ANEW}") from error


def read_block(folder: Path) -> int | None:
    path = folder / PLAN
    try:
        return int(read_json(path)["block"]) if path.is_file() else None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SearchError(f"{path} cannot be read ({error}); {_ANEW}") from error


def identity(lab: Lab) -> str:
    """A text that differs between searches of incomparable trials."""
    digest = hashlib.sha256()
    for name, tensor in sorted(lab.structure.graph.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    same = replace(lab.spec, trials=1, hours=None, attempts=1)  # these may change when a search goes on
    digest.update(json.dumps([asdict(same), lab.engine, dict(lab.space.elements)]).encode())
    return digest.hexdigest()[:24]


def _timed(tree: dict[str, Any], lab: Lab) -> Timed:
    seen = tree["check"]
    samples = {
        key_of(c): Sample(costs=lab.costs.of(c), time=time, layers=layers) for c, time, layers in tree["samples"]
    }
    return Timed(
        model=fit(list(samples.values()), block=lab.block),
        check=check(seen["predicted"], seen["measured"]),
        samples=samples,
        cached=int(tree["cached"]),
    )


STUDY = "search"
Role = Literal["all", "worker"]
_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_HELD = 4  # one image of so many is held back


def search(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    *,
    engine: str = "openvino",
    latency: float | None = None,
    max_drop: float | None = None,
    spec: SearchSpec | None = None,
    quantization: QuantSpec | None = None,
    out: Path | str = "search",
    storage: str | None = None,
    cache: Path | None = None,
    role: Role = "all",
    resume: bool = False,
    progress: Progress | None = None,
) -> Front:
    """Search over precision, 2:4 sparsity, width and depth; every point of the result was measured on the engine.

    An integer program over a latency model and an accuracy model gives the first configurations, NSGA-II goes on.
    Fine-tune `front.network(front.chosen)` afterwards.

    Args:
        model: trained float network; not changed.
        example_inputs: traced with.
        batches: images of the training split, or (images, targets), whose targets are not used.
        engine: `openvino`, `onnxruntime`, `cuda`, ...
        latency: choose the most accurate network within this share of the float network's time.
        max_drop: choose the fastest network that gives at most so many percent of held-out images another class. With
            neither, nothing is chosen.
        spec: space and effort.
        quantization: its target becomes the engine's own.
        out: folder of the plan and, without a storage, of the trials.
        storage: of trials, for several workers: a URL of Optuna's, or a file; None = a file in `out`.
        cache: folder of latencies; None = the user's.
        role: `worker` only takes part in the trials of a search that was begun in `out`.
        resume: go on with the search in `out`.
        progress: advanced during long work.

    Raises:
        SearchError: the bound is no bound, or cannot be met (names the best found); nothing can be chosen; or `out`
            holds another search.
        EngineError: an unknown engine.
        EngineUnavailableError: an engine that is not on this machine.
        ModelError: the model cannot be traced.

    Examples:
        >>> front = compress.search(model, images, batches, engine="onnxruntime", latency=0.5)  # doctest: +SKIP
        >>> network = front.network(front.chosen)  # doctest: +SKIP
    """
    spec, bars = spec or SearchSpec(), progress or NoProgress()
    version = check_request(engine, latency=latency, max_drop=max_drop, spec=spec)
    block = read_block(Path(out)) or channel_block(engine, version=version, cache=cache)
    lab = _lab(model, example_inputs, batches, engine=engine, spec=spec, quantization=quantization, block=block)
    lab = replace(lab, version=version, cache=cache)
    bound = {"latency": latency, "max_drop": max_drop}
    return _measured_front(lab, Path(out), bound, storage=storage, role=role, resume=resume, progress=bars)


def _measured_front(
    lab: Lab,
    folder: Path,
    bound: Mapping[str, float | None],
    *,
    storage: str | None,
    role: Role,
    resume: bool,
    progress: Progress,
) -> Front:
    """Make or read both models, run the trials, and choose."""
    begun, latency = time.monotonic(), bound["latency"]
    folder.mkdir(parents=True, exist_ok=True)
    known = read_plan(folder, lab, needed=role == "worker", resume=resume or role == "worker")
    reference = export(lab, apply(lab.structure, {}), folder / f"{REFERENCE}-{os.getpid()}.onnx")
    try:
        if known is None:
            timed = time_space(lab, reference, progress=progress)
            _check_reachable(timed, latency)
            accuracy = rate_choices(lab, progress=progress)
            more = partial(time_more, lab, reference=reference, progress=progress)
            wanted = lambda now: list(_optimal(lab, now, accuracy, latency).values())  # noqa: E731
            known = corrected(timed, wanted, more, latency), accuracy
            write_plan(folder, lab, *known)
        starts = _starts(lab, *known, latency) if role == "all" else {}
        study = _refine(lab, reference, starts, storage or str(folder / "trials.log"), begun=begun, progress=progress)
        if role == "all" and latency is not None:
            timed, accuracy = known
            best = partial(best_within, lab.space, accuracy, _predict(lab, timed))
            evaluate = partial(measure, lab, reference=reference)
            go_on(study, lab.space, best, json.loads(timed.fastest), evaluate, latency=latency, progress=progress)
        points = _points(lab, *known, study, reference)
    finally:
        reference.unlink(missing_ok=True)
    write_json(folder / "points.json", [asdict(point) for point in points])
    bounded = role == "all" and any(value is not None for value in bound.values())
    chosen = choose(points, **bound) if bounded else None
    timed, accuracy = known
    return Front(
        lab=lab,
        points=points,
        chosen=chosen,
        timed=timed,
        accuracy=accuracy,
        failed=failures(study),
        notes=lab.space.notes,
    )


def _refine(
    lab: Lab,
    reference: Path,
    starts: Mapping[str, Configuration],
    storage: str,
    *,
    begun: float,
    progress: Progress,
) -> Study:
    spec = lab.spec
    seed = spec.seed if starts else spec.seed + os.getpid()  # workers draw other configurations
    study = open_study(storage, STUDY, seed=seed, population=max(len(starts), 8))
    add_starts(study, lab.space, starts)
    deadline = None if spec.hours is None else begun + 3600 * spec.hours
    evaluate = partial(measure, lab, reference=reference)
    run_trials(study, lab.space, evaluate, count=spec.trials, deadline=deadline, progress=progress)
    return study


def check_request(
    engine: str, *, latency: float | None = None, max_drop: float | None = None, spec: SearchSpec | None = None
) -> str:
    """Refuse a search that cannot be made; return the version of the engine's library."""
    if latency is not None and max_drop is not None:
        raise SearchError("latency and max_drop are two ways to choose: give one of them")
    if latency is not None and not 0 < latency < 1:
        raise SearchError(f"latency is {latency}: it must be a share of the float network's time, above 0 and below 1")
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop >= 0):
        raise SearchError(f"max_drop is {max_drop}: it must be a finite number of points, 0 or more")
    check_search_spec(spec or SearchSpec())
    if engine not in ENGINES or ENGINES[engine].load is None:
        names = [name for name, entry in ENGINES.items() if entry.load is not None]
        raise EngineError(f"unknown engine {engine!r}{near_misses(engine, names)} (one of: {', '.join(names)})")
    there = ENGINES[engine].availability()
    if not there.available:
        raise EngineUnavailableError(f"{engine} is not available here: {there.reason}; {there.install}")
    optuna()
    return there.version


def _lab(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    *,
    engine: str,
    spec: SearchSpec,
    quantization: QuantSpec | None,
    block: int,
) -> Lab:
    structure = analyse(model, example_inputs)
    space = make_space(structure, spec, engine, block=block)
    images = _images(model, batches, spec.images)
    held = max(1, len(images) // _HELD)
    fit, rest = images[held:], images[:held]
    size = min(32, len(fit))
    learnt = [part for part in fit.split(size) if len(part) == size]
    return Lab(
        structure=structure,
        space=space,
        spec=spec,
        quantization=replace(quantization or QuantSpec(), target=target_of(engine) or "tensorrt"),
        engine=engine,
        scores=channel_scores(structure, spec.criterion, learnt),
        fit=learnt,
        held=rest.split(64),
        block=block,
    )


def _images(model: nn.Module, batches: Batches, count: int) -> Tensor:
    parts: list[Tensor] = []
    for batch in batches:
        inputs = model_inputs(model, batch)
        if len(inputs) != 1:
            raise SearchError(f"the model takes {len(inputs)} inputs: search takes networks of one input of images")
        parts.append(inputs[0])
        if sum(map(len, parts)) >= count:
            break
    if sum(map(len, parts)) < 2 * _HELD:
        raise SearchError(f"search got {sum(map(len, parts))} images: give {2 * _HELD} or more, better some hundreds")
    images = torch.cat(parts)[:count].to(device_of(model))
    if not bool(images.isfinite().all()):
        raise SearchError("the images hold values that are NaN or infinite")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # loaders are often by class
    return images[order]


def _check_reachable(timed: Timed, latency: float | None) -> None:
    if latency is not None and timed.smallest > latency:
        raise SearchError(
            f"latency {latency:g} cannot be met: the fastest network that was timed, the smallest of the space among "
            f"them, takes {timed.smallest:.3f} of the float network's time; ask for that or more, or allow more "
            "in the recipe's `search` section (widths, blocks, formats)"
        )


def _starts(lab: Lab, timed: Timed, accuracy: Distances, latency: float | None) -> dict[str, Configuration]:
    baselines: dict[str, Configuration] = {}
    for name in lab.spec.formats:
        if name != "float":
            baselines[f"{name} everywhere"] = uniform(lab.space, format_=name)
        baselines |= {
            f"width {share:g}, {name}": uniform(lab.space, width=share, format_=name) for share in lab.spec.widths
        }
    if any(element.startswith("sparse") for element in lab.space.elements):
        baselines["2:4 everywhere"] = uniform(lab.space, sparse=True)
    return {**_optimal(lab, timed, accuracy, latency), **baselines}


def _optimal(lab: Lab, timed: Timed, accuracy: Distances, latency: float | None) -> dict[str, Configuration]:
    predict, found = _predict(lab, timed), dict[str, Configuration]()
    near = [] if latency is None else [share * latency for share in NEAR]
    for number, budget in enumerate(dict.fromkeys((*near, *_BUDGETS)), 1):
        best = best_within(lab.space, accuracy, predict, budget)
        if best is not None and not _as_is(lab, best):
            found.setdefault(f"{START} {number} ({budget:.2f})", best)
    return dict(list(found.items())[: max(lab.spec.trials // 2, 1)])


def _predict(lab: Lab, timed: Timed) -> Callable[[Configuration], float]:
    return lambda configuration: timed.model.predict(lab.costs.of(configuration))


def _points(lab: Lab, timed: Timed, accuracy: Distances, study: Study, reference: Path) -> tuple[Point, ...]:
    with engines_of(lab, {REFERENCE: reference}) as engines:
        whole = time_engines(lab, engines)[REFERENCE].p50_ms
    as_it_is = Figures(ms=whole, ratio=1.0, distance=0.0, agreement=1.0)
    points = []
    for label, configuration, figures in [(FLOAT_POINT, {}, as_it_is), *results(study)]:
        if label != FLOAT_POINT and _as_is(lab, configuration):
            continue
        costs = lab.costs.of(configuration)
        points.append(
            Point(
                label=label,
                configuration=configuration,
                figures=replace(figures, ms=figures.ratio * whole),  # ratios drift less than times
                predicted_ratio=timed.without(costs).predict(costs),
                predicted_distance=predicted_distance(accuracy, configuration),
            )
        )
    return tuple(points)


def _as_is(lab: Lab, configuration: Configuration) -> bool:
    return lab.costs.of(configuration) == lab.costs.of({})


NEAR = (1.0, 0.97, 0.92)  # shares of a bound that the best networks by the models are looked for at

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
