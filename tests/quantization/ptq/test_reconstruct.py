# Blocks of graphs, and reconstruction beside calibration alone on images that it did not see.

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import nn

import compress
from compress.errors import QuantizationError
from compress.quantization.numerics import QuantFormat, quantize_tensor
from compress.quantization.ptq.bias_correction import expected_shift
from compress.quantization.ptq.rescaling import clipped_normal
from compress.quantization.ptq.rounding import (
    Rounder,
    block_module,
    blocks,
    images_of_a_step,
    learn_rounding,
    reconstruction_error,
    sampled_rows,
)
from compress.quantization.ptq.walk import walk
from compress.quantization.quantizer import _QuantWeight, quantized_layer, quantizers
from compress.quantization.sensitivity import sqnr
from compress.support.progress import NoProgress
from tests.networks import Net, network, tiny

GENERATOR = torch.Generator().manual_seed(0)
MIXING = torch.randn(6, 3 * 16 * 16, generator=GENERATOR)
# Images of six causes, so that errors of weights add up, and rounding to nearest is far from best.
X, UNSEEN = ((torch.randn(64, 6, generator=GENERATOR) @ MIXING).view(-1, 3, 16, 16) for _ in range(2))
SHORT = compress.ReconstructSpec(steps=100, images=64, lr=0.05)


def model():
    torch.manual_seed(0)
    made = tiny()
    made.train()(X)  # statistics of the pictures
    return made.eval()


def spec(target="any", bits=4, activation_bits=None, **more):
    return compress.QuantSpec(
        target=target,
        weights=compress.WeightSpec(num_bits=bits, calibrator="mse"),
        activations=compress.ActivationSpec(num_bits=activation_bits or bits),
        first_last_bits=8,
        **more,
    )


def in_turn(qmodel, x, most):
    # The blocks of a network, which compute it one after another.
    found, y = blocks(qmodel, most=most), x
    for block in found:
        y = block_module(qmodel, block)(y)
    torch.testing.assert_close(y, qmodel(x))
    return found


@pytest.mark.parametrize("target", ["any", "openvino", "tensorrt"])
def test_blocks_are_the_network_one_after_another(target):
    qmodel = compress.quantize(model(), X[:2], [X], spec=spec(target))
    found = in_turn(qmodel, X[:4], most=3)
    layers = [name for name, m in qmodel.named_modules() if isinstance(m, _QuantWeight)]
    assert sorted(path for block in found for path in block.layers) == sorted(layers)
    residual = next(block for block in found if "block1.conv1" in block.layers)
    assert {"block1.conv1", "block1.conv2"} == set(residual.layers)


def test_layers_in_a_row_are_joined_up_to_a_number():
    chain = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(5)))
    qmodel = compress.quantize(chain.eval(), X[:2], [X], spec=spec(bits=8))
    assert [len(block.layers) for block in blocks(qmodel, most=2)] == [2, 2, 1]
    assert [len(block.layers) for block in blocks(qmodel, most=9)] == [5]


def test_better_than_calibration_on_images_that_it_did_not_see():
    network, noise = model(), {}
    ways = {"plain": {}, "blocks": {"reconstruct": SHORT}}
    for name, more in ways.items():
        chosen = spec(bits=2, activation_bits=8, bias_correction=None, **more)
        qmodel = compress.quantize(network, X[:2], [X], spec=chosen)
        noise[name] = (network(UNSEEN) - qmodel(UNSEEN)).square().mean().item()
    assert noise["blocks"] < 0.7 * noise["plain"]
    rows = qmodel.report.reconstruction
    assert all(row.error_after <= row.error_before for row in rows) and any(row.steps for row in rows)
    for name, layer in qmodel.named_modules():  # weights lie on their grid: saved states and exports hold them so
        if isinstance(layer, _QuantWeight):
            torch.testing.assert_close(layer.quantized_weight, layer.weight, msg=name)


