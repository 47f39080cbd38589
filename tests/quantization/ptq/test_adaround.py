"""AdaRound against brute force on tiny layers, and against rounding to nearest on images it did not see."""

import itertools

import pytest
import torch
from torch import nn

from compress import ActivationSpec, AdaRoundSpec, QuantSpec, WeightSpec, quantize
from compress.errors import QuantizationError
from compress.quantization.modules import quantized_layer
from compress.quantization.numerics import QuantFormat, quantize_tensor
from compress.quantization.ptq.adaround import (
    adaround,
    beta_at,
    inverse_rounding,
    learn_rounding,
    reconstruction_error,
    regularizer_gradient,
    soft_rounding,
)
from compress.quantization.sensitivity.compare import sqnr
from compress.support.progress import NoProgress
from tests.networks import network

SHORT = AdaRoundSpec(steps=200, images=128)
FINE = ActivationSpec(calibrator="max")


def correlated(count, channels, seed=0, size=None):
    """Inputs whose channels move together, where rounding to nearest is far from best."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(channels, 2, generator=torch.Generator().manual_seed(9)) + 1
    shape = (count,) if size is None else (count, size, size)
    common = torch.randn(*(count, 1, 1)[: len(shape)], 2, generator=generator) @ mixing.T  # the same in all pixels
    x = common + 0.1 * torch.randn(*shape, channels, generator=generator)
    return x if size is None else x.movedim(-1, 1).contiguous()


def quantized(layer, num_bits, axis=0):
    weight = layer.weight.detach()
    twin = quantized_layer(layer, QuantFormat(num_bits=num_bits, axis=axis, narrow=True), name="layer")
    twin.weight_quantizer.set_amax(weight.abs().flatten(1).amax(1) if axis == 0 else weight.abs().max())
    return twin


def test_soft_rounding_reaches_both_ends_and_inverts():
    h = torch.linspace(0, 1, 11)
    torch.testing.assert_close(soft_rounding(inverse_rounding(h)), h, atol=1e-6, rtol=0)
    assert soft_rounding(torch.tensor([-50.0, 50.0])).tolist() == [0, 1]
    h = torch.linspace(0.01, 0.99, 9, dtype=torch.float64).requires_grad_()
    (1 - (2 * h - 1).abs().pow(3.5)).sum().backward()
    torch.testing.assert_close(regularizer_gradient(h.detach(), 3.5), h.grad)
    spec = AdaRoundSpec(steps=100)
    assert beta_at(0, spec) == spec.beta_start and beta_at(100, spec) == pytest.approx(spec.beta_end)


def test_close_to_the_best_of_all_roundings():
    """A row of 8 weights has 256 roundings up or down; all of them are tried, for 16 rows."""
    torch.manual_seed(0)
    layer, x = quantized(nn.Linear(8, 16), 4), correlated(256, 8)
    with torch.no_grad():
        targets = layer.bias + x @ layer.weight.T
        scale = layer.weight_quantizer.scale[:, None]
        floor = (layer.weight / scale).floor()
        every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=8)))
        candidates = (floor[:, None] + every).clamp(-7, 7) * scale[:, None]  # (rows, 256, 8)
        errors = ((x @ (candidates - layer.weight[:, None]).flatten(0, 1).T).square().mean(0)).view(16, 256)
        learned = learn_rounding(layer, [x], [targets], AdaRoundSpec(steps=600))
        got, nearest = ((x @ (w - layer.weight).T).square().mean(0) for w in (learned, layer.quantized_weight))
    assert bool((candidates == learned[:, None]).all(2).any(1).all())  # each weight went up or down, by one step
    rank = (errors < got[:, None] * (1 - 1e-4)).float().mean(1)
    assert rank.median() < 0.1 and rank.max() < 0.5  # chance would be 0.5 and 1
    assert got.sum() < 0.5 * nearest.sum()


LAYERS = {
    "conv": lambda: nn.Conv2d(8, 6, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "strided": lambda: nn.Conv2d(8, 4, 3, stride=2),
    "transposed": lambda: nn.ConvTranspose2d(8, 4, 2, stride=2),
    "linear": lambda: nn.Linear(8, 6),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", ["", "relu"])
def test_better_than_nearest_on_inputs_that_it_did_not_see(kind, activation):
    torch.manual_seed(3)
    layer = quantized(LAYERS[kind](), 3, axis=None)
    size = None if kind == "linear" else 6
    x, unseen = correlated(128, 8, 0, size), correlated(128, 8, 1, size)
    layer.weight_quantizer.enabled = False
    with torch.no_grad():
        targets, unseen_targets = layer(x), layer(unseen)
        layer.weight_quantizer.enabled = True
        learned = learn_rounding(layer, [x], [targets], SHORT, activation=activation)
        nearest = layer.quantized_weight
        error = {
            name: reconstruction_error(layer, w, unseen, unseen_targets, activation=activation)
            for name, w in (("nearest", nearest), ("learned", learned))
        }
    assert error["learned"] < error["nearest"]
    step = layer.weight_quantizer.scale
    assert (learned - layer.weight).abs().max() < step * 1.001


def test_whole_network_better_hard_rounded_and_exported_as_it_is():
    model, generator = network(), torch.Generator().manual_seed(0)
    x, unseen = torch.randn(64, 3, 16, 16, generator=generator), torch.randn(64, 3, 16, 16, generator=generator)
    noise = {}
    for spec in (None, AdaRoundSpec(steps=80, images=64)):
        q = quantize(
            model, x[:2], x.split(32), spec=QuantSpec(weights=WeightSpec(num_bits=4), activations=FINE, adaround=spec)
        )
        with torch.no_grad():
            noise[spec is not None] = sqnr(model(unseen), q(unseen))
    assert noise[True] > noise[False] + 1
    rows = q.report.rounding
    assert len(rows) == 7 and all(row.error_learned <= row.error_nearest for row in rows)
    assert sum(row.changed > 0 for row in rows) >= 5
    for row in rows:
        layer = q.get_submodule(row.layer)
        torch.testing.assert_close(layer.weight, layer.quantized_weight, rtol=0, atol=0)


class Stopping(NoProgress):
    """Stops a run after some layers, as a user would."""

    def __init__(self, after):
        self.left = after

    def advance(self, task, amount=1, **fields):
        if task == "adaround":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_goes_on_where_it_was_stopped(tmp_path):
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    spec = AdaRoundSpec(steps=20, images=32)

    def fresh():
        return quantize(network(), x[:2], [x], spec=QuantSpec(weights=WeightSpec(num_bits=3), activations=FINE))

    whole = fresh()
    adaround(whole, [x], spec=spec)
    stopped = fresh()
    with pytest.raises(KeyboardInterrupt):
        adaround(stopped, [x], spec=spec, folder=tmp_path, progress=Stopping(4))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(written) == 4
    resumed = fresh()
    adaround(resumed, [x], spec=spec, folder=tmp_path)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    (tmp_path / "conv1.safetensors").write_bytes(b"torn")
    with pytest.raises(QuantizationError, match="remove it"):
        adaround(fresh(), [x], spec=spec, folder=tmp_path)


def test_zeros_stay_zeros():
    """A sparsity pattern outlives the rounding."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    with torch.no_grad():
        layer.weight[:, ::2] = 0
    twin = quantized(layer, 3, axis=None)
    x = correlated(128, 8)
    learned = learn_rounding(
        twin, [x], [x @ twin.weight.detach().T + 5], SHORT
    )  # a target that begs for larger weights
    assert bool((learned[:, ::2] == 0).all()) and bool((learned[:, 1::2] != 0).any())
    assert int(quantize_tensor(learned, twin.weight_quantizer.scale, twin.weight_quantizer.format).abs().max()) <= 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"steps": 0}, "must be 1 to"), ({"warm_start": 1.0}, "below 1"), ({"beta_end": 30.0}, "beta_start")],
)
def test_bad_specs_are_refused(bad, words):
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(QuantizationError, match=words):
        quantize(network(), x, [x], spec=QuantSpec(adaround=AdaRoundSpec(**bad)))
