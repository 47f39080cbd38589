import importlib

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import compress
from compress import SparsitySpec, prune_channels, sparsify
from compress.errors import SparsityError
from compress.sparsity.spec import SparsityRule
from tests.networks import TinyResNet
from tests.sparsity.nets import batch, small

pytest.importorskip("torch_pruning")


def macs_of(model, x):
    """By torch's own flop counter."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: TinyResNet(width=32), 0.25),
        (lambda: TinyResNet(width=32), 0.6),
        (lambda: models.mobilenet_v2(width_mult=0.25, num_classes=10), 0.5),
    ],
)
def test_macs_go_down_to_the_share_asked_for(make, share):
    model, x = make().eval(), torch.randn(2, 3, 32, 32)
    macs, parameters = macs_of(model, x), sum(p.numel() for p in model.parameters())
    spec = SparsitySpec(pattern=f"channel:{share}", kernels="any")
    report = prune_channels(model, spec, example_inputs=x)
    assert report.macs_before == macs and report.macs_after == macs_of(model, x)
    assert report.removed == pytest.approx(share, abs=0.04)
    assert (report.parameters_before, report.parameters_after) == (
        parameters,
        sum(p.numel() for p in model.parameters()),
    )
    assert model(x).shape == (2, 10)
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert {row.layer: row.after for row in report.rows} == shapes
    model.train()(x).sum().backward()  # and it still trains
    assert all(p.grad is not None for p in model.parameters())


def test_weakest_channels_go_and_counts_fit_tensor_cores():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 5))
    with torch.no_grad():
        model[0].weight[::2] *= 1e-3
        model[2].weight[:, ::2] *= 1e-3
    strong = model[0].weight[1::2].detach().clone()
    spec = SparsitySpec(pattern="channel:0.5", rules=(SparsityRule(match="2", enable=False),))
    report = prune_channels(model, spec, example_inputs=torch.randn(1, 3, 8, 8))
    assert torch.equal(model[0].weight, strong)
    assert [row.after[:2] for row in report.rows] == [(16, 3), (16, 16), (5, 256)]


class Branches(nn.Module):
    """Channels that move together through a sum, a concatenation, BatchNorm and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Conv2d(i, 32, 3, padding=1), nn.BatchNorm2d(32)) for i in (3, 32))
        self.dw, self.c, self.fc = nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 3), nn.Linear(64, 5)

    def forward(self, x):
        x = self.a(x).relu()
        x = (x + self.b(x)).relu()
        return self.fc(torch.cat([self.dw(x), self.c(x)], 1).mean((2, 3)))


def test_a_pruned_network_computes_what_one_with_its_channels_zeroed_does():
    """Channels of zeros are the weakest, so the network before pruning is the oracle."""
    torch.manual_seed(0)
    model, x = Branches().eval(), batch()
    with torch.no_grad():
        for layer in (model.a[0], model.b[0], model.dw, model.c, model.a[1], model.b[1]):
            layer.weight[::2], layer.bias[::2] = 0, 0
        for layer in (model.b[0], model.c, model.fc):
            layer.weight[:, ::2] = 0
    expected = model(x)
    report = compress.prune_channels(model, SparsitySpec(pattern="channel:0.5", kernels="any"), example_inputs=x)
    assert 0.4 < report.removed < 0.6 and model.a[0].out_channels < 32
    torch.testing.assert_close(model(x), expected)


def test_module_modes_survive():
    model = small().train()
    model[1].eval()
    prune_channels(model, SparsitySpec(pattern="channel:0.3", kernels="any"), example_inputs=batch())
    assert [m.training for m in model] == [i != 1 for i in range(11)]


def test_misuse_is_refused(monkeypatch):
    spec = SparsitySpec(pattern="channel:0.5")
    with pytest.raises(SparsityError, match="call sparsify"):
        prune_channels(small(), SparsitySpec(), example_inputs=batch())
    with pytest.raises(SparsityError, match="quantized: remove channels of the float model"):
        prune_channels(compress.quantize(small(), batch(), [batch()]), spec, example_inputs=batch())
    masked = small()
    sparsify(masked, SparsitySpec())
    with pytest.raises(SparsityError, match="masked already"):
        prune_channels(masked, spec, example_inputs=batch())
    rules = (SparsityRule(match="*", enable=False),)
    with pytest.raises(SparsityError, match=r"whole channels reach is 0\.00 of the macs"):
        prune_channels(small(), SparsitySpec(pattern="channel:0.5", rules=rules), example_inputs=batch())
    with pytest.raises(SparsityError, match="matches no layer"):
        prune_channels(
            small(), SparsitySpec(pattern="channel:0.5", rules=(SparsityRule(match="x"),)), example_inputs=batch()
        )

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SparsityError, match=r"pip install 'compress-vision\[pruning\]'"):
        prune_channels(small(), spec, example_inputs=batch())


class Split(nn.Module):
    """Two outputs, one of which comes from a layer that is not the last."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        x = self.a(x)
        return x, self.b(x)


def test_outputs_keep_their_shape_or_the_rule_is_told():
    with pytest.raises(SparsityError, match="changed the model's outputs"):
        prune_channels(Split(), SparsitySpec(pattern="channel:0.5"), example_inputs=batch())
