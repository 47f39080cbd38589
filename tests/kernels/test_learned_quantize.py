"""Kernels of learned ranges; their gradients against LSQ's definition are in tests/quantization/test_learned.py."""

import pytest
import torch

from tests.kernels.interpreter import interpreted


def test_triton_kernels_compute_the_same_in_the_interpreter():
    assert interpreted("tests.kernels.interpreted_learned").splitlines() == ["12 chains, 2 networks"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernels_compute_what_torch_does():
    from tests.kernels.interpreted_learned import cases, check

    for case in cases():
        check(*case, device="cuda")
