"""Convolutions on codes, and depthwise ones of training, against float64: in Triton's interpreter when started by
`test_kernels`, on a GPU else.
"""

import math

import torch
import torch.nn.functional as F

from compress.kernels.epilogue import Epilogue
from compress.kernels.memory_format import unpack
from compress.kernels.triton import depthwise as triton_depthwise
from compress.kernels.triton.conv_int8 import (
    Codes,
    ConvTile,
    Geometry,
    conv_codes,
    output_size,
    stem_filter,
    stem_image,
)
from tests.kernels.float64 import CASES as DEPTHWISE
from tests.kernels.float64 import check_depthwise

RELU, RELU6, NONE = (0.0, math.inf), (0.0, 6.0), (-math.inf, math.inf)
SMALL = ConvTile(32, 32, 32, 2, 4, part=16)
CASES = (
    # images, channels, height, width, outputs, taps, stride, padding, dilation, residual, bounds, bias, low, tile
    (2, 32, 5, 3, 32, 1, 1, 0, 1, "codes", RELU, True, -128, SMALL),
    (2, 32, 5, 7, 48, 3, 1, 1, 1, "float", RELU6, True, -128, SMALL),
    (2, 48, 7, 6, 16, 3, 2, 1, 1, "", NONE, False, -128, SMALL),
    (1, 16, 9, 9, 32, 3, 1, 2, 2, "codes", NONE, True, -127, SMALL),
    (2, 64, 6, 6, 32, 1, 2, 0, 1, "", RELU, True, -128, ConvTile(16, 16, 32, 2, 4)),
    (1, 32, 8, 8, 16, 3, 1, 0, 1, "", RELU, True, -128, None),
    (3, 16, 4, 4, 80, 1, 1, 0, 1, "float", NONE, True, -128, None),
)


def integers(*shape, low=-128, device):
    values = torch.randint(low, 128, shape, dtype=torch.int8, device=device)
    return values.contiguous(memory_format=torch.channels_last)


def assert_near(result, terms, amax, epilogue):
    # Codes, bits and values are those of the sum of `terms`, but for what float32 cannot tell from a boundary.
    #
    # Every operation rounds off 2^-24 of the terms' magnitudes at most.
    e, y = epilogue, sum(terms)
    scale = amax.double() / 127
    steps, precision = y / scale, 16 * 2.0**-24 * sum(term.abs() for term in terms) / scale
    ties = ((steps % 1) - 0.5).abs() < precision
    rounded = (y.clamp(e.lower, e.upper) / scale).round()
    clamped = rounded.clamp(e.low, e.high)
    difference = (result.codes - clamped).abs()
    assert difference.max() <= 1
    assert not difference[~ties].any(), description((difference != 0) & ~ties, difference != 0, steps)
    bounds = [(y - bound).abs() / scale < precision for bound in (e.lower, e.upper) if math.isfinite(bound)]
    at_boundary = torch.stack([ties, *bounds]).any(0)
    assert at_boundary.double().mean() < 0.01  # or nothing would be tested
    passes = (y > e.lower) & (y < e.upper) & (rounded == clamped)
    wrong = passes != unpack(result.bits, result.codes)
    assert not (wrong & ~at_boundary).any(), description(wrong & ~at_boundary, wrong, steps)
    assert int(result.bits.count_nonzero()) > 0
    torch.testing.assert_close(result.value.double(), result.codes * scale, rtol=1e-6, atol=0)
    for tensor in (result.codes, result.value):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def description(bad, wrong, steps):
    places = [(tuple(at.tolist()), float(steps[tuple(at)])) for at in wrong.nonzero()[:8]]
    return f"{int(bad.sum())} of {bad.numel()} beyond float32's precision, {int(wrong.sum())} in all; first {places}"


def product(x, weight, *geometry):
    sums = F.conv2d(x.integers.double(), weight.integers.double(), *geometry)
    return sums * (x.amax.double() / 127) * (weight.amax.double() / 127)[:, None, None]


def check(case, device):
    images, c, height, width, outputs, taps, stride, padding, dilation, added, bounds, has_bias, low, tile = case
    torch.manual_seed(0)
    geometry = Geometry(*((n, n) for n in (stride, padding, dilation)))
    x = Codes(integers(images, c, height, width, device=device), torch.tensor(3.1, device=device))
    weight = Codes(integers(outputs, c, taps, taps, low=-127, device=device), 0.5 + torch.rand(outputs, device=device))
    bias = torch.randn(outputs, device=device) if has_bias else None
    terms = [product(x, weight, None, *geometry)]
    shape = terms[0].shape
    assert output_size((height, width), (taps, taps), geometry) == tuple(shape[2:])
    if has_bias:
        terms.append(bias.double()[:, None, None])
    residual = None
    if added == "codes":
        residual = Codes(integers(*shape, device=device), torch.tensor(40.0, device=device))
        terms.append(residual.integers.double() * (residual.amax.double() / 127))
    elif added == "float":
        residual = (10 * torch.randn(shape, device=device)).contiguous(memory_format=torch.channels_last)
        terms.append(residual.double())
    amax, epilogue = 1.5 * sum(terms).std().float(), Epilogue(low, 127, *bounds)
    result = conv_codes(
        x, weight, amax, epilogue, geometry, bias=bias, residual=residual, dtype=torch.float32, tile=tile
    )
    assert_near(result, terms, amax, epilogue)
    if taps == 1:
        bare = conv_codes(x, weight, amax, epilogue, geometry, bias=bias, residual=residual, bits=False, tile=tile)
        assert bare.bits is None
        assert bare.value is None
        assert torch.equal(bare.codes, result.codes)


def check_stem(device):
    torch.manual_seed(0)
    x = Codes(integers(2, 3, 12, 9, device=device), torch.tensor(2.0, device=device))
    weight = Codes(integers(16, 3, 7, 7, low=-127, device=device), 0.5 + torch.rand(16, device=device))
    terms = [product(x, weight, None, 2, 3)]
    amax, epilogue = 1.5 * terms[0].std().float(), Epilogue(-128, 127, *RELU)
    image, taps = stem_image(x.integers, 7, 3), stem_filter(weight.integers, 3)
    rows = Codes(image, x.amax)
    result = conv_codes(rows, weight._replace(integers=taps), amax, epilogue, Geometry(), dtype=torch.float32)
    assert_near(result, terms, amax, epilogue)


def main():
    for case in CASES:
        check(case, "cpu")
    check_stem("cpu")
    triton_depthwise._PROGRAMS = 14  # so that each goes through several tiles
    for case in DEPTHWISE:
        check_depthwise(case, torch.float16, "cpu")
