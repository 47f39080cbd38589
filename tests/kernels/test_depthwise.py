"""Depthwise convolutions of training; `test_conv_int8` computes them in Triton's interpreter."""

import pytest
import torch

from compress.kernels.triton.depthwise import fits
from tests.kernels.depthwise import GPU_CASES, check_depthwise


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_they_compute_what_float64_does(dtype, compiled):
    for case in GPU_CASES[:1] if compiled else GPU_CASES:
        check_depthwise(case, dtype, "cuda", compiled)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"weight": (8, 1, 5, 5), "padding": (2, 2)}, False),
        ({"weight": (8, 2, 7, 7)}, False),
        ({"weight": (16, 1, 7, 7)}, False),
        ({"padding": (2, 3)}, False),
        ({"stride": (2, 1)}, False),
        ({"dilation": (1, 2)}, False),
        ({"x": torch.empty(2, 8, 9, 9)}, False),
    ],
)
def test_which_convolutions_fit(change, expected):
    case = {
        "x": torch.empty(2, 8, 9, 9).contiguous(memory_format=torch.channels_last),
        "weight": (8, 1, 7, 7),
        "dtype": torch.bfloat16,
        "stride": (1, 1),
        "padding": (3, 3),
        "dilation": (1, 1),
    } | change
    assert fits(case.pop("x"), torch.empty(case.pop("weight")), **case) is expected
