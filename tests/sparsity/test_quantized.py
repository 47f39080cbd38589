"""Sparse, then quantized with the masks held: through folding, insertion, training steps and back to plain weights."""

import copy
import pickle

import pytest
import torch

from compress import (
    QATSpec,
    QuantSpec,
    SparsitySpec,
    calibrate,
    fit,
    insert_quantizers,
    learn_scales,
    sparsify,
    squash_masks,
)
from compress.quantization.learned import freeze_scales
from compress.sparsity.parametrization import apply_masks, masked_layers, masks_of, verify_nm
from tests.sparsity.nets import batch, small
from tests.training.toy import toy_data


@pytest.fixture
def quantized():
    model = small()
    sparsify(model, SparsitySpec())
    masks = squash_masks(model)
    qmodel = insert_quantizers(model, batch(), QuantSpec())
    apply_masks(qmodel, masks)
    calibrate(qmodel, [batch(8)])
    return qmodel, masks


def test_zeros_stay_zero_in_the_integers_after_training(quantized):
    qmodel, masks = quantized
    assert sorted(masked_layers(qmodel)) == ["3", "6"]
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    before = qmodel.get_submodule("3").weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        qmodel(batch(8)).square().mean().backward()
        optimizer.step()
    for path in masks:
        layer = qmodel.get_submodule(path)
        fake = layer.weight_quantizer(layer.weight).detach()
        assert (fake[~masks[path]] == 0).all() and (fake[masks[path]] != 0).any()
        assert verify_nm(fake.numpy(), 2, 4) == 0
    assert not torch.equal(qmodel.get_submodule("3").weight, before)


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
    if spec.scales == "learned":
        learn_scales(qmodel)
    data = toy_data(train=56, val=10, classes=10, size=8)
    assert fit(qmodel, data, spec, batch_size=8, folder=None, device="cpu").steps >= 50
    freeze_scales(qmodel)
    squash_masks(qmodel)
    assert not torch.equal(qmodel.get_submodule("3").weight, before)
    for path, mask in masks.items():
        layer = qmodel.get_submodule(path)
        fake = layer.weight_quantizer(layer.weight).detach()
        assert (fake[~mask] == 0).all() and (fake[mask] != 0).any()
        assert verify_nm(fake.numpy(), 2, 4) == 0


def test_copies_pickles_and_squashes(quantized):
    qmodel, masks = quantized
    expected = qmodel(batch())
    for twin in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert torch.equal(twin(batch()), expected)
        assert all(torch.equal(masks_of(twin)[path], mask) for path, mask in masks.items())
    squash_masks(qmodel)
    assert torch.equal(qmodel(batch()), expected)
    assert not masked_layers(qmodel)
