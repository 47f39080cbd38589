import signal
import time
from datetime import datetime, timedelta

import optuna
import pytest

from compress.errors import EngineError, SearchError
from compress.search.search import add_starts, failures, open_study, reclaim, results, run_trials
from compress.support.progress import NoProgress
from tests.fresh import finish, start
from tests.search.worker import SPACE, STARTS, figures, work


def begun(said, storage, seconds):
    worker = start(said, work, storage, 8, seconds)
    while worker.is_alive() and not (said.exists() and said.read_text().startswith("begun\n")):
        time.sleep(0.02)
    return worker


def test_a_killed_worker_loses_its_trial_only(tmp_path):
    storage = str(tmp_path / "trials.log")
    lost = begun(tmp_path / "lost", storage, 600)  # it will never end it
    other = begun(tmp_path / "other", storage, 0.01)
    lost.kill()
    lost.join()
    assert lost.exitcode == -signal.SIGKILL, (tmp_path / "lost").read_text()
    finish(tmp_path / "other", other)
    found = results(open_study(storage, "search", seed=0, population=4, create=False))
    assert {label for label, _, _ in found} >= set(STARTS)  # the configuration of the lost trial was tried again
    assert all(figures(configuration) == measured for _, configuration, measured in found)
    front = {(f.ratio, f.distance) for _, _, f in found}
    assert {(f.ratio, f.distance) for f in map(figures, STARTS.values())} <= front


def test_a_search_goes_on_where_it_ended(tmp_path):
    storage = str(tmp_path / "trials.log")
    first = results(work(storage, 5, 0.0))
    second = results(work(storage, 9, 0.0, seed=1))
    assert second[: len(first)] == first
    assert len(second) >= len(first)
    assert results(work(storage, 9, 0.0)) == second  # as many as were asked for have ended: nothing is run


def test_a_database_serves_as_well(tmp_path):
    assert len(results(work(f"sqlite:///{tmp_path / 'trials.db'}", 4, 0.0))) == 4


def test_candidates_that_cannot_run_are_kept_with_their_reason(tmp_path):
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=2)

    def evaluate(configuration):
        raise EngineError("no kernel")

    run_trials(study, SPACE, evaluate, count=2, deadline=None, progress=NoProgress())
    assert set(failures(study).values()) == {"no kernel"}
    assert results(study) == []


def test_a_search_that_is_late_tries_its_first_starts(tmp_path):
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=4)
    add_starts(study, SPACE, STARTS)
    run_trials(study, SPACE, figures, count=8, deadline=0.0, progress=NoProgress())
    assert [label for label, _, _ in results(study)] == list(STARTS)[:3]


def test_a_storage_that_is_none_is_refused(tmp_path):
    with pytest.raises(SearchError, match="cannot be used"):
        open_study("nosuch://host/name", "search", seed=0, population=2)
    with pytest.raises(SearchError, match="cannot be used"):
        open_study(str(tmp_path / "empty.log"), "search", seed=0, population=2, create=False)


@pytest.mark.parametrize("ahead", [timedelta(hours=5), timedelta(hours=-5)])
def test_the_clock_of_another_host_does_not_make_its_trial_a_lost_one(tmp_path, ahead):
    study = work(str(tmp_path / "trials.log"), 2, 0.0)
    trial = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING,
        params=study.trials[0].params,
        distributions=study.trials[0].distributions,
        user_attrs={"worker": ["elsewhere", 1]},
    )
    trial.datetime_start = datetime.now() + ahead
    study.add_trial(trial)
    number, since = study.trials[-1].number, {}
    assert reclaim(study, since) == 0 and list(since) == [number]
    assert reclaim(study, {number: time.monotonic() - 3600}) == 1  # far longer than the others took


def test_a_result_that_comes_after_its_trial_was_taken_for_lost_is_dropped(tmp_path):
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=2)
    state = optuna.trial.TrialState

    def evaluate(configuration):
        (running,) = [trial for trial in study.get_trials() if trial.state == state.RUNNING]
        if running.number == 0:
            study.tell(0, state=state.FAIL)  # another host
        return figures(configuration)

    run_trials(study, SPACE, evaluate, count=2, deadline=None, progress=NoProgress())
    assert [trial.state for trial in study.trials] == [state.FAIL, state.COMPLETE, state.COMPLETE]
