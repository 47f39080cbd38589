"""Attention's kernels against torch in float64: in Triton's interpreter when started by `test_fused_attention`.

A probability within the kernel's precision of a tie may round to the other neighbour: its row is left out, also by a
gradient of zero.
"""

import torch
import torch.nn.functional as F

from compress.kernels.epilogue import IntegerGrid
from compress.kernels.triton import attention as triton_attention
from compress.kernels.triton.attention import AttentionTile as Tile
from compress.kernels.triton.attention import AttentionTiles as Tiles
from compress.kernels.triton.attention import (
    attention,
    fits,
    packed_attention,
    packed_fits,
    window_attention,
    window_fits,
)
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from tests.kernels.float64 import assert_close_in_norm, beside_float64
from tests.qat_fusion.common import fused_as_plain
from tests.qat_fusion.test_attention import quantized, swin, vit

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
    ((4, 6), 197, 197, 64, 64),
    ((2, 3), 49, 49, 32, 32),
    ((2, 2), 300, 577, 80, 64),
    ((2,), 65, 130, 128, 128),
    ((1, 2), 40, 33, 200, 256),
    ((2, 2), 256, 256, 64, 64),
)


PACKED = (
    # batch, tokens, heads, width, parts rounded, result rounded, format of probabilities, dtype, tiles
    (1, 19, 3, 8, True, False, UNSIGNED, torch.float32, None),
    (2, 18, 2, 24, True, True, SIGNED, torch.float32, SMALL),
    (1, 17, 2, 16, False, True, SIGNED, torch.float32, None),
    (1, 40, 2, 16, True, True, SIGNED, torch.float16, None),
)
GPU_PACKED = (
    (4, 197, 6, 64, True, True),
    (2, 50, 3, 32, False, False),
    (1, 577, 2, 72, True, False),
    (2, 130, 2, 128, False, True),
    (2, 197, 3, 64, True, False),
)

WINDOWS = (
    # windows in all, of a mask, tokens, heads, width, format of probabilities, dtype
    (5, None, 19, 2, 8, SIGNED, torch.float32),
    (6, 2, 16, 1, 24, UNSIGNED, torch.float16),
)
GPU_WINDOWS = ((256, None, 49, 3, 32), (128, 64, 49, 6, 32), (12, 4, 64, 2, 64))


def plain(q, k, v, amax, scaling, quant_format, added=0.0):
    # (the attended values, which of their rows stand on no tie: a kernel may round a tie to either neighbour).
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling + added, dim=-1)
    scale = scale_from_amax(amax, quant_format)
    return torch.matmul(fake_quantize(weights, scale, quant_format), v), ~at_tie(weights / scale).any(-1, keepdim=True)


def at_tie(steps):
    return (steps.abs() % 1 - 0.5).abs() < 1e-5 * (1 + steps.abs())


def check(case, device, compiled=False):
    # Result and gradients of one attention; the largest probabilities saturate.
    lead, tokens, keys, width, value_width, quant_format, dtype, tiles = case
    scaling = 1.5 * width**-0.5
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((*lead, tokens, width), (*lead, keys, width), (*lead, keys, value_width))
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    assert fits(*made)
    amax = largest(made[0], made[1], scaling) * 0.4

    def fused(q, k, v):
        return attention(q, k, v, amax, scaling, quant_format.high, tiles)

    def reference(q, k, v):
        return plain(q, k, v, amax.double(), scaling, quant_format)

    compare(torch.compile(fused, fullgraph=True) if compiled else fused, reference, made, generator)


def largest(q, k, scaling):
    return torch.softmax(q.double() @ k.double().transpose(-2, -1) * scaling, -1).amax().float()


