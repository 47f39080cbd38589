"""NSGA-II over configurations, in any number of processes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compress.errors import CompressError, SearchError
from compress.search.lab import Figures
from compress.search.space import Configuration, Space, key_of
from compress.support.imports import any_failure
from compress.support.process import is_alive
from compress.support.progress import Progress
from compress.version import install_hint

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

TASK = "trials"
_LABEL, _FIGURES, _ERROR, _WORKER = "label", "figures", "error", "worker"
_LONG = 20.0  # a trial of another machine that takes so many times the median is taken for lost
_PATIENCE_S = 0.5
_LEAST = 3  # trials that are made even after the deadline: without one, the earlier work would have no result


def optuna() -> ModuleType:
    """Import Optuna, which is optional.

    Raises:
        SearchError: it is not installed; names the command.
    """
    try:
        import optuna  # optional: an extra of the package
    except ImportError as error:
        raise SearchError(f"search needs Optuna: {install_hint('search')}") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_study(storage: str, name: str, *, seed: int, population: int, create: bool = True) -> Study:
    """Open the study of a search; `create` makes one.

    A URL of Optuna, or a file that processes append to; the seed is this worker's.

    Raises:
        SearchError: it cannot be opened, or is not there.
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
    """Queue configurations that it lacks."""
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
    """(label, configuration, figures) of measured trials, in order, each configuration once."""
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
    """Reasons of failed trials, by label."""
    return {
        trial.user_attrs.get(_LABEL) or f"trial {trial.number}": trial.user_attrs[_ERROR]
        for trial in study.get_trials(deepcopy=False)
        if _ERROR in trial.user_attrs
    }


def ended(study: Study) -> Sequence[FrozenTrial]:
    """Trials that were measured, or refused with a reason."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and (_FIGURES in trial.user_attrs or _ERROR in trial.user_attrs)
    ]


def configuration_of(trial: FrozenTrial) -> dict[str, str]:
    """The configuration of a trial, also of a queued one."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


def _running(study: Study) -> list[FrozenTrial]:
    state = optuna().trial.TrialState
    return list(study.get_trials(deepcopy=False, states=(state.RUNNING,)))
