"""Batch norm, activation and quantizer in one operation."""

import itertools

import pytest
import torch

from tests.kernels.interpreter import interpreted


def test_in_the_interpreter_the_kernels_compute_what_float64_does():
    assert "27 batch norms" in interpreted("tests.kernels.interpreted_batch_norm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernels_compute_what_float64_does():
    from tests.kernels.interpreted_batch_norm import (
        BOUNDS,
        DTYPES,
        FORMATS,
        GPU_SHAPES,
        check,
        check_a_mean_far_from_zero,
    )

    for i, (shape, dtype) in enumerate(itertools.product(GPU_SHAPES, DTYPES)):
        check(shape, dtype, BOUNDS[i % 3], i % 4 != 3, FORMATS[i % 2], "cuda")
    check_a_mean_far_from_zero("cuda")


def test_the_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton")
    from compress.kernels.epilogue import Epilogue
    from compress.kernels.triton.ahead import compile_requests, recorded
    from compress.kernels.triton.batch_norm import Running, batch_norm_quantize

    x = torch.zeros(8, 96, 28, 28, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(96, requires_grad=True), torch.zeros(96, requires_grad=True)
    with recorded() as recording:
        running = Running(torch.zeros(96), torch.ones(96), 0.1)
        y, *_ = batch_norm_quantize(
            x.requires_grad_(), weight, bias, weight.detach()[0], running, 1e-5, Epilogue(-128, 127, 0.0)
        )
        y.sum().backward()
    assert [request.name for request in recording.requests] == [
        "sums_kernel",
        "statistics_kernel",
        "forward_kernel",
        "backward_kernel",
        "backward_kernel",
    ]
    found = compile_requests(list(recording.requests), (9, 0), jobs=1)
    assert [result.error for result in found] == [""] * 5
