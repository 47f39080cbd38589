# Learned scales: gradients against autograd of LSQ's definition, and a module that copies, loads and trains.

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress.errors import QuantizationError
from compress.export.onnx import prepare
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.learned import (
    LearnedQuantizer,
    OffsetQuantizer,
    ZeroPointQuantizer,
    bake_weights,
    freeze_scales,
    learned_fake_quantize,
    normalize_weights,
)
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from compress.quantization.quantizer import quantizers
from compress.training.passes import damping_loss
from tests.exact import compute
from tests.networks import minimized, network, tiny

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SPEC = compress.QuantSpec(
    weights=compress.WeightSpec(num_bits=4),
    activations=compress.ActivationSpec(num_bits=4, calibrator="max"),
    bias_correction=None,
)


def definition(v, s, low, high, beta=0.0):
    # LSQ's equations 1 to 3, and LSQ+'s 2 and 3, for autograd: straight through the rounding, nowhere else.
    clipped = ((v - beta) / s).clamp(low, high)
    return (clipped + (clipped.round() - clipped).detach()) * s + beta


@given(
    bits=st.integers(2, 8),
    signed=st.booleans(),
    narrow=st.booleans(),
    axis=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 10**6),
)
def test_gradients_are_those_of_the_definition(bits, signed, narrow, axis, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    f = QuantFormat(num_bits=bits, signed=signed, narrow=narrow and signed, axis=axis)
    size = () if axis is None else (x.shape[axis],)
    amax = (torch.rand(size, dtype=torch.float64, generator=generator) + 0.3).requires_grad_()
    upstream = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    elements = 17
    y = learned_fake_quantize(x, amax, f, elements=elements)
    got_x, got_amax = torch.autograd.grad(y, (x, amax), upstream)

    s = scale_from_amax(amax.detach(), f).requires_grad_()
    shape = [1, 1, 1]
    if axis is not None:
        shape[axis] = -1
    expected = definition(x, s.reshape(shape), f.low, f.high)
    want_x, want_s = torch.autograd.grad(expected, (x, s), upstream)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(got_x, want_x)
    g = 1 / math.sqrt(elements * f.high)
    torch.testing.assert_close(got_amax, want_s * g * f.high)


@pytest.fixture(scope="module")
def fixed():
    return compress.quantize(network(), X[:2], [X], spec=SPEC)


@pytest.fixture
def learned(fixed):
    qmodel = copy.deepcopy(fixed)
    assert set(compress.learn_scales(qmodel)) == {name for name, _ in quantizers(fixed)}
    return qmodel


def test_nothing_changes_but_what_is_trained(fixed, learned):
    assert torch.equal(learned(X), fixed(X))
    assert learned.state_dict().keys() == fixed.state_dict().keys()
    trained = {name for name, _ in learned.named_parameters()} - {name for name, _ in fixed.named_parameters()}
    assert trained == {f"{name}.amax" for name, _ in quantizers(fixed)}


def test_every_range_is_trained_and_the_loss_falls(learned):
    target = network()(X).detach()
    before = {name: q.amax.detach().clone() for name, q in quantizers(learned)}
    optimizer = torch.optim.SGD([p for n, p in learned.named_parameters() if n.endswith("amax")], lr=0.05)
    losses = minimized(optimizer, lambda: (learned(X) - target).square().mean(), 40)
    assert min(losses[-5:]) < 0.8 * losses[0]
    assert all((q.amax != before[name]).any() for name, q in quantizers(learned))


def test_the_trained_state_is_that_of_a_fixed_network(fixed, learned):
    for _, quantizer in quantizers(learned):
        quantizer.amax.data.mul_(0.9)
    expected = learned(X).detach()
    other = copy.deepcopy(fixed)
    other.load_state_dict(learned.state_dict())
    assert torch.equal(other(X), expected)
    frozen = copy.deepcopy(learned)
    freeze_scales(frozen)
    assert torch.equal(frozen(X), expected)
    assert not any(isinstance(q, LearnedQuantizer) for _, q in quantizers(frozen))
    written, same = (
        prepare(model, X[:2]).state_dict() for model in (learned, frozen)
    )  # integers and scales of the file
    assert written.keys() == same.keys() and any(value.dtype == torch.int8 for value in written.values())
    assert all(torch.equal(value, same[name]) for name, value in written.items())


def test_copies_pickles_and_compiles(learned):
    expected = learned(X)
    assert torch.equal(copy.deepcopy(learned)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(learned))(X), expected)
    compiled = torch.compile(learned, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), expected)
    grads = []
    for model in (learned, compiled):
        learned.zero_grad()
        model(X).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in learned.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-3, atol=1e-5)