def check_packed(case, device, compiled=False):
    # As `check`, with q, k and v side by side; the largest of them, the probabilities and the result saturate.
    batch, tokens, heads, width, parts_rounded, result_rounded, quant_format, dtype, tiles = case
    scaling = 1.5 * width**-0.5
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn((batch, tokens, 3, heads, width), generator=generator).to(device, dtype)
    assert packed_fits(qkv)
    *parts, result = [torch.tensor(value, device=device) for value in (1.3, 1.7, 1.1, 0.25)]
    weights = largest(*qkv.permute(2, 0, 3, 1, 4)[:2], scaling) * 0.4
    grids = tuple(IntegerGrid(amax, SIGNED.low, SIGNED.high) for amax in parts) if parts_rounded else None
    last = IntegerGrid(result, UNSIGNED.low, UNSIGNED.high) if result_rounded else None

    def fused(qkv):
        return packed_attention(
            qkv, IntegerGrid(weights, quant_format.low, quant_format.high), scaling, grids, last, tiles
        )

    def reference(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if parts_rounded:
            q, k, v = (written(x, amax, dtype) for x, amax in zip((q, k, v), parts, strict=True))
        out, sure = (x.transpose(1, 2) for x in plain(q, k, v, weights.double(), scaling, quant_format))
        if not result_rounded:
            return out, sure
        scale = scale_from_amax(result.double(), UNSIGNED)
        return fake_quantize(out, scale, UNSIGNED), sure & ~at_tie(out / scale)

    compare(torch.compile(fused, fullgraph=True) if compiled else fused, reference, [qkv], generator)


def written(x, amax, dtype):
    value = fake_quantize(x.detach().float(), scale_from_amax(amax, SIGNED), SIGNED).to(dtype)
    passed = fake_quantize(x, scale_from_amax(amax.double(), SIGNED), SIGNED)
    return passed + (value - passed).detach()


def check_window(case, device, compiled=False):
    # As `check_packed`, with a table of scores, and a mask where windows are shifted.
    count, masks, tokens, heads, width, quant_format, dtype = case
    if dtype == torch.float32:
        tokens, width = min(tokens, 32), min(width, 32)
    scaling = width**-0.5
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn((count, tokens, 3, heads, width), generator=generator).to(device, dtype)
    table = torch.randn((1, heads, tokens, tokens), generator=generator).to(device)
    mask = None if masks is None else -100.0 * (torch.rand((1, masks, 1, tokens, tokens), generator=generator) < 0.3)
    mask = None if mask is None else mask.to(device)
    *parts, weights, result = [torch.tensor(value, device=device) for value in (1.3, 1.7, 1.1, 0.3, 0.25)]
    grids = tuple(IntegerGrid(amax, SIGNED.low, SIGNED.high) for amax in parts)
    assert window_fits(qkv)

    def fused(qkv, table):
        of_weights = IntegerGrid(weights, quant_format.low, quant_format.high)
        return window_attention(
            qkv, table, mask, of_weights, grids, IntegerGrid(result, SIGNED.low, SIGNED.high), scaling
        )

    def reference(qkv, table):
        q, k, v = (written(x, a, dtype) for x, a in zip(qkv.permute(2, 0, 3, 1, 4), parts, strict=True))
        if mask is not None:
            table = table + mask.double()[0].repeat(count // masks, 1, 1, 1)
        found = plain(q, k, v, weights.double(), scaling, quant_format, table)
        out, sure = (x.transpose(1, 2) for x in found)
        scale = scale_from_amax(result.double(), SIGNED)
        return fake_quantize(out, scale, SIGNED), sure & ~at_tie(out / scale)

    compare(torch.compile(fused, fullgraph=True) if compiled else fused, reference, [qkv, table], generator)


def compare(run, reference, made, generator):
    # Result and gradients of a function against those in float64, except at ties.
    dtype = made[0].dtype
    result, found, expected, sure = beside_float64(run, reference, made, generator)
    assert sure.double().mean() > 0.7
    precision = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    if sure.is_cuda:  # exponentials and logarithms of a GPU are good to 22 bits
        precision = max(precision, 2e-4)
    assert result.is_contiguous()
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        assert_close_in_norm(one, other, precision, made[0].shape)


def check_network(make):
    # A whole network: but for values at ties, the plain path; in half precision, but for its rounding.
    qmodel, x = quantized(make())
    x = x[:1]  # the cases above have several images
    fused = fused_as_plain(qmodel, x, rtol=1e-3, atol=1e-3, kernels="triton")
    assert_near(in_half(fused, qmodel, x), in_half(qmodel, qmodel, x), 0.99)


def in_half(run, qmodel, x, dtype=torch.float16):
    qmodel.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        result = run(x)
    result.float().square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in qmodel.named_parameters()}


def assert_near(one, other, least):
    for name, grad in other.items():
        assert F.cosine_similarity(one[name].flatten(), grad.flatten(), dim=0) > least, name


def main():
    for case in CASES:
        check(case, "cpu")
    for case in PACKED:
        check_packed(case, "cpu")
    triton_attention._PROGRAMS = 4  # each program goes through several windows
    for case in WINDOWS:
        check_window(case, "cpu")
    check_network(vit)
    check_network(swin)
