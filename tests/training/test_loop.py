import builtins
import copy
import csv
import dataclasses
import json
import math
import tomllib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import log_loss, top_k_accuracy_score
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import compress
from compress.data.base import BatchPlan, DataSet, Preprocessing, Split
from compress.errors import CheckpointError, DataError, ModelError, RecipeError
from compress.support.meters import TaskMetric
from compress.support.progress import NoProgress
from compress.tasks.base import first_tensor
from compress.tasks.classification import classification
from compress.tasks.segmentation import segmentation
from compress.training.distributed import Processes
from compress.training.log import Logger, MLflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from compress.training.passes import OutputsOf, outputs_of
from tests.networks import Net, unchanged
from tests.training.toy import Stop, ToySplit, WithAuxiliary, convnet, linear, smooth, toy_data


def train(model, folder=None, *, batch_size=8, data=None, **spec):
    options = {key: spec.pop(key) for key in ("teacher", "resume", "progress", "callbacks", "processes") if key in spec}
    spec = compress.TrainSpec(**{"epochs": 2, "warmup_epochs": 0, **spec})
    return compress.fit(model, data or toy_data(), spec, batch_size=batch_size, folder=folder, **options)


def table_of(folder):
    return list(csv.DictReader((folder / "train.csv").read_text().splitlines()))


def test_is_the_loop_that_one_would_write_by_hand():
    # SGD with Nesterov momentum on two accumulated batches, clipped, warmed up, cosine, smoothed, decayed weights.
    data, model = toy_data(train=45), smooth()
    reference = copy.deepcopy(model)
    batch, epochs, peak, warmup = 8, 2, 0.1, 2
    weights = [p for p in reference.parameters() if p.ndim > 1]
    biases = [p for p in reference.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=peak, momentum=0.9, nesterov=True)
    step, losses = 0, []
    for epoch in range(epochs):
        batches = list(data.train.batches(BatchPlan(batch_size=batch, epoch=epoch)))[:-1]  # the last one is smaller
        assert len(batches) == 5
        for first in range(0, 5, 2):
            group = batches[first : first + 2]
            warm = peak * (0.01 + 0.99 * step / warmup)
            cosine = peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (6 - warmup)))
            for parameters in optimizer.param_groups:
                parameters["lr"] = warm if step < warmup else cosine
            for images, targets in group:
                loss = F.cross_entropy(reference(images), targets, label_smoothing=0.1)
                (loss / len(group)).backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    report = train(
        model,
        data=data,
        lr=peak,
        warmup_epochs=warmup / 3,
        weight_decay=0.01,
        label_smoothing=0.1,
        clip_grad_norm=0.5,
        grad_accumulation=2,
    )
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-05, atol=1e-06)
    assert [row.train_loss for row in report.history] == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5])
    assert report.steps == 6


class Epochs(ToySplit):
    def load(self, indices, *, epoch, device):
        self.__dict__.setdefault("seen", []).append((epoch, tuple(indices)))
        return super().load(indices, epoch=epoch, device=device)


def test_a_later_phase_has_epochs_of_its_own(tmp_path):
    # Epoch 0 of a training that begins at epoch 2 is what epoch 2 of a longer training is: images and dropout.
    data = dataclasses.replace(toy_data(), train=Epochs(48))
    spec = compress.TrainSpec(epochs=2, warmup_epochs=0, schedule="constant", lr=0.1)
    compress.fit(linear(), data, spec, batch_size=8, folder=tmp_path, first_epoch=2)
    plans = [BatchPlan(batch_size=8, epoch=epoch, drop_last=True) for epoch in (2, 3)]
    expected = [(p.epoch, tuple(batch)) for p in plans for batch in data.train.batch_indices(p)]
    assert [row for row in data.train.seen if row[0] is not None] == expected
    with pytest.raises(CheckpointError, match="first_epoch"):
        compress.fit(linear(), data, spec, batch_size=8, folder=tmp_path, first_epoch=0, resume=True)