def test_autocast_keeps_ranges_and_their_gradients_in_float32(learned):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = learned(X).float().square().mean()
    loss.backward()
    for _, quantizer in quantizers(learned):
        assert quantizer.amax.grad.dtype == torch.float32 and quantizer.amax.grad.isfinite().all()


def test_a_range_that_was_driven_below_zero_comes_back():
    quantizer = compress.Quantizer(QuantFormat(num_bits=4))
    quantizer.set_amax(torch.tensor(1.0))
    learned = LearnedQuantizer(quantizer, of_weight=True)
    learned.amax.data.fill_(-0.1)
    x = torch.randn(100)
    x[::4] = 0  # as masks leave them: nothing divided by nothing
    optimizer = torch.optim.SGD(learned.parameters(), lr=0.05)
    losses = minimized(optimizer, lambda: (learned(x) - x).square().mean(), 50)
    assert all(map(math.isfinite, losses))
    assert learned.amax > 0.3
    assert torch.equal(learned(x), fake_quantize(x, learned.scale, learned.format))


def test_refusals():
    with pytest.raises(QuantizationError, match="no quantizer whose scale"):
        compress.learn_scales(network())
    with pytest.raises(QuantizationError, match="no range to begin at"):
        compress.learn_scales(compress.insert_quantizers(network(), X[:2], SPEC))


def test_ranges_get_their_gradients_through_ddp(learned, tmp_path):
    # A group of one process: the same gradients as without, for ranges of a tensor and of channels.
    learned(X).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in learned.named_parameters()}
    learned.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(learned)(X).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, p in learned.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


# Learned offsets: gradients against autograd of LSQ+'s definition, and zero points as ONNX Runtime computes.

OFFSETS_X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
OFFSETS_SPEC = compress.QuantSpec(target="any", activations=compress.ActivationSpec(num_bits=4))


@given(bits=st.integers(2, 8), lowest=st.floats(-2, 0), seed=st.integers(0, 10**6))
def test_gradients_are_those_of_the_definition_of_offsets(bits, lowest, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    source = compress.Quantizer(QuantFormat(num_bits=bits)).double()
    source.set_amax(torch.rand((), dtype=torch.float64, generator=generator) + 0.3)
    learned = OffsetQuantizer(source, torch.tensor(lowest))
    upstream = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    y = learned(x)
    got_x, got_amax, got_offset = torch.autograd.grad(y, (x, learned.amax, learned.offset), upstream)

    high = 2**bits - 1
    s = (learned.amax.detach() / high).requires_grad_()
    assert learned.offset >= -source.amax and learned.amax == source.amax - learned.offset
    beta = ((learned.offset / s).round() * s).detach().requires_grad_()
    assert abs(beta - learned.offset) <= 0.51 * s
    expected = definition(x, s, 0, high, beta)
    want_x, want_s, want_beta = torch.autograd.grad(expected, (x, s, beta), upstream)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(got_x, want_x)
    g = 1 / math.sqrt(x[0].numel() * high)
    torch.testing.assert_close(got_amax, want_s * g * high)
    torch.testing.assert_close(got_offset, want_beta * g)


def silu_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)).eval()