def test_the_saved_state_loads_into_a_fresh_graph_of_the_same_spec():
    network, chosen = model(), spec(reconstruct=compress.ReconstructSpec(steps=5, images=32))
    qmodel = compress.quantize(network, X[:2], [X], spec=chosen)
    fresh = compress.insert_quantizers(network, X[:2], chosen)
    fresh.load_state_dict(copy.deepcopy(qmodel.state_dict()))
    assert torch.equal(fresh(UNSEEN), qmodel(UNSEEN))
    assert all(q.enabled for _, q in quantizers(qmodel))


@pytest.mark.parametrize("count", [lambda x: x.size(0), lambda x: x.shape[0], lambda x: x.size()[0]])
def test_the_number_of_images_keeps_no_block_together(count):
    # EfficientNet-Lite0 was one block, and its reconstruction took hours.
    def run(net, x):
        images = count(x)  # read at the beginning, for the flattening at the end
        x = torch.relu(net.first(x))
        return net.head(torch.relu(net.second(x) + x).mean((2, 3)).view(images, -1))

    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "second": nn.Conv2d(8, 8, 3, padding=1)}
    network, x = Net(run, head=nn.Linear(8, 4), **layers).eval(), torch.randn(6, 3, 8, 8)
    qmodel = compress.quantize(network, x[:2], [x], spec=spec())
    assert len(in_turn(qmodel, x[:5], most=1)) == 3


@pytest.mark.parametrize(
    ("x", "y", "images"),
    [
        ((64, 16, 112, 112), (64, 24, 56, 56), 4),
        ((64, 24, 56, 56), (64, 40, 28, 28), 10),
        ((64, 64, 14, 14), (64, 64, 14, 14), 32),
        ((64, 197, 384), (64, 197, 384), 32),
        ((3, 8, 4, 4), (3, 8, 4, 4), 3),
    ],
)
def test_blocks_of_large_images_take_few_of_them(x, y, images):
    # 32,768 positions: 12,544 of 112 x 112 leave 2, and 4 are the fewest; 3,136 leave 10; else the batch size.
    assert images_of_a_step(torch.empty(x), torch.empty(y), compress.ReconstructSpec()) == images


# AdaRound against brute force on tiny layers, and against rounding to nearest on images it did not see.

ADAROUND_SHORT = compress.AdaRoundSpec(steps=200, images=128)
FINE, FOUR = compress.ActivationSpec(calibrator="max"), compress.WeightSpec(num_bits=4)


def correlated(count, channels, seed=0, size=None):
    # Inputs whose channels move together, where rounding to nearest is far from best.
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


def test_close_to_the_best_of_all_roundings():
    # A row of 8 weights has 256 roundings up or down; all of them are tried, for 16 rows.
    layer, x = quantized(nn.Linear(8, 16), 4), correlated(256, 8)
    targets = layer.bias + x @ layer.weight.T
    scale = layer.weight_quantizer.scale[:, None]
    floor = (layer.weight / scale).floor()
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=8)))
    candidates = (floor[:, None] + every).clamp(-7, 7) * scale[:, None]  # (rows, 256, 8)
    errors = ((x @ (candidates - layer.weight[:, None]).flatten(0, 1).T).square().mean(0)).view(16, 256)
    learned = learn_rounding(layer, [x], [targets], compress.AdaRoundSpec(steps=600))
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
    targets, unseen_targets = layer(x), layer(unseen)
    layer.weight_quantizer.enabled = True
    learned = learn_rounding(layer, [x], [targets], ADAROUND_SHORT, activation=activation)
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
    noise = []
    for spec in (None, compress.AdaRoundSpec(steps=80, images=64)):
        whole = compress.QuantSpec(weights=FOUR, activations=FINE, adaround=spec, bias_correction=None)
        q = compress.quantize(model, x[:2], x.split(32), spec=whole)
        noise.append(sqnr(model(unseen), q(unseen)))
    assert noise[1] > noise[0] + 1
    rows = q.report.rounding
    assert len(rows) == 7 and all(row.error_learned <= row.error_nearest for row in rows)
    assert sum(row.changed > 0 for row in rows) >= 5
    for row in rows:
        layer = q.get_submodule(row.layer)
        torch.testing.assert_close(layer.weight, layer.quantized_weight, rtol=0, atol=0)


