"""One file operation of a run goes wrong, and the run goes on under a clock that goes back: it ends with the same bits.

A sample of the points; results/reliability/faults.md tried them all.
"""

import itertools
import os
import time

import pytest

from compress import run
from compress.recipe.tree import parse_recipe
from tests.pipeline.inject import DIED, REFUSED, digests, disturbed, happens, operations

RECIPE = parse_recipe(
    {
        "model": {"name": "tests.pipeline.test_resume:network"},
        "data": {"image_size": 8, "batch_size": 32, "train_images": 64, "val_images": 32},
        "train": {"epochs": 1, "warmup_epochs": 0},
        "bench": {"engines": [], "batch_sizes": []},
    }
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return operations(RECIPE, "train", out), digests(out)


def clock_goes_back(folder, monkeypatch):
    """Let what is there be of the year 2100, and each look at the clock be an hour before the last one."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (2**32, 2**32))
    hours = itertools.count(1)
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * next(hours))


@pytest.mark.parametrize(("kind", "share"), [("dies", 0.3), ("full", 0.2)])
def test_a_run_goes_on_after_a_fault(whole, tmp_path, monkeypatch, kind, share):
    seen, expected = whole
    points = [point for point in seen if happens(kind, point.operation)]
    at = points[int(share * len(points))]
    assert disturbed(RECIPE, "train", tmp_path / "run", kind, at) == (DIED if kind == "dies" else REFUSED)
    clock_goes_back(tmp_path / "run", monkeypatch)
    run(RECIPE, "train", tmp_path / "run", resume=True, device="cpu")
    assert digests(tmp_path / "run") == expected
    assert (tmp_path / "run" / "report.html").is_file()
    assert not list((tmp_path / "run").rglob("*.part"))
