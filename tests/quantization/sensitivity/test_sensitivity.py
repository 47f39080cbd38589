"""Sensitivity, compared with networks that are quantized under the rules of each row."""

import copy

import pytest
import torch
from torch import nn

from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, quantize, sensitivity
from compress.errors import QuantizationError
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity.compare import sqnr
from tests.networks import network

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 10


def spec_of(target: str, *rules: Rule) -> QuantSpec:
    weights, activations = WeightSpec(num_bits=4), ActivationSpec(num_bits=6, calibrator="max")
    return QuantSpec(target=target, weights=weights, activations=activations, rules=rules)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_rows_are_what_recipes_with_those_rules_give(target):
    model = network()
    report = sensitivity(model, X[:2], [X], [(X[:5], Y[:5]), (X[5:], Y[5:])], spec=spec_of(target))
    names = [row.layer for row in report.rows]
    weighted = ["conv1", "block1.conv1", "block1.conv2", "block2.conv1", "block2.conv2", "block2.downsample.0", "fc"]
    assert [name for name in names if name in weighted] == weighted
    assert len(set(names)) == len(names)
    reference = model(X)
    for row in report.rows:
        for effect, rules in (
            (row.alone, (Rule(match="*", enable=False), Rule(match=row.layer))),
            (row.left_out, (Rule(match=row.layer, enable=False),)),
        ):
            logits = quantize(model, X[:2], [X], spec=spec_of(target, *rules))(X)
            assert effect.sqnr_db == pytest.approx(sqnr(reference, logits), abs=1e-3)
            assert effect.agreement == (logits.argmax(1) == reference.argmax(1)).float().mean()
            assert effect.score == (logits.argmax(1) == Y).float().mean()
    logits = quantize(model, X[:2], [X], spec=spec_of(target))(X)
    assert report.quantized.sqnr_db == pytest.approx(sqnr(reference, logits), abs=1e-3)
    assert report.float_score == (reference.argmax(1) == Y).float().mean()
    assert report.images == 8


def test_noise_of_layers_alone_adds_up_to_about_that_of_all():
    """The assumption that mixed precision rests on, where no layer shares a tensor with another."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10)).eval()
    x = torch.randn(256, 64)
    spec = QuantSpec(activations=ActivationSpec(num_bits=6, calibrator="max"))
    report = sensitivity(model, x[:2], [x], [x], spec=spec)
    assert 0.5 < sum(row.alone.noise for row in report.rows) / report.quantized.noise < 2


def test_a_stopped_call_goes_on_and_layers_left_float_are_no_rows():
    model, spec = network(), spec_of("tensorrt", Rule(match="fc", enable=False))
    seen = {}
    whole = sensitivity(model, X[:2], [X], [X], spec=spec, keep=lambda row: seen.update({row.layer: row}))
    assert tuple(seen.values()) == whole.rows and "fc" not in seen
    half = dict(list(seen.items())[:3])
    measured = []
    again = sensitivity(model, X[:2], [X], [X], spec=spec, known=half, keep=measured.append)
    assert again == whole and measured == list(whole.rows[3:])
    assert whole.float_score is None and whole.rows[0].alone.score is None


def test_the_model_is_left_as_it_was():
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    sensitivity(model, X[:2], [X], [X[:2]])
    assert model.training and not list(quantizers(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.image, self.facts, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(6, 8), nn.Linear(8, 10)

    def forward(self, x, facts):
        return self.head(self.image(x).mean((2, 3)).relu() + self.facts(facts))


@pytest.mark.parametrize("nested", [False, True])
def test_a_network_of_two_inputs(nested):
    torch.manual_seed(0)
    model, facts = Two().eval(), torch.randn(8, 6)
    batch = ((X, facts), Y) if nested else (X, facts, Y)
    report = sensitivity(model, (X[:2], facts[:2]), [batch], [batch])
    assert report.float_score == (model(X, facts).argmax(1) == Y).float().mean() and report.images == 8
    assert {row.layer for row in report.rows} >= {"image", "facts", "head"}


def test_refuses_nothing_to_measure_on():
    with pytest.raises(QuantizationError, match="no images"):
        sensitivity(network(), X[:2], [X], [])
