"""Fake quantization with its epilogue as one operation: torch's own chain, and numpy's packed bits."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.memory_format import pack, unpack
from compress.kernels.triton.weights import written_on_device
from tests.kernels.interpreter import interpreted


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    last=st.booleans(),
    unsigned=st.booleans(),
    bounds=st.sampled_from([(-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0)]),
    has=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_one_operation_is_torchs_own_chain(shape, last, unsigned, bounds, has, seed):
    """Against torch's ReLU, ReLU6 and fake quantization; the scale is a power of two, as theirs multiplies by 1 / s."""
    torch.manual_seed(seed)
    y = (4 * torch.randn(shape, dtype=torch.float32)).requires_grad_()
    values = y.contiguous(memory_format=torch.channels_last) if last and y.dim() == 4 else y
    bias = torch.randn(shape[1], requires_grad=True) if has[0] else None
    residual = torch.randn(shape, requires_grad=True) if has[1] else None
    low, high = (0, 255) if unsigned else (-128, 127)
    scale = 2.0**-6 if unsigned else 2.0**-5
    epilogue = Epilogue(low, high, *bounds, None, 1)
    result = fused_quantize(values, torch.tensor(scale * high), epilogue, bias=bias, residual=residual)
    x = y if bias is None else y + bias.view([-1 if i == 1 else 1 for i in range(y.dim())])
    x = x if residual is None else x + residual
    x = {(0.0, math.inf): F.relu, (0.0, 6.0): F.relu6}.get(bounds, lambda t: t)(x)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, 0, low, high)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    inputs = [t for t in (y, bias, residual) if t is not None]
    weights = torch.randn(shape)
    for one, other in zip(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), last=st.booleans(), seed=st.integers(0, 99))
def test_bits_are_numpys_in_memory_order(shape, last, seed):
    torch.manual_seed(seed)
    bits = torch.rand(shape) > 0.5
    if last and len(shape) == 4:
        bits = bits.contiguous(memory_format=torch.channels_last)
    stored = np.lib.stride_tricks.as_strided(bits.numpy(), (bits.numel(),), (1,))
    packed = pack(bits)
    assert np.array_equal(packed.numpy(), np.packbits(stored, bitorder="little"))
    assert torch.equal(unpack(packed, bits), bits)


def test_triton_kernels_compute_the_same_in_the_interpreter():
    assert "72 activations, 8 pools, 2 groups of weights, 1 network" in interpreted(
        "tests.kernels.interpreted_fake_quantize"
    )


def test_a_table_written_on_the_device_holds_addresses_of_64_bits():
    addresses = [(1 << 47) + 16 * i for i in range(130)] + [0, 1]
    assert written_on_device(addresses, torch.device("cpu")).tolist() == addresses
