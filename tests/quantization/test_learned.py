"""Learned scales: gradients against autograd of LSQ's definition, and a module that copies, loads and trains."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compress
from compress import ActivationSpec, Quantizer, QuantSpec, WeightSpec, insert_quantizers, learn_scales
from compress.errors import QuantizationError
from compress.export.prepare import prepare
from compress.quantization.learned import LearnedQuantizer, freeze_scales, learned_fake_quantize
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from compress.quantization.quantizer import quantizers
from tests.networks import network

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SPEC = QuantSpec(weights=WeightSpec(num_bits=4), activations=ActivationSpec(num_bits=4, calibrator="max"))


def definition(v, s, low, high):
    """LSQ's equations 1 to 3 for autograd: straight through the rounding, nowhere else."""
    clipped = (v / s).clamp(low, high)
    rounded = clipped + (clipped.round() - clipped).detach()
    return rounded * s


@settings(max_examples=50, deadline=None)
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


def test_one_step_of_sgd_moves_the_step_size_as_lsq_does():
    x, f, lr = torch.randn(50, dtype=torch.float64), QuantFormat(num_bits=3), 0.1
    amax = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    learned_fake_quantize(x, amax, f, elements=50).square().sum().backward()
    s = scale_from_amax(amax.detach(), f).requires_grad_()
    definition(x, s, f.low, f.high).square().sum().backward()
    ours = scale_from_amax(amax.detach() - lr * amax.grad, f)
    torch.testing.assert_close(ours, s.detach() - lr * s.grad / math.sqrt(50 * f.high))


@pytest.fixture(scope="module")
def fixed():
    return compress.quantize(network(), X[:2], [X], spec=SPEC)


@pytest.fixture
def learned(fixed):
    qmodel = copy.deepcopy(fixed)
    names = learn_scales(qmodel)
    assert set(names) == {name for name, _ in quantizers(fixed)}
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
    losses = []
    for _ in range(40):
        loss = (learned(X) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < 0.8 * losses[0]
    assert all((q.amax != before[name]).any() for name, q in quantizers(learned))


def test_the_trained_state_is_that_of_a_fixed_network(fixed, learned):
    with torch.no_grad():
        for _, quantizer in quantizers(learned):
            quantizer.amax.mul_(0.9)
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
    quantizer = Quantizer(QuantFormat(num_bits=4))
    quantizer.set_amax(torch.tensor(1.0))
    learned = LearnedQuantizer(quantizer, of_weight=True)
    with torch.no_grad():
        learned.amax.fill_(-0.1)
    x = torch.randn(100)
    x[::4] = 0  # as masks leave them: nothing divided by nothing
    optimizer = torch.optim.SGD(learned.parameters(), lr=0.05)
    for _ in range(50):
        y = learned(x)
        assert y.isfinite().all()
        optimizer.zero_grad()
        (y - x).square().mean().backward()
        optimizer.step()
    assert learned.amax > 0.3
    assert torch.equal(learned(x), fake_quantize(x, learned.scale, learned.format))


def test_refusals():
    with pytest.raises(QuantizationError, match="no quantizer whose scale"):
        learn_scales(network())
    with pytest.raises(QuantizationError, match="no range to begin at"):
        learn_scales(insert_quantizers(network(), X[:2], SPEC))


def test_ranges_get_their_gradients_through_ddp(learned, tmp_path):
    """A group of one process: the same gradients as without, for ranges of a tensor and of channels."""
    learned(X).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in learned.named_parameters()}
    learned.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(learned)
        wrapped(X).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, p in learned.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])
