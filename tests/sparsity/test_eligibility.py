import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from compress import SparsitySpec, sparsify
from compress.errors import SparsityError
from compress.sparsity.eligibility import eligibility
from compress.sparsity.spec import SparsityRule
from tests.sparsity.nets import batch, small


class Zoo(nn.Module):
    """One layer of every kind that the rules tell apart."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(32, 32)
        self.stem = nn.Conv2d(3, 32, 3)
        self.plain = nn.Conv2d(32, 32, 3)
        self.grouped = nn.Conv2d(32, 32, 3, groups=4)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.odd = nn.Conv2d(32, 36, 1)
        self.narrow = nn.Conv2d(36, 30, 1)
        self.wide = nn.Conv2d(30, 256, 1)
        self.up = nn.ConvTranspose2d(256, 64, 1)
        self.deep = nn.Conv2d(64, 256, 3, padding=1)
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)
        self.head = nn.Linear(256, 16)

    def forward(self, x):
        x = self.depthwise(self.grouped(self.plain(self.stem(x))))
        x = self.deep(self.up(self.wide(self.narrow(self.odd(x))))).flatten(2).transpose(1, 2)
        return self.head(self.attention(x, x, x)[0].mean(1))


def rows(spec=None, *, model=None, inputs=None):
    return {r.layer: r for r in eligibility(model or Zoo(), spec or SparsitySpec(), example_inputs=inputs)}


def test_every_layer_has_a_verdict_and_a_reason():
    found = rows(inputs=torch.zeros(1, 3, 12, 12))
    assert [name for name, row in found.items() if row.eligible] == ["plain", "deep"]
    for name, words in {
        "unused": "does not run",
        "stem": "3 input channels, not a multiple of 4",
        "grouped": "4 groups",
        "depthwise": "1 input channels a group",
        "odd": "multiples of 8, and it has 32 and 36",
        "narrow": "multiples of 16",
        "wide": "30 input channels, not a multiple",
        "up": "transposed",
        "attention.out_proj": "part of attention",
        "head": "the last layer",
        "plain": "rarely faster below 256",
        "deep": "large enough to gain",
    }.items():
        assert words in found[name].reason, name
    assert found["plain"].shape == (32, 32, 3, 3)


def test_without_inputs_the_registered_order_counts():
    found = rows()
    assert "first layer" in found["unused"].reason
    assert found["head"].reason.startswith("the last layer")


def test_rules_enable_and_disable_and_the_last_one_wins():
    spec = SparsitySpec(
        rules=(
            SparsityRule(match="*"),
            SparsityRule(match="deep", enable=False),
            SparsityRule(match="*ee*", enable=False),
            SparsityRule(match="dee?"),
        )
    )
    found = rows(spec)
    enabled = ["unused", "plain", "grouped", "odd", "narrow", "deep", "head"]
    assert [name for name, row in found.items() if row.eligible] == enabled
    found = rows(SparsitySpec(rules=(*spec.rules, SparsityRule(match="d*", enable=False))))
    assert found["deep"].reason == "a rule leaves it dense"


def test_kernels_any_asks_for_divisible_channels_only():
    found = rows(SparsitySpec(kernels="any"))
    assert found["odd"].eligible and found["narrow"].eligible
    assert not found["wide"].eligible
    assert not rows(SparsitySpec(pattern="2:8"))["narrow"].eligible
    assert rows(SparsitySpec(pattern="2:8"))["odd"].eligible  # TensorRT has no such kernels to ask for channels
    assert rows(SparsitySpec(pattern="unstructured:0.5"))["wide"].eligible


def test_rules_that_cannot_hold_are_refused():
    with pytest.raises(SparsityError, match="matches no layer, did you mean 'plain'"):
        rows(SparsitySpec(rules=(SparsityRule(match="plian"),)))
    with pytest.raises(SparsityError, match="a rule enables stem, but it has 3 input channels"):
        rows(SparsitySpec(rules=(SparsityRule(match="stem"),)))


def test_a_model_compiled_in_place_shows_its_order():
    model, plain = Zoo(), Zoo()
    model.compile(backend="eager")
    model(torch.zeros(1, 3, 12, 12))
    wanted = [row.eligible for row in rows(model=plain, inputs=torch.zeros(1, 3, 12, 12)).values()]
    assert [row.eligible for row in rows(model=model, inputs=torch.zeros(1, 3, 12, 12)).values()] == wanted


def test_tied_weights_stay_dense():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    model[2].weight, model[3].bias = model[1].weight, model[1].bias
    found = rows(SparsitySpec(rules=(SparsityRule(match="*"),)), model=model)
    assert [name for name, row in found.items() if row.eligible] == ["0", "3", "4"]
    assert "weight is that of 2 too" in found["1"].reason and "weight is that of 1 too" in found["2"].reason
    sparsify(model, SparsitySpec())
    assert [name for name, row in rows(model=model).items() if row.eligible] == ["3"]


def test_the_model_is_left_as_it_was():
    model = Zoo().train()
    model.deep.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    rows(model=model, inputs=torch.zeros(1, 3, 12, 12))
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert not any(m._forward_hooks for m in model.modules())


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(SparsityError, match="fails on the example inputs"):
        eligibility(small(), SparsitySpec(), example_inputs=batch()[:, :2])


def test_a_layer_under_weight_norm_is_told_of():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), weight_norm(nn.Conv2d(16, 16, 3)), nn.Conv2d(16, 16, 3), nn.Flatten())
    assert len(rows(model=model, inputs=torch.zeros(1, 3, 12, 12))) == 3
    with pytest.raises(SparsityError, match="layer 1 is parametrized by something else"):
        sparsify(model, SparsitySpec(), example_inputs=torch.zeros(1, 3, 12, 12))
