"""The page of the engine's layers names what keeps each from its roof."""

import pytest

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
