# Ctrl-C at many moments and `--resume`: the run ends with the weights and the notes of one that nothing stopped.

import itertools
import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress import run
from compress.recipe.tree import parse_recipe
from compress.support.imports import own_sources
from tests.further import further
from tests.images import write_images
from tests.pipeline.inject import DIED, REFUSED, digests, disturbed, happens, operations
from tests.training.toy import Stop

# Task, and how far it comes before Ctrl-C is pressed.
MOMENTS = [("calibrate", 1), ("qat", 3), ("qat: evaluate", 1), ("top-1: torch", 1)]


def network(num_classes=10):
    layers = nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_images(root, count=8, size=(20, 20))
    for part in ("train", "val"):
        for i in range(4):
            (root / part / "a" / f"none{i}.png").write_bytes(b"no picture")
    save_file(network().state_dict(), root / "digits.safetensors")
    return parse_recipe(
        {
            "model": {"name": "tests.pipeline.test_resume:network", "weights": str(root / "digits.safetensors")},
            "data": {
                "name": "folder",
                "root": str(root),
                "image_size": 16,
                "batch_size": 4,
                "workers": 0,
                "on_error": "skip",
            },
            "train": {"epochs": 1, "lr": 0.001},
            "quantization": {
                "calibration_images": 4,
                "activations": {"calibrator": "percentile", "percentile": 50},
                "bias_correction": "empirical",
            },
            "qat": {"epochs": 1, "lr": 0.01, "checkpoint_steps": 1, "distill": False},
            "bench": {"engines": [], "batch_sizes": []},
        }
    )


@pytest.mark.release
def test_a_run_that_is_stopped_again_and_again_tells_what_an_undisturbed_one_tells(recipe, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(recipe, "qat", whole, device="cpu")
    for task, count in MOMENTS:
        with pytest.raises(KeyboardInterrupt):
            run(recipe, "qat", stopped, resume=True, device="cpu", progress=Stop(count, task=task))
        assert not (stopped / "report.md").exists()
    run(recipe, "qat", stopped, resume=True, device="cpu")

    notes, again = (json.loads((folder / "notes.json").read_text()) for folder in (whole, stopped))
    words = ("classifies 10 classes", "calibration cuts off", "corrected", "4 of the 20 files of train", "of val")
    assert all(sum(word in note for note in notes) == 1 for word in words), notes
    assert again == notes
    reports = [(folder / "report.md").read_text() for folder in (whole, stopped)]
    assert all(note.split(":")[0] in report for note in notes for report in reports)
    before, after = (load_file(folder / "qat.safetensors") for folder in (whole, stopped))
    assert all(torch.equal(before[key], after[key]) for key in before | after)
    assert {p.name for p in whole.iterdir()} == {p.name for p in stopped.iterdir()}


# One file operation of a run goes wrong, and the run goes on under a clock that goes back: it ends with the same
# bits.
# A sample of the points; results/reliability/faults.md tried them all.

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
    # Let what is there be of the year 2100, and each look at the clock be an hour before the last one.
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (2**32, 2**32))
    hours = itertools.count(1)
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * next(hours))


@pytest.mark.parametrize(("kind", "share"), further([("dies", 0.3), ("full", 0.2)], [("dies", 0.3)]))
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


def test_the_code_of_a_run_is_that_of_all_own_modules(tmp_path, monkeypatch):
    package = {
        "__init__": "from .nets import tiny",
        "nets": "from importlib import import_module\nimport own_other\nfrom . import blocks\n"
        "import_module('.late', __package__)\ntiny = print",
        "blocks": "import torch\nfrom pathlib import Path\nANCHORS = Path(__file__).with_name('anchors.json')",
        "late": "",
        "unread": "",
    }
    (tmp_path / "own_package").mkdir()
    for name, text in package.items():
        (tmp_path / "own_package" / f"{name}.py").write_text(text)
    (tmp_path / "own_other.py").write_text("ANCHORS = 'anchors.json'")
    for folder in (tmp_path, tmp_path / "own_package"):
        (folder / "anchors.json").write_text("[]")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["own_other", "own_other: anchors.json"]
    own += [f"own_package{part}" for part in ("", ".blocks", ".blocks: anchors.json", ".late", ".nets")]
    assert list(own_sources(["own_package:tiny"])) == list(own_sources(["own_package.nets:tiny"])) == own
