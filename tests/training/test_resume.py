"""kill -9, in real processes: see tests/training/processes.py for when each is killed."""

import csv
import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.fresh import finish, start
from tests.training.processes import run_tasks


def run(folder, *tasks):
    """Run tasks of tests.training.processes, each in a folder of its own; return how the children of each ended."""
    said = folder / "said"
    finish(said, start(said, run_tasks, folder, tasks))
    return {task: json.loads((folder / task / "ends.json").read_text()) for task in tasks}, said.read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    ends, errors = run(folder, "killed")
    return folder / "killed", ends["killed"], errors


def rows(path):
    times = {"images_per_s", "seconds", "waited"}
    with path.open() as file:
        return [{k: v for k, v in row.items() if k not in times} for row in csv.DictReader(file)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ends_with_the_same_bits(killed, optimizer):
    folder, ends, errors = killed
    assert ends[optimizer] == [-9] * 6 + [0, 0], errors
    whole, resumed = folder / optimizer / "whole", folder / optimizer / "killed"
    expected, got = load_file(whole / "final.safetensors"), load_file(resumed / "final.safetensors")
    assert expected.keys() == got.keys()
    assert [name for name in expected if expected[name].numpy().tobytes() != got[name].numpy().tobytes()] == []
    assert any("running_var" in name for name in got)


def test_table_is_that_of_an_undisturbed_run(killed):
    folder, _, _ = killed
    whole, resumed = rows(folder / "sgd" / "whole" / "train.csv"), rows(folder / "sgd" / "killed" / "train.csv")
    assert [row["step"] for row in whole] == ["5", "10", "15"]
    assert whole == resumed


def test_nothing_is_left_lying_about(killed):
    folder, _, _ = killed
    names = sorted(path.name for path in (folder / "sgd" / "killed").iterdir())
    assert names == ["final.safetensors", "train.checkpoint.safetensors", "train.csv"]


def test_a_finished_training_is_not_repeated(killed):
    folder, _, _ = killed
    with safe_open(folder / "sgd" / "killed" / "final.safetensors", "pt") as file:
        assert json.loads(file.metadata()["compress"])["data"] == {"resumed_from": 15, "steps": 15}


def test_full_disk_leaves_the_last_checkpoint(killed):
    folder, ends, errors = killed
    assert ends["full disk"] == 0, errors
    facts = json.loads((folder / "full" / "facts.json").read_text())
    assert "cannot write" in facts["message"]
    assert facts["files"] == ["train.checkpoint.safetensors"]
    expected = load_file(folder / "sgd" / "whole" / "final.safetensors")
    got = load_file(folder / "full" / "final.safetensors")
    assert all(expected[name].equal(got[name]) for name in expected)
