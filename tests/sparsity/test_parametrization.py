import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compress import (
    MaskSchedule,
    QATSpec,
    QuantSpec,
    SparsitySpec,
    calibrate,
    fit,
    insert_quantizers,
    learn_scales,
    sparsify,
    squash_masks,
    trace,
)
from compress.errors import CheckpointError, SparsityError
from compress.graph.modules import bake
from compress.models.by_name import fit_state
from compress.quantization.learned import freeze_scales
from compress.sparsity.parametrization import NMMask, apply_masks, masked_layers, masks_of, nm_mask, verify_nm
from compress.training import FinetuneSpec
from compress.training.checkpoint import load_model, save_model
from compress.training.passes import QUIET
from tests.fresh import finish, start
from tests.networks import Net, unchanged
from tests.sparsity.nets import batch, small, sparse
from tests.sparsity.two_processes import work
from tests.training.toy import Stop, toy_data

SPEC = SparsitySpec()
PATHS = ["3", "6"]


def test_masked_weight_is_the_original_times_the_mask_and_the_parameter_stays():
    model = small()
    parameter, values = model[3].weight, model[3].weight.detach().clone()
    sparsify(model, SPEC)
    assert model[3].parametrizations.weight.original is parameter
    assert torch.equal(parameter, values)
    assert torch.equal(model[3].weight, values * nm_mask(values, 2, 4))
    assert isinstance(model[3], nn.Conv2d)


def test_infinite_masked_weights_do_no_harm():
    model = small()
    masks = {"3": nm_mask(model[3].weight, 2, 4)}
    model[3].weight.data[~masks["3"]] = float("inf")
    apply_masks(model, masks)
    assert model(batch()).isfinite().all()


def test_squash_leaves_a_plain_model_that_computes_the_same():
    model = sparse()
    expected, parameter = model(batch()), masked_layers(model)["6"].original
    masks = squash_masks(model)
    assert sorted(masks) == PATHS
    assert type(model[6]) is nn.Conv2d and model[6].weight is parameter
    assert torch.equal(model(batch()), expected)
    assert set(model.state_dict()) == set(small().state_dict())
    assert all(verify_nm(model.get_submodule(p).weight.detach().numpy(), 2, 4) == 0 for p in PATHS)
    apply_masks(model, masks)  # and held again, as between pruning and quantization
    assert all(torch.equal(masks_of(model)[p], masks[p]) for p in PATHS)


def test_one_of_two_parametrizations_is_baked_and_copies_keep_both():
    layer = nn.Linear(3, 2)
    weight = layer.weight
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Net(lambda net, x: 2 * x))
    twin = copy.deepcopy(layer)
    expected = layer(torch.ones(1, 3))
    bake(layer, "weight")
    assert layer.weight is weight and not parametrize.is_parametrized(layer, "weight")
    assert parametrize.is_parametrized(layer, "bias") and parametrize.is_parametrized(twin, "weight")
    for one in (layer, twin):
        torch.testing.assert_close(one(torch.ones(1, 3)), expected)
    bake(layer, "bias")
    assert type(layer) is nn.Linear and set(layer.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "traced"])
def test_copies_are_independent_and_compute_and_mask_as_before(how):
    model = trace(sparse(), batch()) if how == "traced" else sparse()
    expected = model(batch())
    if how == "torch.save":
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert all(torch.equal(masks_of(twin)[path], mask) for path, mask in masks_of(model).items())
    masked_layers(model)["3"].original.data.fill_(0)
    masked_layers(model)["3"].mask.fill_(False)
    assert torch.equal(twin(batch()), expected)
    twin.train()(batch()).square().sum().backward()
    for layer in masked_layers(twin).values():
        assert (layer.original.grad[~layer.mask] == 0).all() and (layer.original.grad[layer.mask] != 0).any()
    plain = copy.deepcopy(twin.eval())  # a copy of what was unpickled, too
    assert sorted(squash_masks(plain)) == PATHS == sorted(masked_layers(twin))
    torch.testing.assert_close(plain(batch()), twin(batch()), rtol=0, atol=0)


