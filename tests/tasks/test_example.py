"""The example of a user's own file: its recipe is accepted, and its parts are those that are trained and judged."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress import TrainSpec, build_model, fit, load_data, load_recipe
from compress.support.progress import NoProgress
from compress.tasks.load import make_task

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_users_own_file_trains(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    recipe = load_recipe(EXAMPLES / "own_task.yaml")
    data = load_data(recipe.data)
    assert data.train.preprocessing.input_shape == (2, 32, 48)
    task = make_task(recipe.task, data.val.labels, loss=recipe.loss, metric=recipe.metric)
    model = build_model(recipe.model, num_classes=data.val.num_classes, task=recipe.task)
    report = fit(model, data, TrainSpec(epochs=1, lr=0.05, warmup_epochs=0), batch_size=32, folder=None, task=task)
    assert list(report.final.values) == ["boundary_accuracy"]
    images, masks = data.val.load(list(range(len(data.val))), epoch=None, device=torch.device("cpu"))
    right = model.eval()(images).argmax(1) == masks
    ring = torch.stack([_edge(mask) for mask in masks])
    assert report.final.values["boundary_accuracy"] == pytest.approx(right[ring].float().mean().item())


class Killed(NoProgress):
    """Ends this process as kill -9 does, at a step of the training."""

    def __init__(self, at):
        self.left = at

    def advance(self, task, amount=1, **fields):
        self.left -= amount
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train_own(folder, progress, *, resume):
    """Train the example's network with its own loss and metric for two epochs; return its weights and figures."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        recipe = load_recipe(EXAMPLES / "own_task.yaml")
        data = load_data(recipe.data)
        task = make_task(recipe.task, data.val.labels, loss=recipe.loss, metric=recipe.metric)
        torch.manual_seed(0)
        model = build_model(recipe.model, num_classes=data.val.num_classes, task=recipe.task)
    finally:
        sys.path.remove(str(EXAMPLES))
    spec = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0, checkpoint_steps=3)
    report = fit(model, data, spec, batch_size=64, folder=folder, task=task, resume=resume, progress=progress)
    return model.state_dict(), report


def test_the_users_own_file_goes_on_after_kill_9_to_the_bit(tmp_path):
    whole, expected = train_own(None, NoProgress(), resume=False)
    steps = expected.history[-1].step
    assert steps > 6
    code = (
        "import sys; from pathlib import Path; from tests.tasks.test_example import Killed, train_own; "
        f"train_own(Path(sys.argv[1]), Killed({steps - 2}), resume=False)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    again, report = train_own(tmp_path, NoProgress(), resume=True)
    assert report.resumed_from is not None and 0 < report.resumed_from < steps
    assert report.final == expected.final
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name]), name


def _edge(mask):
    """Pixels in whose neighbourhood of 3 x 3 both classes are, found one by one."""
    found = torch.zeros_like(mask, dtype=torch.bool)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            around = mask[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
            found[row, column] = around.min() != around.max()
    return found