class Stopping(NoProgress):
    # Stops a run after some layers, as a user would.
    def __init__(self, after):
        self.left = after

    def advance(self, task, amount=1, **fields):
        if task == "adaround":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_goes_on_where_it_was_stopped(tmp_path):
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    spec = compress.AdaRoundSpec(steps=20, images=32)

    def fresh():
        return compress.quantize(
            network(), x[:2], [x], spec=compress.QuantSpec(weights=compress.WeightSpec(num_bits=3), activations=FINE)
        )

    whole = fresh()
    walk(whole, [x], Rounder(spec).visit, images=32)
    stopped = fresh()
    with pytest.raises(KeyboardInterrupt):
        walk(stopped, [x], Rounder(spec, folder=tmp_path, progress=Stopping(4)).visit, images=32)
    assert len({path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}) == 4
    resumed = fresh()
    walk(resumed, [x], Rounder(spec, folder=tmp_path).visit, images=32)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    (tmp_path / "conv1.safetensors").write_bytes(b"torn")
    with pytest.raises(QuantizationError, match="remove it"):
        walk(fresh(), [x], Rounder(spec, folder=tmp_path).visit, images=32)


def test_zeros_stay_zeros():
    layer = nn.Linear(8, 6)
    layer.weight.data[:, ::2] = 0
    twin = quantized(layer, 3, axis=None)
    x = correlated(128, 8)
    learned = learn_rounding(
        twin, [x], [x @ twin.weight.detach().T + 5], ADAROUND_SHORT
    )  # a target that begs for larger weights
    assert bool((learned[:, ::2] == 0).all()) and bool((learned[:, 1::2] != 0).any())
    assert int(quantize_tensor(learned, twin.weight_quantizer.scale, twin.weight_quantizer.format).abs().max()) <= 3


# Sampled positions of layers, against torch's own convolutions at those positions.

ROWS_LAYERS = {
    "conv": nn.Conv2d(4, 6, 3, padding=1),
    "strided, dilated, oblong": nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1), bias=False),
    "grouped": nn.Conv2d(4, 8, 3, groups=2),
    "depthwise": nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "linear": nn.Linear(9, 5),
}


@pytest.mark.parametrize("kind", ROWS_LAYERS)
@pytest.mark.parametrize("count", [40, 10**6])
@torch.no_grad()
def test_rows_are_outputs_of_the_layer(kind, count):
    layer, x = ROWS_LAYERS[kind], torch.randn(18, 4, 8, 9)
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
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 4, 2),
    ],
)
def test_other_layers_have_none(layer):
    x = torch.randn(2, 4, 8, 8)
    assert sampled_rows(layer, [x], [layer(x)], count=9, generator=torch.Generator()) is None


# Bias correction: closed-form moments against samples, and a mean output error that becomes zero.

W3 = compress.WeightSpec(num_bits=3, axis=None)


@settings(max_examples=25)
@given(st.floats(-4, 8), st.floats(0.05, 4), st.sampled_from([6.0, np.inf]))
def test_moments_of_a_clipped_normal_are_those_that_integration_finds(mean, deviation, high):
    density = stats.norm(mean, deviation)
    top = min(high, mean + 12 * deviation)
    tail = density.sf(high) if np.isfinite(high) else 0.0
    found = []
    for power in (1, 2):
        area = integrate.quad(lambda x, p=power: x**p * density.pdf(x), 0, max(top, 0), points=[max(mean, 0)])[0]
        found.append(area + (high**power * tail if tail else 0.0))
    got_mean, got_deviation = clipped_normal(torch.tensor([mean]), torch.tensor([deviation]), float(high))
    assert got_mean.item() == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert got_deviation.item() ** 2 == pytest.approx(found[1] - found[0] ** 2, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 4, 3, bias=False),
        nn.Conv2d(6, 6, 3, groups=6, bias=False),
        nn.Conv2d(6, 9, 1, groups=3, bias=False),
        nn.Linear(6, 5, bias=False),
        nn.ConvTranspose2d(6, 9, 2, stride=2, groups=3, bias=False),
    ],
    ids=lambda layer: type(layer).__name__ + str(getattr(layer, "groups", "")),
)
def test_expected_shift_is_the_layers_output_for_constant_inputs(layer):
    mean = torch.randn(6, generator=torch.Generator().manual_seed(1))
    linear = isinstance(layer, nn.Linear)
    x = mean[None] if linear else mean.view(1, 6, 1, 1).expand(1, 6, 8, 8)
    y = layer(x)
    expected = y[0] if linear else y.mean((0, 2, 3))
    torch.testing.assert_close(expected_shift(layer, layer.weight, mean), expected)


