"""Convolutions on INT8 codes: sums are exact, and the epilogue rounds as the plain path does."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compress.kernels.triton.conv_int8_training import stem_filter, stem_fits, stem_image
from tests.kernels.interpreter import interpreted


def test_in_the_interpreter_it_computes_what_float64_does():
    assert "7 convolutions, 1 stem, 1 depthwise" in interpreted("tests.kernels.interpreted_conv")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_computes_what_float64_does():
    from tests.kernels.interpreted_conv import CASES, check, check_stem

    for case in CASES:
        check(case, "cuda")
    check_stem("cuda")


@given(
    taps=st.integers(1, 9),
    padding=st.integers(0, 4),
    channels=st.integers(1, 4),
    height=st.integers(9, 20),
    width=st.integers(9, 20),
)
def test_a_stem_on_blocks_of_pixels_is_the_same_convolution(taps, padding, channels, height, width):
    generator = torch.Generator().manual_seed(taps)
    x = torch.randint(-128, 128, (2, channels, height, width), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, (3, channels, taps, taps), dtype=torch.int8, generator=generator)
    expected = F.conv2d(x.double(), weight.double(), stride=2, padding=padding)
    result = F.conv2d(stem_image(x, taps, padding).double(), stem_filter(weight, padding).double())
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("shape", "stride", "padding", "dilation", "fits"),
    [
        ((64, 3, 7, 7), 2, 3, 1, True),
        ((32, 3, 3, 3), 2, 1, 1, True),
        ((64, 3, 3, 3), 1, 1, 1, False),
        ((64, 5, 7, 7), 2, 3, 1, False),
        ((64, 3, 7, 5), 2, 3, 1, False),
        ((64, 3, 7, 7), 2, 3, 2, False),
    ],
)
def test_which_first_layers_are_stems(shape, stride, padding, dilation, fits):
    pairs = [(n, n) for n in (stride, padding, dilation)]
    assert stem_fits(torch.empty(shape), *pairs) is fits