def test_learns_and_reports(tmp_path):
    data, model, listener = toy_data(train=96, val=40), convnet(), Mock(NoProgress)
    report = train(model, tmp_path, data=data, epochs=6, lr=0.1, evaluate_every=4, progress=listener)
    assert report.final.top1 > 0.9
    again = compress.evaluate(model, data.val, batch_size=8)
    assert (report.final.top1, report.final.top5, report.final.images) == (again.top1, again.top5, 40)
    assert report.final.loss == pytest.approx(again.loss, rel=1e-4)
    assert [row.epoch for row in report.history] == [1, 2, 3, 4, 5, 6]
    assert [row.epoch for row in report.history if row.val_top1 is not None] == [4, 6]
    assert report.best is not None
    assert report.best.val_top1 == max(row.val_top1 or 0 for row in report.history)
    assert (report.steps, report.resumed_from) == (72, None)
    assert report.images_per_s == pytest.approx(96 * 6 / report.seconds)

    listener.start.assert_any_call("train", 72, done=0)
    figures = [call.kwargs for call in listener.advance.call_args_list if call.args[0] == "train"]
    assert len(figures) == 72 and figures[-1].keys() == {"loss", "accuracy", "lr", "images_per_s"}
    assert figures[-1]["loss"] == pytest.approx(report.history[-1].train_loss)
    assert listener.finish.call_args.args == ("train",)

    table = table_of(tmp_path)
    assert list(table[0])[:6] == ["epoch", "step", "lr", "train_loss", "train_top1", "val_top1"]
    assert [row["val_top1"] == "" for row in table] == [True, True, True, False, True, False]
    assert [float(row["train_loss"]) for row in table] == pytest.approx(
        [r.train_loss for r in report.history], rel=1e-5
    )


def test_leaves_the_callers_things_alone():
    model, teacher = convnet().eval(), linear(3).train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with unchanged(teacher):
        train(model, teacher=teacher, distill=True)
    assert torch.equal(torch.rand(3), expected)
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in teacher.modules())
    assert all(p.grad is None for p in (*model.parameters(), *teacher.parameters()))
    assert model[0].weight.is_contiguous()


