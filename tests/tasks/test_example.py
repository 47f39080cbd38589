"""The example of a user's own file: its recipe is accepted, and its parts are those that are trained and judged."""

from pathlib import Path

import pytest
import torch

from compress.data import load_data
from compress.models import build_model
from compress.recipe import load_recipe
from compress.tasks import make_task
from compress.training import TrainSpec, fit

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


def _edge(mask):
    """Pixels in whose neighbourhood of 3 x 3 both classes are, found one by one."""
    found = torch.zeros_like(mask, dtype=torch.bool)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            around = mask[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
            found[row, column] = around.min() != around.max()
    return found