def test_pickle_keeps_the_optimizer_bound_to_its_parameters():
    model = sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch()).sum().backward()
    optimizer.step()
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    held = {id(p) for group in other.param_groups for p in group["params"]}
    assert held == {id(p) for p in twin.parameters()}


def test_state_dict_round_trip_carries_the_masks():
    model, other = sparse(), small()
    for layer in (other[3], other[6]):
        nn.init.normal_(layer.weight)
    sparsify(other, SPEC)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch()), model(batch()))


SMALLER = {"3.parametrizations.weight.0.mask": torch.ones(32, 8, 3, 3, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: small().state_dict(), "load it before sparsify"),
        (lambda: sparse().state_dict() | SMALLER, r"3\.weight: the checkpoint's mask is \(32, 8, 3, 3\)"),
    ],
)
def test_dense_checkpoints_and_masks_of_another_shape_are_refused(state, words):
    with pytest.raises(SparsityError, match=words):
        sparse().load_state_dict(state())


def test_misuse_is_refused_and_changes_nothing():
    model = small()
    good = nm_mask(model[3].weight, 2, 4)
    for masks, match in [
        ({"3": good, "9": good}, "has no parameter"),
        ({"3": good, "30": good}, "no layer '30'"),
        ({"3": good[:, :8]}, r"needed, got torch.bool of \(32, 8, 3, 3\)"),
        ({"3": good.float()}, r"got torch.float32"),
    ]:
        with pytest.raises(SparsityError, match=match):
            apply_masks(model, masks)
        assert not masked_layers(model)
    with pytest.raises(SparsityError, match="boolean"):
        NMMask(torch.ones(4, 4))
    with pytest.raises(SparsityError, match="no layer of the model is masked"):
        squash_masks(model)
    apply_masks(model, {"3": good})
    with pytest.raises(SparsityError, match="masked already"):
        apply_masks(model, {"3": good})
    parametrize.register_parametrization(model[6], "weight", nn.Identity())
    with pytest.raises(SparsityError, match="parametrized by something else"):
        apply_masks(model, {"6": torch.ones_like(model[6].weight, dtype=torch.bool)})


def test_assigning_a_weight_keeps_the_mask():
    model = sparse()
    model[3].weight = torch.ones_like(model[3].weight)
    assert torch.equal(model[3].weight, masked_layers(model)["3"].mask.float())


# Masks in the trainer that ships: every optimizer and option, fifty steps each, EMA copies, a stop and a resume.

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


def loops_sparse(schedule="one-shot", **options):
    spec = SparsitySpec(schedule=schedule, **options)
    model = sparse(spec).train()
    return model, MaskSchedule(model, spec)


def train(model, schedule, after_step=None, folder=None, resume=False, progress=QUIET, **options):
    spec = FinetuneSpec(**({"epochs": 8, "lr": 0.02, "distill": False, "evaluate_every": 20} | options))
    totals = []

    def step(done, total, optimizer):
        schedule.after_step(done, total, optimizer)
        totals.append(total)
        if after_step is not None:
            after_step(done)

    options = {"teacher": small() if spec.distill else None, "resume": resume, "progress": progress}
    fit(model, DATA, spec, batch_size=8, folder=folder, after_step=step, device="cpu", **options)
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
    model, masks = loops_sparse(schedule)
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
    model, masks = loops_sparse(schedule)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, masks, after_step=lambda _: average.update_parameters(model))
    twin = average.module
    assert not torch.equal(twin[3].parametrizations.weight.original, model[3].parametrizations.weight.original)
    check(twin)  # weights are averages, masks the last model's


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stopped_training_resumes_to_the_same_bits(schedule, tmp_path):
    options = {"optimizer": "adamw", "lr": 0.002, "checkpoint_steps": 7, "ema_decay": 0.95}

    whole, masks = loops_sparse(schedule, update_steps=3)
    train(whole, masks, folder=tmp_path / "whole", **options)
    model, masks = loops_sparse(schedule, update_steps=3)
    with pytest.raises(KeyboardInterrupt):
        train(model, masks, progress=Stop(40), folder=tmp_path / "halves", **options)
    model, masks = loops_sparse(schedule, update_steps=3)
    assert train(model, masks, folder=tmp_path / "halves", resume=True, **options) < 25
    check(model)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_files_of_sparse_and_dense_models_are_not_taken_for_each_other(tmp_path):
    model, _ = loops_sparse()
    dense = small()
    masked_file, dense_file = (save_model(m, tmp_path / n) for m, n in ((model, "masked"), (dense, "dense")))
    with unchanged(dense):
        with pytest.raises(CheckpointError, match=r"unexpected: .*parametrizations.*masked network: call sparsify"):
            load_model(dense, masked_file)
        with pytest.raises(CheckpointError, match=r"missing: .*parametrizations.*of a dense network"):
            load_model(model, dense_file)
    with pytest.raises(CheckpointError, match="of a masked network: call sparsify before loading it"):
        fit_state(dense, model.state_dict(), source="masked.pt")
    squash_masks(model)
    load_model(dense, save_model(model, tmp_path / "squashed"))
    assert torch.equal(dense[3].weight, model[3].weight)


