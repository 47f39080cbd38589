"""The advice at the end of a search."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.search.front import Point
from compress.search.lab import Figures
from compress.search.outcome import Attempt, Bound, Outcome
from compress.tasks import classification


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
    ("ratio", "begin"), [(0.5, "Take network-1 (start 1, ptq): 90.00 %"), (1.23, "Keep the float network: ")]
)
def test_a_network_that_is_no_faster_is_not_advised(ratio, begin):
    advice = outcome(ratio).advice
    assert advice.startswith(begin)
    assert f"{ratio:.2f} of" in advice