def gaussian_pair(relu):
    # A convolution whose outputs have the BatchNorm's normal distribution, and a 1x1 convolution after it.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU() if relu else nn.Identity(), nn.Conv2d(8, 6, 1)
    )
    nn.init.normal_(model[1].weight, 1.0, 0.3)
    nn.init.normal_(model[1].bias, 0.5, 0.5)
    x = torch.randn(64, 16, 16, 16)
    with torch.no_grad():
        y = model[0](x)
        model[1].running_mean.copy_(y.mean((0, 2, 3)))
        model[1].running_var.copy_(y.var((0, 2, 3)))
    return model.eval(), x


@pytest.mark.parametrize("relu", [False, True])
def test_analytic_correction_removes_the_mean_error_of_normal_inputs(relu):
    model, x = gaussian_pair(relu)
    error = {}
    for way in (None, "analytic"):
        spec = compress.QuantSpec(
            weights=W3, activations=FINE, bias_correction=way, rules=(compress.Rule(match="0", enable=False),)
        )
        quantized = compress.quantize(model, x[:2], [x], spec=spec)
        error[way] = (quantized(x) - model(x)).mean((0, 2, 3)).abs().max().item()
    assert error["analytic"] < 0.02 * model(x).std() and error["analytic"] < error[None] / 5


def test_empirical_correction_gives_every_channel_its_float_mean():
    model, x = network(), torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = {}
    for way in (None, "empirical"):
        quantized = compress.quantize(
            model, x[:2], [x], spec=compress.QuantSpec(weights=W3, activations=FINE, bias_correction=way)
        )
        seen[way] = (quantized(x) - model(x)).mean(0).abs().max().item(), sqnr(model(x), quantized(x))
    assert seen["empirical"][0] < 1e-5  # the last layer is a linear one: its outputs are the model's
    assert seen["empirical"][1] > seen[None][1]
    rows = quantized.report.corrections
    assert len(rows) == 7 and all(row.shift > 0 and not row.reason for row in rows)


def test_layers_without_bias_get_one_and_load_back():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False)), torch.randn(8, 3, 4, 4)
    spec = compress.QuantSpec(weights=W3, activations=FINE, bias_correction="empirical")
    quantized = compress.quantize(model, x[:2], [x], spec=spec)
    again = compress.insert_quantizers(model, x[:2], spec)
    again.load_state_dict(quantized.state_dict())
    torch.testing.assert_close(again(x), quantized(x))
    assert model[0].bias is None and quantized.get_submodule("0").bias.abs().max() > 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"adaround": compress.AdaRoundSpec(steps=0)}, "must be 1 to"),
        ({"adaround": compress.AdaRoundSpec(warm_start=1.0)}, "below 1"),
        ({"adaround": compress.AdaRoundSpec(beta_end=30.0)}, "beta_start"),
        ({"adaround": compress.AdaRoundSpec(), "reconstruct": SHORT}, "both learn how to round"),
        ({"reconstruct": SHORT, "batchnorm": "keep"}, "reconstruct works on weights that hold their BatchNorm"),
        ({"bias_correction": "analytic"}, "empirical"),  # the network has no statistics
        ({"bias_correction": "guess"}, "analytic, empirical"),
        ({"relu6": "clip"}, "one of: keep, relu"),
        ({"smooth": -1.0}, "0 to 1"),
        ({"equalize": True, "batchnorm": "keep"}, "batchnorm: fold"),
        ({"bias_correction": "empirical", "batchnorm": "keep"}, "batchnorm: fold"),
    ],
)
def test_bad_specs_are_refused(spec, words):
    x = torch.randn(2, 3, 16, 16)
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match=words):
        compress.quantize(plain if words == "empirical" else network(), x, [x], spec=compress.QuantSpec(**spec))
