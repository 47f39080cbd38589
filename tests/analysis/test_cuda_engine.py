"""The page of the engine's layers names what keeps each from its roof."""

import pytest

from analysis.cuda_engine.counters import counters, joined
from analysis.cuda_engine.report import REASONS, device_of, reason, roofs


@pytest.mark.parametrize(
    ("kind", "kernel", "ms", "bandwidth", "peak", "word"),
    [
        ("Convolution", "triton product", 0.1, 0.6, 0.1, ""),
        ("Convolution", "triton product", 0.1, 0.1, 0.597, ""),  # the table shows 0.60
        ("Convolution", "triton product", 0.005, 0.1, 0.1, "launch"),
        ("Convolution", "triton depthwise dot 64x1", 0.1, 0.5, 0.0, "cores"),
        ("Attention", "triton attention 64x64 w4", 0.1, 0.1, 0.2, "softmax"),
        ("Linear", "triton deep", 0.1, 0.5, 0.3, "epilogue"),
        ("Linear", "triton deep", 0.1, 0.2, 0.4, "products"),
        ("Elementwise", "triton elementwise", 0.1, 0.3, 0.0, "strides"),
    ],
)
def test_a_layer_that_misses_its_roof_has_a_reason(kind, kernel, ms, bandwidth, peak, word):
    macs = peak * 1979e12 * ms / 1e3 / 2
    layer = {"kind": kind, "kernel": kernel, "macs": macs, "bytes": bandwidth * 4.8e12 * ms / 1e3}
    assert roofs(layer, ms / 1e3, device_of("NVIDIA H200")) == pytest.approx((bandwidth, peak), abs=1e-3)
    assert reason(layer, ms, bandwidth, peak) == word
    assert not word or word in REASONS


def test_the_roofs_are_those_of_the_gpu_that_ran():
    assert device_of("NVIDIA H100 80GB HBM3").bandwidth_bytes_per_s == 3.35e12
    assert device_of("NVIDIA H200").bandwidth_bytes_per_s == 4.8e12


NCU = '''==PROF== Connected to process 12
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","lts__throughput.avg.pct_of_peak_sustained_elapsed","smsp__issue_active.avg.per_cycle_active"
"","","us","%","%","inst/cycle"
"0","_product_kernel","1,034.50","25.0","61.5","0.42"
"1","vectorized_elementwise_kernel","3.00","10.0","12.0","0.10"
'''  # fmt: skip  # noqa: E501


def test_counters_belong_to_the_step_whose_kernel_was_profiled():
    step = {"kind": "Convolution", "kernel": "triton product 128x128x128", "shape": "[1]", "count": 2, "ms": 1.0}
    (found,) = joined([step], counters(NCU.splitlines()))
    assert found["counters"]["gpu__time_duration.sum"] == 1034.5
    assert found["shares"] == {
        "memory": 0.25, "second cache": 0.615, "first cache": None, "tensor cores": None, "issue": 0.42
    }  # fmt: skip
    with pytest.raises(ValueError, match="1 kernels of 0 steps"):
        joined([], counters(NCU.splitlines()))