# Sparse, then quantized with the masks held: through folding, insertion, training steps and back to plain weights.


@pytest.fixture
def quantized():
    masks = squash_masks(model := sparse())
    qmodel = insert_quantizers(model, batch(), QuantSpec())
    apply_masks(qmodel, masks)
    calibrate(qmodel, [batch(8)])
    return qmodel, masks


def check_zeros(qmodel, masks):
    for path, mask in masks.items():
        layer = qmodel.get_submodule(path)
        fake = layer.weight_quantizer(layer.weight).detach()
        assert (fake[~mask] == 0).all() and (fake[mask] != 0).any()
        assert verify_nm(fake.numpy(), 2, 4) == 0


QAT = {
    "plain": {},
    "adamw, bf16": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "precision": "bf16"},
    "fused": {"fused": "on"},
    "fused, INT8 where it can": {"fused": "int8"},
    "mean of the weights": {"ema_decay": 0.9},
    "learned ranges": {"scales": "learned", "lr": 0.001},
}


@pytest.mark.parametrize("options", QAT)
def test_zeros_survive_fifty_steps_of_the_trainer(quantized, options):
    qmodel, masks = quantized
    spec = QATSpec(**({"epochs": 8, "lr": 0.01, "distill": False, "evaluate_every": 20} | QAT[options]))
    before = qmodel.get_submodule("3").weight.detach().clone()
    assert sorted(masked_layers(qmodel)) == PATHS
    if spec.scales == "learned":
        learn_scales(qmodel)
    assert fit(qmodel, DATA, spec, batch_size=8, folder=None, device="cpu").steps >= 50
    check_zeros(qmodel, masks)
    freeze_scales(qmodel)
    squash_masks(qmodel)
    assert not torch.equal(qmodel.get_submodule("3").weight, before)
    check_zeros(qmodel, masks)


def test_copies_pickles_and_squashes(quantized):
    qmodel, masks = quantized
    expected = qmodel(batch())
    for twin in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert torch.equal(twin(batch()), expected)
        assert all(torch.equal(masks_of(twin)[path], mask) for path, mask in masks.items())
    squash_masks(qmodel)
    assert torch.equal(qmodel(batch()), expected)
    assert not masked_layers(qmodel)


# Masks in DistributedDataParallel: two processes against one on the same batches.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finish(folder / "said-0", *[start(folder / f"said-{rank}", work, rank, folder) for rank in (0, 1)])
    return folder


@pytest.mark.parametrize("schedule", ["one-shot", "gradual", "sr-ste", "gumbel"])
def test_two_processes_train_and_mask_what_one_does(folder, schedule):
    first, second, alone = (torch.load(folder / f"{schedule}-{who}.pt") for who in (0, 1, "alone"))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    for key, value in first.items():
        # the shares of learned masks are at a low temperature, which magnifies the rounding of sums in another order
        torch.testing.assert_close(alone[key], value, rtol=0, atol=1e-3 if key.endswith("shares") else 1e-5)
    for key in PATHS:
        mask = first[f"{key}.parametrizations.weight.0.mask"]
        assert verify_nm(mask.numpy(), 2, 4) == 0
        assert mask.float().mean() == 0.5
