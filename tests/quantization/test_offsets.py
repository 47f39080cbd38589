"""Learned offsets: gradients against autograd of LSQ+'s definition, and zero points as ONNX Runtime computes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compress
from compress import ActivationSpec, Quantizer, QuantSpec, learn_scales
from compress.errors import QuantizationError
from compress.quantization.learned import OffsetQuantizer, ZeroPointQuantizer, freeze_scales
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import quantizers
from tests.exact import open_session

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SPEC = QuantSpec(target="any", activations=ActivationSpec(num_bits=4))


def definition(v, s, beta, high):
    """LSQ+'s equations 2 and 3 for autograd: straight through the rounding, nowhere else."""
    clipped = ((v - beta) / s).clamp(0, high)
    return (clipped + (clipped.round() - clipped).detach()) * s + beta


@settings(max_examples=40, deadline=None)
@given(bits=st.integers(2, 8), lowest=st.floats(-2, 0), seed=st.integers(0, 10**6))
def test_gradients_are_those_of_the_definition(bits, lowest, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    source = Quantizer(QuantFormat(num_bits=bits)).double()
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
    expected = definition(x, s, beta, high)
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
    target = model(X).detach()
    qmodel = compress.quantize(model, X[:2], [X], spec=SPEC)
    before = (qmodel(X) - target).square().mean().item()
    names = compress.learn_offsets(qmodel, [X])
    assert set(names) <= set(learn_scales(qmodel)) | set(names) and len(names) == 3
    assert (qmodel(X) - target).square().mean() < 0.7 * before  # SiLU is never below -0.28
    optimizer = torch.optim.SGD([p for n, p in qmodel.named_parameters() if n.startswith("quantizers")], lr=0.05)
    starts = {name: qmodel.get_submodule(name).offset.item() for name in names}
    for _ in range(10):
        loss = (qmodel(X) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert any(qmodel.get_submodule(name).offset.item() != starts[name] for name in names)
    learned = qmodel(X).detach()
    freeze_scales(qmodel)
    found = [q for _, q in quantizers(qmodel) if isinstance(q, ZeroPointQuantizer)]
    assert len(found) == 3 and all(0 < q.zero_point < 15 for q in found)
    frozen = qmodel(X).detach()
    torch.testing.assert_close(frozen, learned)
    x = torch.zeros(2, 2)
    assert all(torch.equal(q(x), x) for q in found)  # zero is an integer, which padding needs

    path = compress.export_onnx(qmodel, X[:2], tmp_path / "m.onnx")
    session = open_session(path, optimize=False)
    got = np.concatenate([session.run(None, {session.get_inputs()[0].name: x.numpy()})[0] for x in X.split(2)])
    noise = ((frozen.numpy() - got) ** 2).sum() / (frozen.numpy() ** 2).sum()
    assert noise < 1e-3  # but for ties of 4 bits
    learned_ranges = compress.quantize(model, X[:2], [X], spec=SPEC)
    with pytest.raises(compress.CompressError, match="zero"):
        compress.load(compress.save(qmodel, tmp_path / "w.safetensors"), into=learned_ranges)


def test_refusals():
    qmodel = compress.quantize(silu_network(), X[:2], [X], spec=QuantSpec(target="tensorrt"))
    with pytest.raises(QuantizationError, match="TensorRT takes no zero points"):
        compress.learn_offsets(qmodel, [X])
    positive = compress.quantize(nn.Sequential(nn.ReLU(), nn.Linear(8, 2)), X, [X], spec=SPEC)
    with pytest.raises(QuantizationError, match="no activation is quantized with signed integers"):
        compress.learn_offsets(positive, [X])
