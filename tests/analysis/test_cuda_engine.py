"""The page of the engine's layers names what keeps each from its roof."""

import re

import pytest

from analysis.cuda_engine.counters import counters, joined
from analysis.cuda_engine.counters import page as counters_page
from analysis.cuda_engine.report import REASONS, device_of, reason, roofs


@pytest.mark.parametrize(
    ("kind", "kernel", "ms", "bandwidth", "peak", "word"),
    [
        ("Convolution", "triton product", 0.1, 0.6, 0.1, ""),
        ("Convolution", "triton product", 0.1, 0.1, 0.597, ""),  # the table shows 0.60
        ("Convolution", "triton product", 0.005, 0.1, 0.1, "launch"),
        ("Convolution", "triton depthwise dot 64x1", 0.1, 0.5, 0.0, "cores"),
        ("Attention", "triton attention 64x64 w4", 0.1, 0.1, 0.2, "softmax"),
        ("Linear", "triton deep", 0.1, 0.5, 0.3, "loads"),
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


NCU = """==PROF== Connected to process 12
"ID","Kernel Name","gpu__time_duration.sum","lts__throughput.max.pct_of_peak_sustained_elapsed",@barrier@,@selected@
"","","ns","%","cycle","cycle"
"0","_product_kernel","1,034,500","61.5","2.25","1.0"
"1","vectorized_elementwise_kernel","3000","12.0","0.5","1.0"
"""


def test_counters_belong_to_the_step_whose_kernel_was_profiled():
    text = re.sub("@(.*?)@", r'"smsp__average_warps_issue_stalled_\1_per_issue_active.ratio"', NCU)
    step = {"kind": "Convolution", "kernel": "triton product 128x128x128", "shape": "[1, 2]", "count": 2}
    (found,) = joined([step], counters(text.splitlines()))
    assert found["us"] == 1034.5
    assert found["shares"] == {"its busiest part": 0.615}
    assert found["waits"] == {"barrier": 2.25}
    with pytest.raises(ValueError, match="1 kernels of 0 steps"):
        joined([], counters(text.splitlines()))
    report = {"machine": {"gpu": "NVIDIA H200"}, "command": "c", "networks": [
        {"network": "n", "batch": 1, "layers": [found]}]}  # fmt: skip
    *_, head, _, row = counters_page(report)
    assert head.count("|") == row.count("|")
    assert row.startswith("| Convolution 1x2 | 2 | 1034.5 |")
