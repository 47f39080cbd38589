"""Training on tasks other than classification, with frozen layers, and resumed to the bit."""

import csv
from dataclasses import replace

import pytest
import torch
from torch import nn

from compress import CompressError, TrainSpec, fit
from compress.data.base import DataSet, Split
from compress.data.preprocessing import Preprocessing
from compress.errors import RecipeError
from compress.tasks.segmentation import segmentation
from tests.training.toy import convnet, toy_data

LABELS = ("dark", "bright")
TASK = segmentation(LABELS)


class Squares(Split):
    """Bright squares on a dark, noisy ground; the class of a pixel is whether it is in the square."""

    def __init__(self, count):
        super().__init__(labels=LABELS, preprocessing=Preprocessing(image_size=(8, 12)), seed=0)
        generator = torch.Generator().manual_seed(count)
        self.targets = torch.zeros(count, 8, 12, dtype=torch.int64)
        for i in range(count):
            top, left = (torch.randint(0, 6, (2,), generator=generator)).tolist()
            self.targets[i, top : top + 4, left : left + 5] = 1
        self.images = self.targets.unsqueeze(1) + 0.2 * torch.randn(count, 3, 8, 12, generator=generator)

    def __len__(self):
        return len(self.targets)

    def load(self, indices, *, epoch, device):
        return self.images[indices].to(device), self.targets[indices].to(device)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 2, 1)
    )


DATA = DataSet(train=Squares(24), val=Squares(8))
SPEC = TrainSpec(epochs=3, lr=0.05, warmup_epochs=0, checkpoint_steps=2)


class StopError(Exception):
    pass


def stop_after(count):
    def after_step(step, steps, optimizer):
        if step == count:
            raise StopError

    return after_step


def test_a_network_learns_to_segment_and_a_stopped_training_goes_on_to_the_bit(tmp_path):
    model = network()
    report = fit(model, DATA, SPEC, batch_size=8, folder=tmp_path / "a", task=TASK)
    assert report.final.values["miou"] > 0.8
    with (tmp_path / "a" / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["val_miou"]) == pytest.approx(report.final.values["miou"], rel=1e-5)
    assert not [name for name in rows[0] if "top" in name]
    assert report.best is not None
    other = network()
    with pytest.raises(StopError):
        fit(other, DATA, SPEC, batch_size=8, folder=tmp_path / "b", task=TASK, after_step=stop_after(5))
    other = network()
    again = fit(other, DATA, SPEC, batch_size=8, folder=tmp_path / "b", task=TASK, resume=True)
    assert again.resumed_from == 4
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert again.final == report.final


def test_a_network_learns_from_a_teachers_maps():
    teacher = network()
    fit(teacher, DATA, SPEC, batch_size=8, folder=None, task=TASK)
    student = network()
    spec = TrainSpec(epochs=8, lr=0.05, warmup_epochs=0, distill=True, distill_weight=1.0)
    report = fit(student, DATA, spec, batch_size=8, folder=None, task=TASK, teacher=teacher)
    assert report.final.values["miou"] > 0.7


def test_frozen_layers_stay_as_they_are():
    model = convnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = TrainSpec(epochs=1, lr=0.1, warmup_epochs=0, frozen=("0.*", "1.*"))
    fit(model, toy_data(), spec, batch_size=16, folder=None)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith(("0.", "1."))}
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(RecipeError, match="frozen 'backbone' matches no parameter"):
        fit(model, toy_data(), TrainSpec(epochs=1, frozen=("backbone",)), batch_size=16, folder=None)


def test_a_loss_that_is_not_finite_is_named():
    model = network()
    with pytest.raises(CompressError, match="the loss is nan at epoch 1, step 1"):
        fit(model, DATA, SPEC, batch_size=8, folder=None, task=_broken())


def _broken():
    def loss(outputs, targets, *, label_smoothing=0.0):
        return outputs.mean() * float("nan")

    return replace(TASK, loss=loss)