def test_seed_decides_dropout():
    weights = []
    for seed in (1, 1, 2):
        model = convnet()
        train(model, seed=seed)
        weights.append(model[0].weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_student_follows_its_teacher():
    # With all weight on distillation, labels do not count: the student comes to agree with a teacher that is wrong.
    teacher, model, data = linear(3), linear(4), toy_data(train=96)
    images = data.train.images

    def agreement():
        return (model(images).argmax(1) == teacher(images).argmax(1)).double().mean()

    assert agreement() < 0.5
    report = train(model, data=data, teacher=teacher, epochs=20, distill=True, distill_weight=1.0, lr=0.03)
    assert agreement() > 0.9
    assert report.history[-1].train_top1 < 0.3


@pytest.mark.parametrize("output", [tuple, dict])
def test_auxiliary_heads_are_ignored(output):
    plain, model = linear(0), WithAuxiliary(output)
    train(plain)
    train(model)
    assert torch.equal(model.body[1].weight, plain[1].weight)
    assert torch.equal(model.auxiliary[1].weight, linear(1)[1].weight)


def views():
    # Calls `view` on a convolution's output, which channels_last tensors refuse.
    torch.manual_seed(0)
    conv, fc = nn.Conv2d(3, 4, 3), nn.Linear(64, 4)
    return Net(lambda net, x: net.fc(net.conv(x).view(len(x), -1)), conv=conv, fc=fc)


def test_layout_changes_nothing_but_speed():
    for make, tolerances in ((views, {"rtol": 0, "atol": 0}), (smooth, {})):
        models = {layout: make() for layout in (None, False)}
        for layout, model in models.items():
            train(model, channels_last=layout)
        torch.testing.assert_close(models[None].state_dict(), models[False].state_dict(), **tolerances)
    with pytest.raises(RuntimeError, match="view"):
        train(views(), channels_last=True)


def test_bf16_and_compile_run():
    assert train(smooth(), data=toy_data(train=96), precision="bf16", epochs=4, lr=0.1).final.top1 > 0.9
    assert all(p.dtype == torch.float32 for p in smooth().parameters())
    eager, compiled, teacher = smooth(), smooth(), linear(3)
    train(eager, distill=True, teacher=teacher)
    with torch.compiler.set_stance("force_eager"):  # the wiring alone: compilers are slow, and not on every machine
        train(compiled, distill=True, teacher=teacher, compile=True)
    assert torch.equal(eager[0].weight, compiled[0].weight)
    assert compiled.state_dict().keys() == eager.state_dict().keys()


def test_zero_epochs_only_evaluates(tmp_path):
    model, data = linear(), toy_data()
    report = train(model, tmp_path, epochs=0)
    assert report.final == compress.evaluate(model, data.val, batch_size=8)
    assert (report.history, report.best, report.steps, report.seconds) == ((), None, 0, 0)
    assert torch.equal(model[1].weight, linear()[1].weight)


def test_fewer_images_than_a_batch():
    assert train(linear(), data=toy_data(train=5), batch_size=64).steps == 2


def explodes(left):
    # Returns NaN after that many steps of training.
    def run(net, images):
        net.left -= net.training
        return net.body(images) * (math.nan if net.left < 1 else 1)

    return Net(run, body=linear(), left=left)


def test_divergence_is_refused_and_leaves_the_last_checkpoint(tmp_path):
    with pytest.raises(compress.CompressError, match=r"loss is nan at epoch 2, step 9 \(lr 0.0\d+.*lower lr"):
        train(explodes(9), tmp_path, checkpoint_steps=4)
    path = tmp_path / "train.checkpoint.safetensors"
    assert all(value.isfinite().all() for value in load_file(path).values())
    with safe_open(path, "pt") as file:
        position = json.loads(file.metadata()["compress"])["data"]["position"]
    assert (position["epoch"], position["step"]) == (1, 2)
    assert train(explodes(10**9), tmp_path, checkpoint_steps=4, resume=True).resumed_from == 8


def test_weights_that_overflow_are_not_saved(tmp_path):
    # The loss of the only step is finite, its weights are not: they must not replace the checkpoint.
    with pytest.raises(compress.CompressError, match=r"1\.weight is NaN or infinite at epoch 1, step 1"):
        train(linear(), tmp_path, data=toy_data(train=8, noise=100.0), epochs=1, lr=1e38)
    assert all(value.isfinite().all() for value in load_file(tmp_path / "train.checkpoint.safetensors").values())


def broken():
    model = linear()
    model[1].bias.data[2] = math.nan
    return model


TWO_PROCESSES = {"data": toy_data(train=1), "processes": Processes(world_size=2)}


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        (linear(), {"lr": -1}, RecipeError, r"train\.lr is -1"),
        (linear(), {"precision": "fp16"}, RecipeError, "fp16"),
        (linear(), {"distill": True}, RecipeError, "no teacher"),
        (linear(), {"distill": True, "teacher": linear(classes=7)}, ModelError, r"\(2, 4\) and the teacher's \(2, 7\)"),
        (linear(classes=3), {}, ModelError, r"\(2, 3\) for 2 images of 4 classes"),
        (linear().requires_grad_(False), {}, ModelError, "no trainable parameter"),
        (linear(), {"resume": True}, CheckpointError, "without a folder"),
        (broken(), {}, ModelError, r"1\.bias is NaN or infinite before"),
        (linear(), TWO_PROCESSES, DataError, "1 images for 2 processes"),
    ],
)
def test_refusals(model, options, error, words):
    with pytest.raises(error, match=words):
        train(model, **options)


def test_resume_refuses_another_training(tmp_path):
    train(linear(), tmp_path)
    before = (tmp_path / "train.checkpoint.safetensors").read_bytes()
    for model, changes, words in (
        (linear(), {"epochs": 3, "batch_size": 16}, r"batch_size \(8 there, 16 here\), epochs \(2 there, 3 here\)"),
        (linear(), {"data": toy_data(train=40)}, "train_images"),
        (smooth(), {}, "another model"),
    ):
        with pytest.raises(CheckpointError, match=words):
            train(model, tmp_path, resume=True, **changes)
    assert (tmp_path / "train.checkpoint.safetensors").read_bytes() == before


