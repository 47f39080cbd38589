import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torchmetrics.regression import MeanSquaredError

from compress import (
    DataSpec,
    TrainSpec,
    audit_onnx,
    build_model,
    fit,
    load_data,
    load_recipe,
)
from compress.errors import DataError, RecipeError
from compress.support.meters import TaskMetric, task_metric
from compress.support.progress import NoProgress
from compress.tasks.load import make_task
from examples import depth, points, pose, video
from tests.exact import compute, exported
from tests.onnx_ptq.files import sqnr

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
    # Its argmax is 0 whatever it holds, so that any two networks would agree on every pixel.
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


# The example of a user's own file: its recipe is accepted, and its parts are those that are trained and judged.

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def own_parts():
    sys.path.insert(0, str(EXAMPLES))
    try:
        recipe = load_recipe(EXAMPLES / "own_task.yaml")
        data = load_data(recipe.data)
        torch.manual_seed(0)
        model = build_model(recipe.model, num_classes=data.val.num_classes, task=recipe.task)
        return data, model, make_task(recipe.task, data.val.labels, loss=recipe.loss, metric=recipe.metric)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_the_users_own_file_trains():
    data, model, task = own_parts()
    assert data.train.preprocessing.input_shape == (2, 32, 48)
    report = fit(model, data, TrainSpec(epochs=1, lr=0.05, warmup_epochs=0), batch_size=32, folder=None, task=task)
    assert list(report.final.values) == ["boundary_accuracy"]
    images, masks = data.val.load(list(range(len(data.val))), epoch=None, device=torch.device("cpu"))
    right = model.eval()(images).argmax(1) == masks
    ring = torch.stack([_edge(mask) for mask in masks])
    assert report.final.values["boundary_accuracy"] == pytest.approx(right[ring].float().mean().item())


def test_a_pose_by_heatmaps_is_found_where_it_was_drawn():
    joints = pose.arms(16, 0)[1]
    assert (pose.located(pose.wanted(joints, 16, 16)) - joints).norm(dim=-1).max() < 1.5
    along = torch.linspace(0, 1, 500)[:, None] * (joints[0, 1] - joints[0, 0]) + joints[0, 0]
    y, x = 20, 31
    nearest = (along - torch.tensor([x, y])).norm(dim=1).min()
    assert pose.distances(joints[:, 0], joints[:, 1])[0, y, x] == pytest.approx(nearest.item(), abs=0.05)
    recipe = load_recipe("pose")
    meter = make_task(recipe.task, (), loss=recipe.loss, metric=recipe.metric).metric.make()
    meter.update(pose.wanted(joints, 16, 16), joints)
    meter.update(pose.wanted(torch.where(joints < 32, joints + 5, joints - 5), 16, 16), joints)
    assert meter.compute() == 0.5


def test_drawn_data_are_what_their_targets_say():
    images, distances = depth.scenes(8, 0)
    assert torch.equal(images, depth.scenes(8, 0)[0]) and not torch.equal(images, depth.scenes(8, 1)[0])
    ground = distances[:, -1]  # the lowest row sees the plane, farther at its sides, or a ball in front of it
    assert (ground > 0.5).all() and (distances[:, 0] == depth.FARTHEST).float().mean() > 0.9
    clips, kinds = video.clips(256, 0)
    away = (clips.float() - clips.float().flatten(2).median(2).values[..., None, None]).abs().square()
    middle = (away.sum(2) * torch.arange(video.SIDE)).sum(2) / away.sum((2, 3))
    moved = [(middle[kinds == video.CLASSES.index(name)].diff()).mean() for name in ("left", "right", "up", "rests")]
    assert moved[0] < -0.2 and moved[1] > 0.2 and max(abs(moved[2]), abs(moved[3])) < 0.1
    scans, grid = points.scans(8, 0)
    for scan, cells in zip(scans[:, 0].numpy(), grid.numpy(), strict=True):
        place = np.clip(((scan[:, :2] + points.METRES) * points.CELLS / (2 * points.METRES)).astype(int), 0, 31)
        kind, known = cells[place[:, 0], place[:, 1]], np.abs(scan).max(1) > 0
        assert (kind[known & (scan[:, 2] > 0.3)] > 0).mean() > 0.95  # what stands on the ground is an object


def test_the_scatter_of_points_stays_float_between_integers(tmp_path):
    scans, _ = points.scans(4, 0)
    qmodel, file = exported(points.Pillars(width=4), scans, tmp_path / "m.onnx", target="onnxruntime")
    (row,) = (row for row in qmodel.placement.decisions if "scatter" in row.layer)
    assert row.decision == "float" and "places, which 8 bits do not hold" in row.reason
    assert [node.op_type for node in onnx.load(file).graph.node].count("ScatterElements") == 1
    assert audit_onnx(file).int8_share > 0.9
    assert sqnr(qmodel(scans).detach().numpy(), compute(file, scans.numpy())) > 30


def test_convolutions_over_time_train_and_are_integers(tmp_path):
    model, data = video.Video(width=2), video.data(DataSpec(train_images=16, val_images=8))
    spec = DataSpec(name="examples.video:data", num_classes=9, train_images=16, val_images=8)
    fit(model, load_data(spec), TrainSpec(epochs=1, warmup_epochs=0), batch_size=8, folder=None)
    clips = torch.stack([clip for clip, _ in data[1]]).float() / 255
    qmodel, file = exported(model, clips, tmp_path / "m.onnx", target="onnxruntime")
    assert audit_onnx(file).int8_share > 0.9
    assert sqnr(qmodel(clips).detach().numpy(), compute(file, clips.numpy())) > 30


class Killed(NoProgress):
    # Ends this process as kill -9 does, at a step of the training.
    def __init__(self, at):
        self.left = at

    def advance(self, task, amount=1, **fields):
        self.left -= amount
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train_own(folder, progress, *, resume):
    data, model, task = own_parts()
    spec = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0, checkpoint_steps=3)
    report = fit(model, data, spec, batch_size=64, folder=folder, task=task, resume=resume, progress=progress)
    return model.state_dict(), report


@pytest.mark.release
def test_the_users_own_file_goes_on_after_kill_9_to_the_bit(tmp_path):
    whole, expected = train_own(None, NoProgress(), resume=False)
    steps = expected.history[-1].step
    assert steps > 6
    code = (
        "import sys; from pathlib import Path; from tests.tasks.test_load import Killed, train_own; "
        f"train_own(Path(sys.argv[1]), Killed({steps - 2}), resume=False)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    again, report = train_own(tmp_path, NoProgress(), resume=True)
    assert report.resumed_from is not None and 0 < report.resumed_from < steps
    assert report.final == expected.final
    torch.testing.assert_close(whole, again, rtol=0, atol=0)


def _edge(mask):
    found = torch.zeros_like(mask, dtype=torch.bool)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            around = mask[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
            found[row, column] = around.min() != around.max()
    return found
