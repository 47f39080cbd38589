"""BatchNorm recalibrated: the statistics are those that torch computes from the same activations."""

import copy

import pytest
import torch
from torch import nn

import compress
from compress import recalibrate_batchnorm
from compress.errors import DataError
from tests.training.toy import ToySplit, convnet


def test_statistics_are_the_means_over_the_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.9), nn.Conv2d(8, 4, 3))
    model = model.append(nn.BatchNorm2d(4)).eval()
    model[5].train()  # the modes come back, one by one
    batches = [torch.randn(8, 3, 10, 10) * (1 + i) for i in range(3)]
    weights = {name: p.clone() for name, p in model.named_parameters()}

    assert recalibrate_batchnorm(model, [(batch, torch.zeros(8)) for batch in batches]) == 2

    first = [model[0](x) for x in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([y.mean((0, 2, 3)) for y in first]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([y.var((0, 2, 3)) for y in first]).mean(0))
    normal = [nn.functional.batch_norm(y, None, None, model[1].weight, model[1].bias, training=True) for y in first]
    second = [model[4](y.relu()) for y in normal]  # no dropout
    torch.testing.assert_close(model[5].running_mean, torch.stack([y.mean((0, 2, 3)) for y in second]).mean(0))
    assert [model[5].momentum, model[5].training, model[1].training, model.training] == [0.1, True, False, False]
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("batches", [[], [torch.randn(4, 3, 6, 6), ["no images"]]], ids=["none", "one is no batch"])
def test_bad_batches_leave_the_statistics(batches):
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError):
        recalibrate_batchnorm(model, batches)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_batchnorm_is_left_alone():
    assert recalibrate_batchnorm(nn.Linear(2, 2), iter([])) == 0


def test_a_masked_network_gets_its_own_statistics():
    """Recalibration restores most of the shift that a mask causes in the outputs of later layers."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    dense = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = ToySplit(64, size=8).images
    recalibrate_batchnorm(dense, [images])
    dense.eval()
    model = copy.deepcopy(dense)
    compress.sparsify(model, compress.SparsitySpec(kernels="any"), example_inputs=images[:2])

    def error():
        with torch.no_grad():
            return (model(images) - dense(images)).square().mean().item()

    stale = error()
    recalibrate_batchnorm(model, images.split(16))
    assert error() < 0.5 * stale