def test_starting_anew_replaces_an_older_checkpoint_at_once(tmp_path):
    # Otherwise a new training that is killed early would be resumed as the old one.
    train(linear(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(linear(5), tmp_path, progress=Stop(1))
    assert torch.equal(load_file(tmp_path / "train.checkpoint.safetensors")["model.1.weight"], linear(5)[1].weight)
    assert train(linear(), tmp_path, resume=True).resumed_from == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.checkpoint.safetensors", "train.csv"]


def test_data_that_run_out_are_an_error():
    data = toy_data()
    data.train.batches = lambda plan, device: iter([data.train.load([0, 1], epoch=0, device=device)])
    with pytest.raises(DataError, match="ran out of images in epoch 1"):
        train(linear(), data=data)


def test_the_log_says_the_share_of_waiting_for_pictures(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Slow(ToySplit):
        def batches(self, plan, *, device="cpu"):
            for batch in super().batches(plan, device=device):
                clock[0] += 3.0
                yield batch

    def step(*_):
        clock[0] += 1.0

    spec = compress.TrainSpec(epochs=2, warmup_epochs=0)
    data = DataSet(train=Slow(48), val=ToySplit(22))
    report = compress.fit(linear(), data, spec, batch_size=8, folder=tmp_path, after_step=step)
    assert [row.waited for row in report.history] == [0.75, 0.75]
    assert "75 % of it waiting for images" in report.history[0].sentence(2, classification(4).metric)
    assert [row["waited"] for row in table_of(tmp_path)] == ["0.75", "0.75"]


# What listeners of a training hear, and the files that a logger writes, read by its own library.

ROOT = Path(__file__).parents[2]


def callbacks_train(*callbacks, **options):
    return train(linear(), data=toy_data(train=32), lr=0.01, callbacks=callbacks, **options)


class Heard(compress.Callback):
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
    report = callbacks_train(heard)
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
    rows = [callbacks_train(*callbacks).history for callbacks in ((), (Heard(),))]
    assert [(r.train_loss, r.val_top1) for r in rows[0]] == [(r.train_loss, r.val_top1) for r in rows[1]]


def test_a_resumed_training_is_heard_from_where_it_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        callbacks_train(folder=tmp_path, progress=Stop(5))
    heard = Heard()
    callbacks_train(heard, folder=tmp_path, resume=True)
    assert heard.calls[:2] == [("begin", "train", 2, 4), ("step", 5, ["accuracy", "images_per_s", "loss", "lr"])]


def test_tensorboard_reads_what_was_logged(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.every = 2
    report = callbacks_train(logger)
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

    callbacks_train(Kept(every=100))
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


# `fit` on DataLoaders, with a loss and a metric of one's own.

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(24, 3, 32, 40, generator=GENERATOR)  # rectangular
TARGETS = (IMAGES[:, 0].mean((1, 2)) > 0).long()
SPEC = compress.TrainSpec(epochs=2, lr=0.01)


class Mappings(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return {"x": IMAGES[index], "labels": TARGETS[index]}


def network():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=2)


def squared(outputs, targets):
    return (outputs.softmax(1) - torch.nn.functional.one_hot(targets, 2)).square().mean()


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def test_pairs_and_mappings_are_the_same_training():
    states = []
    for data in (TensorDataset(IMAGES, TARGETS), Mappings()):
        model = network()
        report = compress.fit(model, DataLoader(data, batch_size=8, shuffle=True), SPEC)
        states.append(model.state_dict())
        assert len(report.history) == 2
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0].values(), network().state_dict().values(), strict=True))


def test_own_loss_and_metric_train_a_quantized_network():
    loader = DataLoader(Mappings(), batch_size=8)
    qmodel = compress.quantize(network().eval(), IMAGES[:2], loader)
    before = [parameter.clone() for parameter in qmodel.parameters()]
    report = compress.fit(qmodel, loader, SPEC, val=loader, loss=squared, metric=accuracy)
    parts = [x.contiguous(memory_format=torch.channels_last) for x in IMAGES.split(8)]  # as `fit` evaluates
    outputs = torch.cat([*map(qmodel.eval(), parts)])
    assert not any(torch.equal(a, b) for a, b in zip(before, qmodel.parameters(), strict=True) if b.ndim > 1)
    assert report.final.loss == pytest.approx(squared(outputs, TARGETS).item())
    assert report.final.values["accuracy"] == pytest.approx(accuracy(outputs, TARGETS).item())
    found = compress.measure_metric(compress.TorchEngine(qmodel, (3, 32, 40)), loader, accuracy)
    assert found.values["accuracy"] == pytest.approx(accuracy(outputs, TARGETS).item())


def test_sensitivity_takes_a_loader_of_mappings_and_a_metric():
    loader = DataLoader(Mappings(), batch_size=12)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model = Net(lambda net, x: net.layers(x), layers=layers)
    model(IMAGES)
    found = compress.sensitivity(model.eval(), IMAGES[:2], loader, loader, metric=accuracy)
    assert found.float_score == pytest.approx(accuracy(model(IMAGES), TARGETS).item())
    assert {row.layer for row in found.rows} == {"layers.0", "layers.3"}


def test_a_stopped_training_goes_on_with_the_same_bits(tmp_path):
    loader, whole, parts = DataLoader(Mappings(), batch_size=8, shuffle=True), network(), network()
    compress.fit(whole, loader, SPEC)
    with pytest.raises(KeyboardInterrupt):
        compress.fit(parts, loader, SPEC, folder=tmp_path, progress=Stop(4))
    again = network()
    compress.fit(again, loader, SPEC, folder=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    "loader, error, words",
    [
        (DataLoader(Endless(), batch_size=2), DataError, "without a length"),
        (DataLoader(Mappings(), sampler=WeightedRandomSampler([1.0] * 24, 24)), DataError, "sampler of its own"),
        (DataLoader(TensorDataset(IMAGES), batch_size=2), DataError, "pairs"),
        (DataLoader(TensorDataset(IMAGES, IMAGES, TARGETS), batch_size=2), DataError, "one tensor of images"),
        (DataLoader(Mappings(), batch_size=None), RecipeError, "batch_size"),
    ],
)
def test_loaders_that_cannot_train_are_refused(loader, error, words):
    with pytest.raises(error, match=words):
        compress.fit(network(), loader, SPEC)


@pytest.mark.parametrize(("classes", "batch_size", "limit"), [(9, 7, None), (9, 50, 20), (3, 1, None)])
def test_agrees_with_scikit_learn(classes, batch_size, limit):
    split, model = ToySplit(31, classes=classes), linear(1, classes)
    got = compress.evaluate(model, split, batch_size=batch_size, limit=limit)
    ((images, targets),) = split.batches(BatchPlan(batch_size=31, limit=limit))
    scores = torch.softmax(model(images).double(), 1).detach().numpy()
    labels = np.arange(classes)
    assert got.images == (limit or 31)
    assert got.top1 == pytest.approx(top_k_accuracy_score(targets, scores, k=1, labels=labels))
    expected5 = top_k_accuracy_score(targets, scores, k=5, labels=labels) if classes > 5 else 1.0
    assert got.top5 == pytest.approx(expected5)
    assert got.loss == pytest.approx(log_loss(targets, scores, labels=labels), rel=1e-5)


def test_leaves_modes_and_statistics_as_they_were():
    model = convnet().train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    with unchanged(model):
        compress.evaluate(model, ToySplit(8), batch_size=4)
    assert [module.training for module in model.modules()] == modes


def test_shares_of_three_processes_sum_to_the_whole():
    # Each share is evaluated as its process would; the sums that meet in all_reduce are compared here.
    split, model = ToySplit(22), linear()
    whole = compress.evaluate(model, split, batch_size=5)
    parts = [
        compress.evaluate(model, split, batch_size=5, processes=Alone(rank=rank, world_size=3)) for rank in range(3)
    ]
    assert sum(part.images for part in parts) == whole.images
    assert sum(part.top1 * part.images for part in parts) == pytest.approx(whole.top1 * whole.images)
    assert sum(part.loss * part.images for part in parts) == pytest.approx(whole.loss * whole.images)


class Alone(Processes):
    def all_reduce_sum(self, tensor):
        return tensor

    def gather(self, value):
        return [value] * self.world_size


def test_logits_in_an_object_are_found_and_a_model_that_fails_is_named():
    class Result:
        logits = torch.ones(2, 3)

    assert first_tensor(Result()) is Result.logits
    with pytest.raises(ModelError, match=r"Conv2d fails on images of shape \(2, 3, 8, 8\)"):
        outputs_of(OutputsOf(nn.Conv2d(1, 4, 3)), torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        (linear(), {"precision": "fp16"}, RecipeError, "fp16"),
        (linear(), {"limit": 0}, DataError, "no image"),
        (linear(classes=3), {}, ModelError, r"\(4, 3\) for 4 images of 4 classes"),
        (nn.Identity(), {}, ModelError, r"\(4, 3, 6, 6\)"),
        (Net(lambda net, x: None), {}, ModelError, "NoneType"),
        (
            linear(),
            {"device": "cuda", "processes": Processes(world_size=2)},
            compress.CompressError,
            "device is cuda and the processes were started on cpu",
        ),
    ],
)
def test_refusals_of_evaluate(model, options, error, words):
    with pytest.raises(error, match=words):
        compress.evaluate(model, ToySplit(8), batch_size=4, **options)


