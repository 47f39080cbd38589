"""What listeners of a training hear, and the files that a logger writes, read by its own library."""

import builtins
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress import Callback
from compress.data.base import DataSet
from compress.data.memory import MemorySplit
from compress.data.preprocessing import Preprocessing
from compress.errors import RecipeError
from compress.training.loggers import Logger, MLflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger

ROOT = Path(__file__).parents[2]


def data():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    parts = [
        MemorySplit(images, torch.arange(20) % 2, labels=("a", "b"), preprocessing=Preprocessing(image_size=8), seed=0)
        for _ in range(2)
    ]
    return DataSet(train=parts[0], val=parts[1])


def train(*callbacks, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    spec = compress.TrainSpec(epochs=2, lr=0.01)
    return compress.fit(model, data(), spec, batch_size=5, callbacks=callbacks, **{"folder": None, **options})


class Heard(Callback):
    def __init__(self):
        self.calls = []

    def begin(self, name, spec, *, done):
        self.calls.append(("begin", name, spec.epochs, done))

    def step(self, name, step, figures):
        self.calls.append(("step", step, sorted(figures)))

    def epoch(self, name, row):
        self.calls.append(("epoch", row.epoch, row.step))

    def end(self, name, report):
        self.calls.append(("end", report.steps, report.final.values["top1"]))


def test_a_callback_hears_each_step_and_epoch_once():
    heard = Heard()
    report = train(heard)
    figures = ["accuracy", "images_per_s", "loss", "lr"]
    steps = [("step", i, figures) for i in range(1, 9)]
    assert heard.calls == [
        ("begin", "train", 2, 0),
        *steps[:4],
        ("epoch", 1, 4),
        *steps[4:],
        ("epoch", 2, 8),
        ("end", 8, report.final.values["top1"]),
    ]


def test_listening_changes_nothing(tmp_path):
    rows = [train(*callbacks).history for callbacks in ((), (Heard(),))]
    assert [(r.train_loss, r.val_top1) for r in rows[0]] == [(r.train_loss, r.val_top1) for r in rows[1]]


def test_a_resumed_training_is_heard_from_where_it_goes_on(tmp_path):
    class Stop(Callback):
        def epoch(self, name, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Stop(), folder=tmp_path)
    heard = Heard()
    train(heard, folder=tmp_path, resume=True)
    assert heard.calls[:2] == [("begin", "train", 2, 4), ("step", 5, ["accuracy", "images_per_s", "loss", "lr"])]


def test_tensorboard_reads_what_was_logged(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.every = 2
    report = train(logger)
    logger.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6, 8]
    tops = events.Scalars("train/val_top1")
    assert [(e.step, round(e.value, 4)) for e in tops] == [(r.step, round(r.val_top1, 4)) for r in report.history]


def test_one_s_own_logger_is_a_function():
    seen = []

    class Kept(Logger):
        def log(self, figures, step):
            seen.append((step, figures))

    train(Kept(every=100))
    assert [step for step, _ in seen] == [4, 8]
    assert {"train/train_loss", "train/val_top1"} <= seen[0][1].keys()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tensorboard", TensorBoardLogger), ("mlflow", MLflowLogger), ("wandb", WandbLogger), ("trackio", TrackioLogger)],
)
def test_a_library_that_is_missing_is_named_with_its_extra(name, kind, monkeypatch):
    real = builtins.__import__

    def without(library, *rest, **more):
        if library.split(".")[0] in {name, "tensorboard"} or library == "torch.utils.tensorboard":
            raise ImportError(f"no {library}")
        return real(library, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RecipeError, match=rf"pip install 'compress-vision\[{name}\]'"):
        kind()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name in project["optional-dependencies"]
