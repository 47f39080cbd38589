"""One file operation of a run goes wrong, then the run goes on: it ends with the same bits.

A sample of the points; analysis/reliability_faults tries them all.
"""

import pytest

from analysis.reliability_faults.inject import DIED, REFUSED, digests, disturbed, operations
from compress.pipeline import run
from compress.recipe import parse_recipe

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


@pytest.mark.parametrize(("kind", "share"), [("dies", 0.3), ("cut", 0.2)])
def test_a_run_goes_on_after_a_fault(whole, tmp_path, kind, share):
    seen, expected = whole
    points = [point for point in seen if kind != "cut" or point.operation == "fsync"]
    at = points[int(share * len(points))]
    assert disturbed(RECIPE, "train", tmp_path / "run", kind, at) == (DIED if kind == "dies" else REFUSED)
    run(RECIPE, "train", tmp_path / "run", resume=True, device="cpu")
    assert digests(tmp_path / "run") == expected
    assert (tmp_path / "run" / "report.html").is_file()
    assert not list((tmp_path / "run").rglob("*.part"))
