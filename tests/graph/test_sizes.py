"""Networks bound to an image size: said when they are quantized, and where they get another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress import QuantSpec, calibrate, quantize, trace
from compress.errors import CalibrationError, ModelError
from compress.graph.inputs import bound_to_size
from compress.training.evaluate import OutputsOf, outputs_of

X = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 8 * 12, 2)
        self.register_buffer("points", torch.rand(1, 4, 8, 12))
        self.after = after

    def forward(self, x):
        return self.after(self, self.conv(x))


BOUND = {
    "points": lambda s, x: x + s.points,
    "linear": lambda s, x: s.head(x.flatten(1)),
    "reshape": lambda s, x: x.reshape(x.shape[0], 4, 96).mean(1),
}
FREE = {
    "pool": lambda s, x: x.mean((2, 3)),
    "resize": lambda s, x: F.interpolate(x, scale_factor=2.0),
    "half": lambda s, x: F.max_pool2d(x, 2).flatten(2).transpose(1, 2),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_network_bound_to_a_size_says_so_and_fails_at_another(name):
    model = Net(BOUND[name]).eval()
    found = bound_to_size(trace(model, X), (X,))
    assert "images of 8 x 12 pixels alone" in found
    assert {"points": "points", "linear": "head", "reshape": "reshape"}[name] in found
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 3, 16, 24))


@pytest.mark.parametrize("name", FREE)
def test_a_network_of_any_size_says_nothing(name):
    model = Net(FREE[name]).eval()
    assert bound_to_size(trace(model, X), (X,)) == ""
    model(torch.rand(2, 3, 16, 24))


def test_the_size_is_named_where_another_one_comes():
    qmodel = quantize(Net(BOUND["points"]).eval(), X, [X], spec=QuantSpec(head="quantize"))
    assert any("8 x 12 pixels alone" in note for note in qmodel.report.notes())
    wrong = torch.rand(2, 3, 16, 24)
    with pytest.raises(CalibrationError, match="8 x 12 pixels alone"):
        calibrate(qmodel, [wrong])
    with pytest.raises(ModelError, match="8 x 12 pixels alone"):
        outputs_of(OutputsOf(qmodel), wrong)