def test_bf16_is_close_to_fp32():
    split, model = ToySplit(64), linear()
    full, half = (compress.evaluate(model, split, batch_size=16, precision=p) for p in ("fp32", "bf16"))
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert half.loss != full.loss


class ByNumpy:
    def __init__(self):
        self.right = []

    def update(self, outputs, targets):
        self.right += (outputs.numpy().argmax(1) == targets.numpy()).tolist()

    def compute(self):
        return np.mean(self.right)


def test_a_metric_that_computes_with_numpy_judges_in_bf16():
    split, model = ToySplit(64), linear()
    task = dataclasses.replace(classification(4), metric=TaskMetric(name="right", make=ByNumpy), evidence=None)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = (model(split.images).argmax(1) == split.targets).float().mean()
    seen = compress.evaluate(model, split, batch_size=16, precision="bf16", task=task)
    assert seen.values["right"] == pytest.approx(float(expected))


# Training on tasks other than classification, with frozen layers, and resumed to the bit.

LABELS = ("dark", "bright")
TASK = segmentation(LABELS)


class Squares(ToySplit):
    def __init__(self, count):
        Split.__init__(self, labels=LABELS, preprocessing=Preprocessing(image_size=(8, 12)), seed=0)
        generator = torch.Generator().manual_seed(count)
        self.targets = torch.zeros(count, 8, 12, dtype=torch.int64)
        for i in range(count):
            top, left = (torch.randint(0, 6, (2,), generator=generator)).tolist()
            self.targets[i, top : top + 4, left : left + 5] = 1
        self.images = self.targets.unsqueeze(1) + 0.2 * torch.randn(count, 3, 8, 12, generator=generator)


