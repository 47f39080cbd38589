"""Sampled positions of layers, against torch's own convolutions at those positions."""

import pytest
import torch
from torch import nn

from compress.quantization.ptq.adaround import sampled_rows

LAYERS = {
    "conv": nn.Conv2d(4, 6, 3, padding=1),
    "strided, dilated, oblong": nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1), bias=False),
    "grouped": nn.Conv2d(4, 8, 3, groups=2),
    "depthwise": nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "linear": nn.Linear(9, 5),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("count", [40, 10**6])
@torch.no_grad()
def test_rows_are_outputs_of_the_layer(kind, count):
    layer, x = LAYERS[kind], torch.randn(18, 4, 8, 9)
    y = layer(x)
    rows = sampled_rows(layer, [x], [y], count=count, generator=torch.Generator().manual_seed(0))
    assert rows.targets.shape[1] == (5 if kind == "linear" else y.shape[1])
    everything = rows.targets.numel() == y.numel()
    assert everything == (count == 10**6) and (everything or len(rows.targets) <= count + len(x))
    chosen = torch.randperm(len(rows.targets))[:30]
    torch.testing.assert_close(rows.outputs(layer.weight, chosen), rows.targets[chosen], atol=1e-5, rtol=1e-4)
    parts = sampled_rows(layer, x.split(7), y.split(7), count=count, generator=torch.Generator().manual_seed(0))
    assert torch.equal(parts.inputs, rows.inputs) and torch.equal(parts.targets, rows.targets)  # batches do not matter


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
              nn.ConvTranspose2d(4, 4, 2)]
)  # fmt: skip
def test_other_layers_have_none(layer):
    x = torch.randn(2, 4, 8, 8)
    assert sampled_rows(layer, [x], [layer(x)], count=9, generator=torch.Generator()) is None
