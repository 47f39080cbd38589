"""Attention's kernels against torch in float64: in Triton's interpreter when started by `test_fused_attention`.

Compared are norms: a probability within the kernel's precision of a tie may round to the other neighbour.
"""

import os

import torch
import torch.nn.functional as F

import compress
from compress.quantization.fused_attention_triton import Tile, Tiles, attention, fits
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from tests.quantization.test_fused import assert_same, gradients
from tests.quantization.test_fused_attention import quantized, vit

SMALL = Tiles(Tile(16, 16, False, 4, 2), Tile(16, 16, False, 4, 2), Tile(16, 16, False, 4, 2))
SIGNED, UNSIGNED = QuantFormat(num_bits=8), QuantFormat(num_bits=4, signed=False)
CASES = (
    # lead, tokens, keys, width, value width, format, dtype, tiles
    ((2, 2), 19, 19, 8, 8, SIGNED, torch.float32, None),
    ((2,), 20, 35, 16, 24, SIGNED, torch.float32, SMALL),
    ((1,), 40, 40, 20, 16, UNSIGNED, torch.float32, None),
    ((), 5, 70, 33, 7, SIGNED, torch.float32, None),
    ((1, 2), 70, 130, 16, 16, UNSIGNED, torch.float16, None),
    ((1, 1), 20, 300, 16, 16, SIGNED, torch.float16, None),
)
GPU_CASES = (
    ((4, 6), 197, 197, 64, 64), ((2, 3), 49, 49, 32, 32), ((2, 2), 300, 577, 80, 64), ((2,), 65, 130, 128, 128),
    ((1, 2), 40, 33, 200, 256), ((2, 2), 256, 256, 64, 64),
)  # fmt: skip


def plain(q, k, v, amax, scaling, quant_format):
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling, dim=-1)
    return torch.matmul(fake_quantize(weights, scale_from_amax(amax, quant_format), quant_format), v)


def check(case, device, compiled=False):
    """Result and gradients of one attention; the largest probabilities saturate."""
    lead, tokens, keys, width, value_width, quant_format, dtype, tiles = case
    scaling = 1.5 * width**-0.5
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((*lead, tokens, width), (*lead, keys, width), (*lead, keys, value_width))
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    grad = torch.randn((*lead, tokens, value_width), generator=generator).to(device, dtype)
    assert fits(*made)
    exact = torch.softmax(made[0].double() @ made[1].double().transpose(-2, -1) * scaling, -1)
    amax = exact.amax().float() * 0.4

    def fused(q, k, v):
        return attention(q, k, v, amax, scaling, quant_format.low, quant_format.high, tiles)

    run = torch.compile(fused, fullgraph=True) if compiled else fused
    leaves = [t.clone().requires_grad_() for t in made]
    result = run(*leaves)
    found = (result, *torch.autograd.grad(result, leaves, grad))
    leaves = [t.double().requires_grad_() for t in made]
    expected = plain(*leaves, amax.double(), scaling, quant_format)
    expected = (expected, *torch.autograd.grad(expected, leaves, grad.double()))
    precision = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    if device != "cpu":  # exponentials and logarithms of a GPU are good to 22 bits: some values are beyond a tie
        precision = max(precision, 2e-3)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous()
        assert other.abs().max() > 0.01
        difference = (one.double() - other).norm() / other.norm()
        assert difference < precision, (case, float(difference))


def check_network():
    """A whole network: but for values at ties, the plain path; in half precision, but for its rounding."""
    qmodel, x = quantized(vit())
    fused = compress.fuse_for_training(qmodel, kernels="triton")
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-3, atol=1e-3)
    assert_near(in_half(fused, qmodel, x), in_half(qmodel, qmodel, x), 0.99)


def in_half(run, qmodel, x, dtype=torch.float16):
    """Gradients of the parameters under autocast; float16, as the interpreter multiplies the bits of bfloat16."""
    qmodel.zero_grad()
    with torch.autocast(x.device.type, dtype):
        result = run(x)
    result.float().square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in qmodel.named_parameters()}


def assert_near(one, other, least):
    """Every gradient points into the same direction."""
    for name, grad in other.items():
        assert F.cosine_similarity(one[name].flatten(), grad.flatten(), dim=0) > least, name


def main():
    assert os.environ.get("TRITON_INTERPRET") == "1"
    for case in CASES:
        check(case, "cpu")
    check_network()
    print(f"{len(CASES)} attentions, 1 network")


if __name__ == "__main__":
    main()