def test_offsets_use_more_of_the_integers_learn_and_become_zero_points(tmp_path):
    model = silu_network()
    target = model(OFFSETS_X).detach()
    qmodel = compress.quantize(model, OFFSETS_X[:2], [OFFSETS_X], spec=OFFSETS_SPEC)
    before = (qmodel(OFFSETS_X) - target).square().mean().item()
    names = compress.learn_offsets(qmodel, [OFFSETS_X])
    assert set(names) <= set(compress.learn_scales(qmodel)) | set(names) and len(names) == 3
    assert (qmodel(OFFSETS_X) - target).square().mean() < 0.7 * before  # SiLU is never below -0.28
    optimizer = torch.optim.SGD([p for n, p in qmodel.named_parameters() if n.startswith("quantizers")], lr=0.05)
    starts = {name: qmodel.get_submodule(name).offset.item() for name in names}
    minimized(optimizer, lambda: (qmodel(OFFSETS_X) - target).square().mean(), 10)
    assert any(qmodel.get_submodule(name).offset.item() != starts[name] for name in names)
    learned = qmodel(OFFSETS_X).detach()
    freeze_scales(qmodel)
    found = [q for _, q in quantizers(qmodel) if isinstance(q, ZeroPointQuantizer)]
    assert len(found) == 3 and all(0 < q.zero_point < 15 for q in found)
    frozen = qmodel(OFFSETS_X).detach()
    torch.testing.assert_close(frozen, learned)
    x = torch.zeros(2, 2)
    assert all(torch.equal(q(x), x) for q in found)  # zero is an integer, which padding needs

    path = compress.export_onnx(qmodel, OFFSETS_X[:2], tmp_path / "m.onnx")
    got = np.concatenate([compute(path, x.numpy(), optimize=False) for x in OFFSETS_X.split(2)])
    noise = ((frozen.numpy() - got) ** 2).sum() / (frozen.numpy() ** 2).sum()
    assert noise < 1e-3  # but for ties of 4 bits
    learned_ranges = compress.quantize(model, OFFSETS_X[:2], [OFFSETS_X], spec=OFFSETS_SPEC)
    with pytest.raises(compress.CompressError, match="zero"):
        compress.load(compress.save(qmodel, tmp_path / "w.safetensors"), into=learned_ranges)


def test_refusals_of_offsets():
    qmodel = compress.quantize(silu_network(), OFFSETS_X[:2], [OFFSETS_X], spec=compress.QuantSpec(target="tensorrt"))
    with pytest.raises(QuantizationError, match="TensorRT takes no zero points"):
        compress.learn_offsets(qmodel, [OFFSETS_X])
    positive = compress.quantize(nn.Sequential(nn.ReLU(), nn.Linear(8, 2)), OFFSETS_X, [OFFSETS_X], spec=OFFSETS_SPEC)
    with pytest.raises(QuantizationError, match="no activation is quantized with signed integers"):
        compress.learn_offsets(positive, [OFFSETS_X])


# Training at few bits: target `any`, LSQ's first step size, first and last layers, weight normalization, damping.


def spec(bits=2, axis=0, **more):
    weights = compress.WeightSpec(num_bits=bits, axis=axis, calibrator="lsq")
    return compress.QuantSpec(
        target="any",
        weights=weights,
        activations=compress.ActivationSpec(num_bits=bits, calibrator="lsq"),
        batchnorm="keep",
        first_last_bits=8,
        **more,
    )


@pytest.mark.parametrize(("bits", "signed"), [(2, True), (2, False), (4, False), (8, True)])
def test_the_first_step_is_lsqs(bits, signed):
    x, high = torch.randn(5, 300).abs() if not signed else torch.randn(5, 300), 2 ** (bits - signed) - 1
    for axis in (None, 0):
        calibrator = make_calibrator("lsq", num_bits=bits, signed=signed, axis=axis)
        for part in x.split(100, dim=1):
            calibrator.collect(part)
        mean = x.abs().mean() if axis is None else x.abs().mean(1)
        largest = x.abs().max() if axis is None else x.abs().amax(1)
        expected = torch.minimum(2 * mean / math.sqrt(high), largest / high)
        torch.testing.assert_close(calibrator.compute_amax() / high, expected)


