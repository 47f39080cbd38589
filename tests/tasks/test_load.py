import math

import pytest
import torch
from torchmetrics.regression import MeanSquaredError

from compress.errors import DataError, RecipeError
from compress.support.meters import TaskMetric, task_metric
from compress.tasks.load import make_task

LABELS = ("a", "b", "c")


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(
        "import torch\n"
        "def loss(outputs, targets):\n    return (outputs - 1).square().mean()\n"
        "def rows(outputs, targets):\n    return outputs\n"
        "def error(outputs, targets):\n    return (outputs.argmax(1) != targets).float().mean()\n"
        "error.direction = 'lower'\n"
        "class Wrong:\n"
        "    name, unit, direction = 'wrong', 'images', 'lower'\n"
        "    def __init__(self):\n        self.count = 0\n"
        "    def update(self, outputs, targets):\n        self.count += int((outputs.argmax(1) != targets).sum())\n"
        "    def compute(self):\n        return {'wrong': self.count, 'double': 2 * self.count}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


LOGITS = torch.tensor([[3.0, 1, 0], [0, 2, 1], [5, 0, 1]])
TARGETS = torch.tensor([0, 2, 1])


def figures(metric):
    meter = metric.make()
    meter.update(LOGITS[:2], TARGETS[:2])
    meter.update(LOGITS[2:], TARGETS[2:])
    return metric.figures(meter)


def test_a_users_loss_and_metric_take_the_place_of_the_tasks_own(own):
    task = make_task("classification", LABELS, loss="own_parts:loss", metric="own_parts:Wrong")
    assert task.loss(torch.zeros(2, 3), None).item() == 1
    assert figures(task.metric) == {"wrong": 2, "double": 4}
    assert (task.metric.unit, task.metric.direction, task.metric.drop(2, 5)) == ("images", "lower", 3)


def test_a_function_is_averaged_over_images(own):
    metric = make_task("classification", LABELS, metric="own_parts:error").metric
    assert figures(metric)["error"] == pytest.approx(2 / 3)
    assert metric.drop(0.5, 0.75) == pytest.approx(25)


def test_a_meter_of_torchmetrics_serves_as_it_is():
    metric = task_metric(MeanSquaredError())
    assert metric.direction == "lower"
    meter = metric.make()
    meter.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert metric.figures(meter) == {"meansquarederror": 2.0}
    assert metric.make() is not meter


def test_a_loss_that_returns_no_scalar_is_refused(own):
    with pytest.raises(RecipeError, match=r"loss returned \(2, 3\)"):
        make_task("classification", LABELS, loss="own_parts:rows").loss(torch.zeros(2, 3), None)


def test_one_channel_has_no_class_to_agree_on(own):
    """Its argmax is 0 whatever it holds, so that any two networks would agree on every pixel."""
    parts = {"loss": "own_parts:loss", "metric": "own_parts:error"}
    assert make_task("segmentation", ("depth",), **parts).metric.classes is None
    assert make_task("segmentation", LABELS, **parts).metric.classes is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "own"}, "task own has no loss and no metric"),
        ({"name": "own", "loss": "own_parts:loss"}, "task own has no metric: name yours"),
        ({"name": "segmentatoin"}, "did you mean 'segmentation'"),
        ({"loss": "dice"}, "loss is 'dice'.*cross_entropy, or package.module:function"),
        ({"loss": "own_parts:los"}, "has no 'los', did you mean 'loss'"),
        ({"loss": "no_such_module:loss"}, "cannot import no_such_module"),
        ({"metric": "accuracy"}, "metric is 'accuracy'"),
    ],
)
def test_what_is_refused(own, options, message):
    with pytest.raises(RecipeError, match=message):
        make_task(**{"name": "classification", "labels": LABELS, **options})


def test_one_class_is_refused_unless_the_loss_is_the_users(own):
    for task in ("classification", "segmentation"):
        with pytest.raises(DataError, match=f"one class, 'cats': {task} needs two or more"):
            make_task(task, ["cats"])
    assert make_task("classification", ["cats"], loss="own_parts:loss").loss(torch.zeros(2, 1), None).item() == 1


@pytest.mark.parametrize("value", [math.nan, "high", None, {"other": 1.0}])
def test_a_metric_that_returns_no_number_is_refused(value):
    class Broken:
        def update(self, outputs, targets):
            pass

        def compute(self):
            return value

    with pytest.raises(DataError, match="number|NaN|must hold broken"):
        figures(TaskMetric(name="broken", make=Broken))
