"""Which points are fine-tuned, which of them is taken, and the advice at the end of a search."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.search.front import Point, pareto
from compress.search.lab import Figures
from compress.search.outcome import Attempt, Bound, Outcome, after, best, order
from compress.tasks.classification import classification


def outcome(ratio):
    figures = Figures(ms=1.0, ratio=ratio, distance=0.1, agreement=1.0)
    point = Point(label="start 1", configuration={}, figures=figures, predicted_ratio=ratio, predicted_distance=0.1)
    made = Attempt(
        label="start 1", folder="network-1", variant="ptq", file="f", ms=1.0, ratio=ratio, score=0.9, drop=0.5
    )
    return Outcome(
        bound=Bound(max_drop=1.0),
        front=SimpleNamespace(points=(point,)),
        metric=classification(10).metric,
        scores={},
        attempts=(made,),
        chosen=made,
        images=10,
        folder=Path("run"),
    )


@pytest.mark.parametrize(
    ("ratio", "begin"), [(0.5, "Take network-1 (start 1; ptq): 90.00 %"), (1.23, "Keep the float network: ")]
)
def test_a_network_that_is_no_faster_is_not_advised(ratio, begin):
    advice = outcome(ratio).advice
    assert advice.startswith(begin)
    assert f"{ratio:.2f} of" in advice


@pytest.mark.parametrize("ratio", [0.45, 1.23])
def test_no_factor_is_advised_of_a_busy_machine(ratio):
    quiet = outcome(ratio)
    busy = replace(quiet.attempts[0], unquiet="the machine was busy (its hypervisor kept 9% of the time)")
    advice = replace(quiet, attempts=(busy,), chosen=busy).advice
    assert "not measured: the machine was busy" in advice and f"{ratio:.2f}" not in advice
    for one in (busy, replace(point("a", ratio, 0.1).figures, unquiet=busy.unquiet)):
        assert one.ratio_text() == "not measured: the machine was busy"
    assert quiet.attempts[0].ratio_text() == point("a", ratio, 0.1).figures.ratio_text() == f"{ratio:.3f}"


def point(label, ratio, distance):
    figures = Figures(ms=1.0, ratio=ratio, distance=distance, agreement=None)
    return Point(
        label=label, configuration={"a": label}, figures=figures, predicted_ratio=ratio, predicted_distance=distance
    )


POINTS = (
    point("start 1 (0.40)", 0.38, 0.39),
    point("start 2 (0.37)", 0.33, 0.43),
    point("width 0.5, float", 0.27, 0.468),
    point("width 0.5, int8", 0.25, 0.470),
    point("trial 9", 0.24, 0.46),
    point("width 0.75, int8", 0.45, 0.30),
)
FRONT = SimpleNamespace(points=POINTS, front=pareto(POINTS), failed={})


def fine_tuned(bound, results):
    """Go on as the command does, with (ratio, drop) of each network in the place of a training."""
    waiting, made = order(FRONT, bound), []
    while waiting:
        now = waiting.pop(0)
        ratio, drop = results[now.label]
        made.append(
            Attempt(label=now.label, folder="f", variant="ptq", file="f", ms=1, ratio=ratio, score=1 - drop, drop=drop)
        )
        waiting = after(waiting, now, made[-1], bound)
    return [one.label for one in made], best(made, bound)


def test_the_best_uniform_choice_is_fine_tuned_beside_the_best_point_and_accuracy_decides():
    """Their errors before fine-tuning are 0.39 and 0.47, of two uniform ones that are as good the faster one's."""
    bound, results = Bound(latency=0.4), {"start 1 (0.40)": (0.38, 0.22), "width 0.5, int8": (0.25, 0.0)}
    tried, taken = fine_tuned(bound, results)
    assert tried == ["start 1 (0.40)", "width 0.5, int8"]
    assert taken.label == "width 0.5, int8"
    assert fine_tuned(bound, {**results, "width 0.5, int8": (0.25, 0.3)})[1].label == "start 1 (0.40)"


def test_a_point_that_misses_the_latency_is_followed_by_a_faster_one():
    results = {p.label: (p.figures.ratio * 1.1, 0.1) for p in POINTS}
    tried, taken = fine_tuned(Bound(latency=0.4), results)
    assert tried == ["start 1 (0.40)", "start 2 (0.37)", "width 0.5, int8"]
    assert taken.label == "width 0.5, int8"  # as accurate, and faster


def test_by_drop_the_fastest_that_keeps_it_is_looked_for():
    results = {p.label: (p.figures.ratio, 2 * p.figures.distance) for p in POINTS}
    tried, taken = fine_tuned(Bound(max_drop=0.9), results)
    assert taken.label == "start 2 (0.37)"
    assert len(tried) <= 4


def test_a_loss_of_another_unit_is_told_in_it():
    made = outcome(0.5)
    metric = replace(made.metric, name="rmse", unit="m", direction="lower")
    told = replace(made, metric=metric, chosen=replace(made.chosen, score=0.0123, drop=0.0021)).advice
    assert "0.01230 m rmse at 0.50 of the float network's latency, 0.002100 m above it" in told
    assert Bound(max_drop=0.005, unit="m").words == "at most 0.005 m lost"


def test_the_advice_names_what_else_was_fine_tuned():
    made = outcome(0.5)
    other = replace(made.attempts[0], label="width 0.5", ratio=0.4, score=0.8, drop=0.9)
    advice = replace(made, attempts=(made.chosen, other)).advice
    assert "fine-tuned as well, width 0.5 has 80.00 % at 0.40." in advice
