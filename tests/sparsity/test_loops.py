"""Masks in the trainer that ships: every optimizer and option, fifty steps each, EMA copies, a stop and a resume."""

import copy
import itertools

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compress import MaskSchedule, SparsitySpec, fit, sparsify, squash_masks
from compress.errors import CheckpointError
from compress.models.weights import load_state
from compress.sparsity.parametrization import masked_layers, masks_of, verify_nm
from compress.training.checkpoint import load_model, save_model
from compress.training.spec import FinetuneSpec
from tests.sparsity.nets import small
from tests.training.toy import toy_data

DATA = toy_data(train=56, val=10, classes=10, size=8)
SCHEDULES = ("one-shot", "gradual", "sr-ste", "gumbel")
OPTIONS = {
    "sgd": {},
    "sgd without momentum": {"momentum": 0.0},
    "sgd with decay": {"weight_decay": 0.05},
    "adamw": {"optimizer": "adamw", "lr": 0.002, "weight_decay": 0.05},
    "grad accumulation": {"epochs": 13, "grad_accumulation": 2},
    "bf16": {"precision": "bf16"},
    "clipped": {"optimizer": "adamw", "lr": 0.002, "clip_grad_norm": 0.1},
    "distilled": {"distill": True},
    "channels last": {"channels_last": True},
    "mean of the weights": {"ema_decay": 0.95},
}


def sparse(schedule="one-shot", **options):
    spec = SparsitySpec(schedule=schedule, **options)
    model = small().train()
    sparsify(model, spec)
    return model, MaskSchedule(model, spec)


def train(model, schedule, after_step=None, folder=None, resume=False, **options):
    spec = FinetuneSpec(**({"epochs": 8, "lr": 0.02, "distill": False, "evaluate_every": 20} | options))
    totals = []

    def step(done, total, optimizer):
        schedule.after_step(done, total, optimizer)
        totals.append(total)
        if after_step is not None:
            after_step(done)

    teacher = small() if spec.distill else None
    fit(model, DATA, spec, batch_size=8, folder=folder, teacher=teacher, after_step=step, resume=resume, device="cpu")
    return len(totals)


def check(model):
    for layer in masked_layers(model).values():
        assert verify_nm(layer.module.weight.detach().numpy(), 2, 4) == 0
        assert layer.mask.float().mean() == 0.5


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        *itertools.product(("sgd", "adamw"), SCHEDULES),
        *((options, SCHEDULES[i % 4]) for i, options in enumerate(OPTIONS) if options not in {"sgd", "adamw"}),
    ],
)
def test_masks_survive_the_trainer(options, schedule):
    model, masks = sparse(schedule)
    before, weight = masks_of(model), model[3].weight.detach().clone()
    assert train(model, masks, **OPTIONS[options]) >= 50
    check(model)
    assert not torch.equal(model[3].weight, weight)
    if schedule == "one-shot":
        assert all(torch.equal(mask, before[path]) for path, mask in masks_of(model).items())
    for path in squash_masks(model):
        assert verify_nm(model.get_submodule(path).weight.detach().numpy(), 2, 4) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_averaged_copies_hold_the_pattern(schedule):
    model, masks = sparse(schedule)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, masks, after_step=lambda _: average.update_parameters(model))
    twin = average.module
    assert not torch.equal(twin[3].parametrizations.weight.original, model[3].parametrizations.weight.original)
    check(twin)  # weights are averages, masks the last model's


class StopError(Exception):
    pass


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stopped_training_resumes_to_the_same_bits(schedule, tmp_path):
    options = {"optimizer": "adamw", "lr": 0.002, "checkpoint_steps": 7, "ema_decay": 0.95}

    def stop(done):
        if done == 40:
            raise StopError

    whole, masks = sparse(schedule, update_steps=3)
    train(whole, masks, folder=tmp_path / "whole", **options)
    model, masks = sparse(schedule, update_steps=3)
    with pytest.raises(StopError):
        train(model, masks, after_step=stop, folder=tmp_path / "halves", **options)
    model, masks = sparse(schedule, update_steps=3)
    assert train(model, masks, folder=tmp_path / "halves", resume=True, **options) < 25
    check(model)
    for key, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_files_of_sparse_and_dense_models_are_not_taken_for_each_other(tmp_path):
    model, _ = sparse()
    dense = small()
    masked_file, dense_file = (save_model(m, tmp_path / n) for m, n in ((model, "masked"), (dense, "dense")))
    state = copy.deepcopy(dense.state_dict())
    with pytest.raises(CheckpointError, match=r"unexpected: .*parametrizations.*of a masked network: call sparsify"):
        load_model(dense, masked_file)
    with pytest.raises(CheckpointError, match=r"missing: .*parametrizations.*of a dense network"):
        load_model(model, dense_file)
    assert all(torch.equal(dense.state_dict()[key], value) for key, value in state.items())
    with pytest.raises(CheckpointError, match="of a masked network: call sparsify before loading it"):
        load_state(dense, model.state_dict(), source="masked.pt")
    squash_masks(model)
    load_model(dense, save_model(model, tmp_path / "squashed"))
    assert torch.equal(dense[3].weight, model[3].weight)