def tasks_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 2, 1)
    )


DATA = DataSet(train=Squares(24), val=Squares(8))
TASKS_SPEC = compress.TrainSpec(epochs=3, lr=0.05, warmup_epochs=0, checkpoint_steps=2)


def test_a_network_learns_to_segment_and_a_stopped_training_goes_on_to_the_bit(tmp_path):
    model = tasks_network()
    report = compress.fit(model, DATA, TASKS_SPEC, batch_size=8, folder=tmp_path / "a", task=TASK)
    assert report.final.values["miou"] > 0.8
    rows = table_of(tmp_path / "a")
    assert float(rows[-1]["val_miou"]) == pytest.approx(report.final.values["miou"], rel=1e-5)
    assert not [name for name in rows[0] if "top" in name]
    assert report.best is not None
    other = tasks_network()
    with pytest.raises(KeyboardInterrupt):
        compress.fit(other, DATA, TASKS_SPEC, batch_size=8, folder=tmp_path / "b", task=TASK, progress=Stop(5))
    other = tasks_network()
    again = compress.fit(other, DATA, TASKS_SPEC, batch_size=8, folder=tmp_path / "b", task=TASK, resume=True)
    assert again.resumed_from == 4
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert again.final == report.final


def test_a_network_learns_from_a_teachers_maps():
    teacher = tasks_network()
    compress.fit(teacher, DATA, TASKS_SPEC, batch_size=8, folder=None, task=TASK)
    student = tasks_network()
    spec = compress.TrainSpec(epochs=8, lr=0.05, warmup_epochs=0, distill=True, distill_weight=1.0)
    report = compress.fit(student, DATA, spec, batch_size=8, folder=None, task=TASK, teacher=teacher)
    assert report.final.values["miou"] > 0.7


def test_frozen_layers_stay_as_they_are():
    model = convnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = compress.TrainSpec(epochs=1, lr=0.1, warmup_epochs=0, frozen=("0.*", "1.*"))
    compress.fit(model, toy_data(), spec, batch_size=16, folder=None)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith(("0.", "1."))}
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(RecipeError, match="frozen 'backbone' matches no parameter"):
        compress.fit(model, toy_data(), compress.TrainSpec(epochs=1, frozen=("backbone",)), batch_size=16, folder=None)
