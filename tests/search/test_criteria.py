"""Importance of channels, against autograd and closed forms."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from compress.errors import SearchError
from compress.search.criteria import CRITERIA, channel_scores
from compress.search.structure import analyse

IMAGES = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(2))


class Gated(nn.Module):
    """A convolution, its norm, a factor on each channel, ReLU and a classifier."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.norm.weight.data = torch.tensor([0.5, -1.0, 2.0, 0.1])

    def forward(self, x, factor=None):
        x = self.norm(self.conv(x))
        x = torch.relu(x if factor is None else x * factor[:, :, None, None])
        return self.fc(x.mean((2, 3)))


MODEL = Gated().eval()
STRUCTURE = analyse(MODEL, IMAGES)


def scores(criterion):
    return channel_scores(STRUCTURE, criterion, [IMAGES])["conv"]


def test_first_and_second_order_are_those_of_autograd():
    factor = torch.ones(6, 4, requires_grad=True)
    out = MODEL(IMAGES, factor)
    (by_image,) = torch.autograd.grad(functional.cross_entropy(out, out.argmax(1), reduction="sum"), factor)
    torch.testing.assert_close(scores("taylor"), by_image.sum(0).square())
    torch.testing.assert_close(scores("fisher"), by_image.square().sum(0))


def test_magnitude_batchnorm_and_reconstruction_are_their_formulas():
    weight, fc = MODEL.conv.weight.detach(), MODEL.fc.weight.detach()
    torch.testing.assert_close(scores("magnitude"), weight.square().sum((1, 2, 3)) + fc.square().sum(0))
    torch.testing.assert_close(scores("batchnorm"), torch.tensor([0.5, 1.0, 2.0, 0.1]))
    hidden = torch.relu(MODEL.norm(MODEL.conv(IMAGES))).mean((2, 3)).detach()
    torch.testing.assert_close(scores("reconstruction"), hidden.square().mean(0) * fc.square().sum(0))


def test_unknown_criteria_are_refused():
    assert set(CRITERIA) == {"magnitude", "batchnorm", "taylor", "fisher", "reconstruction"}
    with pytest.raises(SearchError, match="tailor"):
        channel_scores(STRUCTURE, "tailor", [IMAGES])
