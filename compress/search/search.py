"""From a trained network to a measured front; both models are kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from compress.engines.registry import ENGINES
from compress.errors import EngineError, EngineUnavailableError, SearchError, near_misses
from compress.files import read_json, write_json
from compress.graph.inputs import Batches, Inputs, device_of, model_inputs
from compress.quantization.spec import QuantSpec, Target
from compress.search.accuracy_model import AccuracyModel, rate_choices
from compress.search.criteria import channel_scores
from compress.search.front import FLOAT_POINT, START, Front, Point, choose
from compress.search.lab import REFERENCE, Figures, Lab, engines_of, export, measure, time_engines
from compress.search.latency_model import Sample, check, fit
from compress.search.network import apply
from compress.search.space import Configuration, Space, best_within, key_of, make_space, uniform
from compress.search.spec import SearchSpec, check_search_spec
from compress.search.structure import analyse
from compress.search.timing import Timed, channel_block, time_more, time_space
from compress.search.trials import add_starts, ended, failures, open_study, optuna, results, run_trials
from compress.support.progress import NoProgress, Progress

if TYPE_CHECKING:
    from optuna import Study

PLAN = "plan.json"
_ANEW = "name another folder (out), or remove this one"


def write_plan(folder: Path, lab: Lab, timed: Timed, accuracy: AccuracyModel) -> Path:
    """Write the models of a search into its folder."""
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
            "accuracy": asdict(accuracy),
        },
    )


def read_plan(folder: Path, lab: Lab, *, needed: bool, resume: bool) -> tuple[Timed, AccuracyModel] | None:
    """Return the models of the search in a folder; None if there is none.

    Raises:
        SearchError: it is needed and missing, present without `resume`, of another search, or damaged.
    """
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
        return _timed(tree, lab), AccuracyModel(**tree["accuracy"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SearchError(f"{path} cannot be read ({error}); {_ANEW}") from error


def read_block(folder: Path) -> int | None:
    """The block of channels of a folder's search, or None."""
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


TARGETS: dict[str, Target] = {"openvino": "openvino", "onnxruntime": "onnxruntime"}
"""The target whose placement rules an engine follows; TensorRT for all others."""

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
            best = partial(best_within, lab.space, accuracy.distance, _predict(lab, timed))
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
    """Queue starts, and take part in the trials until there are enough."""
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
    """Refuse a search that cannot be made; return the version of the engine's library.

    Raises:
        SearchError: a wrong bound or specification, two bounds, or no Optuna.
        EngineError: an unknown engine.
        EngineUnavailableError: an engine that is not on this machine.
    """
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
    target = TARGETS.get(engine, "tensorrt")
    return Lab(
        structure=structure,
        space=space,
        spec=spec,
        quantization=replace(quantization or QuantSpec(), target=target),
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


def _starts(lab: Lab, timed: Timed, accuracy: AccuracyModel, latency: float | None) -> dict[str, Configuration]:
    """The best configurations by the models, and uniform ones."""
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


def _optimal(lab: Lab, timed: Timed, accuracy: AccuracyModel, latency: float | None) -> dict[str, Configuration]:
    """The models' best configurations for several budgets, near the bound first."""
    predict, found = _predict(lab, timed), dict[str, Configuration]()
    near = [] if latency is None else [share * latency for share in NEAR]
    for number, budget in enumerate(dict.fromkeys((*near, *_BUDGETS)), 1):
        best = best_within(lab.space, accuracy.distance, predict, budget)
        if best is not None and not _as_is(lab, best):
            found.setdefault(f"{START} {number} ({budget:.2f})", best)
    return dict(list(found.items())[: max(lab.spec.trials // 2, 1)])


def _predict(lab: Lab, timed: Timed) -> Callable[[Configuration], float]:
    return lambda configuration: timed.model.predict(lab.costs.of(configuration))


def _points(lab: Lab, timed: Timed, accuracy: AccuracyModel, study: Study, reference: Path) -> tuple[Point, ...]:
    """All that was measured, after the float network."""
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
                predicted_distance=accuracy.predict(configuration),
            )
        )
    return tuple(points)


def _as_is(lab: Lab, configuration: Configuration) -> bool:
    return lab.costs.of(configuration) == lab.costs.of({})


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