def test_products_alone_are_quantized_with_all_integers():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    found = {name: (q.format.num_bits, q.format.low, q.format.high) for name, q in quantizers(qmodel)}
    assert found["conv1.weight_quantizer"] == (8, -127, 127)
    assert found["fc.weight_quantizer"] == (8, -127, 127)
    assert found["block1.conv1.weight_quantizer"] == (2, -2, 1)
    inner = {f for name, f in found.items() if name.startswith("quantizers.")}
    assert (2, 0, 3) in inner and not any(low == 0 and bits not in (2, 8) for bits, low, _ in inner)
    assert [row for row in qmodel.placement.decisions if row.rule == "add stays float"]


def test_a_rule_decides_before_first_and_last():
    rules = (compress.Rule(match="fc", weights=compress.WeightSpec(num_bits=5)),)
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec(rules=rules))
    assert qmodel.fc.weight_quantizer.format.num_bits == 5
    assert qmodel.conv1.weight_quantizer.format.num_bits == 8


@pytest.mark.parametrize("axis", [None, 0])
def test_the_file_computes_what_was_trained_also_where_batchnorm_changes_the_sign(axis, tmp_path):
    model = tiny()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)  # half of them below zero
            nn.init.uniform_(module.running_var, 0.5, 2)
    qmodel = compress.quantize(model.eval(), X[:2], [X], spec=spec(axis=axis))
    compress.learn_scales(qmodel)
    normalize_weights(qmodel)
    expected = qmodel(X).detach().numpy()
    path = compress.export_onnx(qmodel, X[:2], tmp_path / "m.onnx")
    got = np.concatenate([compute(path, x.numpy(), optimize=False) for x in X.split(2)])
    assert 10 * np.log10((expected**2).sum() / ((got - expected) ** 2).sum()) > 30


def test_normalized_weights_keep_mean_and_width_and_are_baked():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    before = qmodel.block1.conv1.weight.detach().clone()
    names = normalize_weights(qmodel)
    assert "conv1" not in names and "fc" not in names and "block1.conv1" in names
    qmodel.block1.conv1.parametrizations.weight.original.data.mul_(3).add_(0.7)
    torch.testing.assert_close(qmodel.block1.conv1.weight, before - before.mean(), rtol=1e-4, atol=1e-6)
    expected = qmodel(X)
    qmodel.block1.conv1.parametrizations.weight.original.grad = None
    again = copy.deepcopy(qmodel)
    bake_weights(again)
    assert torch.equal(again(X), expected)
    assert "block1.conv1.weight" in again.state_dict()


def test_damping_pulls_weights_to_their_integer():
    qmodel = compress.quantize(tiny().eval(), X[:2], [X], spec=spec())
    compress.learn_scales(qmodel)
    loss = damping_loss(qmodel)
    expected = 0.0
    for layer in qmodel.modules():
        if hasattr(layer, "weight_quantizer"):
            q = layer.weight_quantizer
            s = q.scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
            n = (layer.weight / s).clamp(q.format.low, q.format.high)
            expected += (((n - n.round()) * s) ** 2).sum().item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(q.amax.grad is None for _, q in quantizers(qmodel))
    assert bool((qmodel.block1.conv1.weight.grad != 0).any())
    for layer in qmodel.modules():
        if hasattr(layer, "weight_quantizer"):
            layer.weight.data.sub_(0.25 * layer.weight.grad)
    assert damping_loss(qmodel).item() < 0.5 * loss.item()


def test_two_bits_learn():
    # Two classes of images, told apart by a trained network of 2 bits: the loss falls to a half and stays finite.
    model = network().eval()
    qmodel = compress.quantize(model, X[:2], [X], spec=spec())
    compress.learn_scales(qmodel)
    normalize_weights(qmodel)
    y = (X.mean((1, 2, 3)) > 0).long()
    optimizer = torch.optim.SGD(qmodel.train().parameters(), lr=0.02, momentum=0.9)
    losses = minimized(optimizer, lambda: F.cross_entropy(qmodel(X), y) + 1e-3 * damping_loss(qmodel), 30)
    assert sum(losses[-3:]) / 3 < 0.5 * losses[0]
    freeze_scales(qmodel)
    bake_weights(qmodel)
    assert qmodel.eval()(X).isfinite().all()
