"""A bound of latency is kept although the model takes networks for faster than they are."""

from dataclasses import replace

import pytest

from compress.search.latency_model import Sample, check, fit
from compress.search.search import NEAR, corrected, go_on
from compress.search.space import best_within, key_of
from compress.search.timing import Timed
from compress.search.trials import open_study, results
from compress.support.progress import NoProgress
from tests.search.test_models import COSTS, NETWORKS, known_time, networks
from tests.search.worker import SPACE, figures

ERRORS = {e: {c: float((4 - int(c)) ** 2) for c in choices} for e, choices in SPACE.elements.items()}


@pytest.mark.parametrize("latency", [0.9, 0.6, 0.45])
def test_networks_become_smaller_until_one_keeps_the_bound(tmp_path, latency):
    """Every network takes 1.4 times as long as its prediction; the smallest takes 0.35."""
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=4)

    def slower(configuration):
        return replace(figures(configuration), ratio=1.4 * figures(configuration).ratio)

    def best(budget):
        return best_within(SPACE, ERRORS, lambda c: figures(c).ratio, budget)

    smallest = dict.fromkeys(SPACE.elements, "1")
    go_on(study, SPACE, best, smallest, slower, latency=latency, progress=NoProgress())
    found = [measured for _, _, measured in results(study)]
    assert min(f.ratio for f in found) <= latency
    assert min(f.distance for f in found if f.ratio <= latency) < slower(smallest).distance or latency < 0.46


def test_the_fastest_network_is_tried_where_the_model_finds_none(tmp_path):
    study = open_study(str(tmp_path / "trials.log"), "search", seed=0, population=4)
    smallest = dict.fromkeys(SPACE.elements, "1")
    go_on(study, SPACE, lambda budget: None, smallest, figures, latency=0.1, progress=NoProgress())
    assert [configuration for _, configuration, _ in results(study)] == [smallest]


def test_a_model_is_corrected_until_a_network_that_it_asks_for_keeps_the_bound():
    """The smaller a network is, the more it takes beyond what the model expects, which saw nothing but large ones."""
    whole = known_time(COSTS.of({}))

    def time(configuration):
        share = known_time(COSTS.of(configuration)) / whole
        return 0.5 + 0.5 * share**2

    def sample(configuration):
        return Sample(costs=COSTS.of(configuration), time=time(configuration))

    def timed_of(samples):
        nothing = check([], [])
        return Timed(model=fit(list(samples.values())), check=nothing, samples=samples, cached=0)

    def wanted(timed):
        predict = lambda c: timed.model.predict(COSTS.of(c))  # noqa: E731
        errors = {e: {c: float(i) for i, c in enumerate(choices)} for e, choices in NETWORKS.elements.items()}
        found = [best_within(NETWORKS, errors, predict, share * 0.65) for share in NEAR]
        return [c for c in found if c is not None]

    start = {key_of(c): sample(c) for c in ({}, *networks(30, 3)) if time(c) > 0.75}
    before = timed_of(start)
    assert min(time(c) for c in wanted(before)) > 0.65
    after = corrected(
        before, wanted, lambda timed, some: timed_of({**timed.samples, **{key_of(c): sample(c) for c in some}}), 0.65
    )
    assert min(s.time for s in after.samples.values()) <= 0.65
