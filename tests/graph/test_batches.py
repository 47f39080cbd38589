"""Batches of any loader, and models of several inputs: what goes in is what the model's signature asks for."""

import pytest
import torch
from torch import nn

from compress import ActivationSpec, AdaRoundSpec, QuantSpec, quantize
from compress.errors import DataError
from compress.graph.inputs import batch_inputs, model_inputs
from compress.sparsity.saliency import calibration_inputs

X, Y = torch.randn(4, 3, 8, 8), torch.randn(4, 1, 8, 8)
TARGET = torch.zeros(4)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(16, 4)

    def forward(self, x, y, scale=1.0):
        return self.fc(scale * torch.cat([self.a(x).relu(), self.b(y).relu()], 1).mean((2, 3)))


@pytest.mark.parametrize("batch", [X, (X,), [X, TARGET], (X, TARGET, "name"), ((X,), TARGET)])
def test_the_first_tensor_is_the_input(batch):
    assert [x is X for x in batch_inputs(batch)] == [True]


@pytest.mark.parametrize("batch", [(X, Y), (X, Y, TARGET), ([X, Y], TARGET)])
def test_as_many_as_the_model_has_no_default_for(batch):
    assert [tuple(x.shape) for x in model_inputs(TwoInputs(), batch)] == [tuple(X.shape), tuple(Y.shape)]


@pytest.mark.parametrize("batch", [X, (X,), ("a.png", Y), ((X,), TARGET), (), {"x": X}])
def test_what_does_not_hold_the_inputs_is_refused(batch):
    with pytest.raises(DataError, match="takes 2 inputs: give a tuple that begins with 2 tensors"):
        model_inputs(TwoInputs(), batch)


@pytest.mark.parametrize("more", [{}, {"bias_correction": "empirical"}, {"adaround": AdaRoundSpec(steps=2)}])
def test_a_model_of_two_inputs_is_quantized(more):
    torch.manual_seed(0)
    model = TwoInputs().eval()
    spec = QuantSpec(activations=ActivationSpec(calibrator="max"), **more)
    qmodel = quantize(model, (X, Y), [(X, Y, TARGET)], spec=spec)
    expected = model(X, Y).detach()
    assert float((qmodel(X, Y).detach() - expected).norm() / expected.norm()) < 0.1
    assert qmodel.placement.activations


def test_hessians_take_no_more_images_than_asked_of_each_input():
    (first, second) = calibration_inputs(TwoInputs(), [(X, Y), (X, Y)], 6)
    assert [len(x) for x in (*first, *second)] == [4, 4, 2, 2]
