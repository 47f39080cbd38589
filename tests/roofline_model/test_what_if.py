"""Scenarios against the rooflines of which they consist."""

import pytest
import torch

from compress.errors import RooflineError
from compress.roofline_model import roofline_of, what_if, workload
from tests.roofline_model.networks import Residual


def test_scenarios_are_rooflines_of_their_settings():
    model, x = Residual(), torch.randn(2, 4, 9, 9)
    scenarios = what_if(model, x, device="a100", precision="fp16", batch_sizes=(1, 64))
    assert [s.name for s in scenarios] == [
        "fp16, as it is",
        "fp16 + fusion",
        "int8",
        "int8 + fusion",
        "int8-2:4 + fusion",
        "int8-2:4 + fusion, batch 1",
        "int8-2:4 + fusion, batch 64",
    ]
    base = roofline_of(workload(model, x), device="a100", precision="fp16")
    for s in scenarios:
        images = torch.randn(s.batch_size, 4, 9, 9)
        expected = roofline_of(workload(model, images, fused=s.fused), device="a100", precision=s.precision)
        assert s.least_time_ms == pytest.approx(expected.least_time_ms / s.batch_size)
        assert s.speedup == pytest.approx(expected.images_per_s / base.images_per_s)
        assert s.memory_bound_share == expected.memory_bound_share
    assert scenarios[0].speedup == 1
    assert scenarios[1].speedup > 2  # seven tensors written and read become two


def test_what_a_device_lacks_is_said_and_not_zero():
    scenarios = what_if(Residual(), torch.randn(1, 4, 9, 9), device="t4", batch_sizes=(8,))
    sparse = next(s for s in scenarios if "2:4" in s.name)
    assert sparse.least_time_ms is None
    assert sparse.speedup is None
    assert "NVIDIA T4 has no peak for int8-2:4" in sparse.reason
    assert scenarios[-1].name == "int8 + fusion, batch 8"


def test_bad_settings_are_refused():
    x = torch.randn(1, 4, 9, 9)
    with pytest.raises(RooflineError, match="no peak for bf16"):
        what_if(Residual(), x, device="t4", precision="bf16")
    with pytest.raises(RooflineError, match="batch_size"):
        what_if(Residual(), x, batch_sizes=(0,))
