"""The roofline formula on devices with round numbers, and its properties on any device."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress import roofline
from compress.errors import RooflineError
from compress.roofline_model import Device, Operation, Workload, roofline_of, workload
from tests.roofline_model.networks import Block, Residual, WithOpaque


def device(bandwidth=10.0, **peaks):
    dense = peaks or {"fp32": 100.0, "fp16": 200.0, "int8": 400.0}
    sparse = {"int8": 800.0, "fp16": 400.0} if not peaks else {}
    return Device(
        name="toy",
        title="Toy",
        bandwidth_bytes_per_s=bandwidth,
        dense_flops_per_s=dense,
        sparse_flops_per_s=sparse,
        source="a test",
    )


def one(**numbers):
    defaults = {"macs": 100, "activation_elements": 10}
    op = Operation(name="op", kind="conv", type="Conv2d", members=("op",), paths=("op",), **(defaults | numbers))
    return Workload(model="one", input_shapes=((1, 1),), batch_size=1, fused=False, operations=(op,))


def only_row(work, precision, **toy):
    (row,) = roofline_of(work, device=device(**toy), precision=precision).rows
    return row


def test_memory_bound_by_hand():
    row = only_row(one(), "fp32")  # 200 flops, 40 bytes: 5 flops a byte, ridge at 10
    assert (row.flops, row.weight_bytes, row.activation_bytes) == (200, 0, 40)
    assert (row.arithmetic_intensity, row.ridge_point) == (5, 10)
    assert row.bound == "memory"
    assert row.attainable_flops_per_s == 50
    assert row.least_time_ms == pytest.approx(4000)


def test_compute_bound_by_hand():
    row = only_row(one(macs=1000), "fp32")  # 2000 flops, 40 bytes: 50 flops a byte
    assert (row.bound, row.attainable_flops_per_s) == ("compute", 100)
    assert row.least_time_ms == pytest.approx(20_000)


def test_bytes_at_each_precision():
    work = one(weight_elements=100, bias_elements=8, activation_elements=60, float_elements=20)
    fp32, fp16, int8 = (only_row(work, p) for p in ("fp32", "fp16", "int8"))
    assert (fp32.weight_bytes, fp32.activation_bytes) == (432, 240)
    assert (fp16.weight_bytes, fp16.activation_bytes) == (216, 120)
    assert (int8.weight_bytes, int8.activation_bytes) == (100 + 32, 40 + 2 * 20)


def test_two_of_four_by_hand():
    work = one(macs=1000, sparse_macs=600, weight_elements=64, sparse_weight_elements=64, activation_elements=0)
    row = only_row(work, "int8-2:4")
    assert row.weight_bytes == 64 * 1 / 2 + 64 / 2 * 2 / 8  # half the bytes, two bits of index each
    assert row.peak_flops_per_s == pytest.approx(2000 / (1200 / 800 + 800 / 400))
    dense = only_row(one(macs=1000, weight_elements=64, activation_elements=0), "int8-2:4")
    assert (dense.weight_bytes, dense.peak_flops_per_s) == (64, 400)


def test_first_convolution_of_a_network_gains_nothing_from_two_of_four():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(1, 3, 8, 8)
    first, second = roofline(model, x, device=device(), precision="int8-2:4").rows
    assert first.peak_flops_per_s == 400
    assert second.peak_flops_per_s == 800


@given(
    macs=st.integers(0, 10**9),
    elements=st.integers(1, 10**7),
    weights=st.integers(0, 10**7),
    bandwidth=st.floats(1e3, 1e13),
    peak=st.floats(1e3, 1e16),
)
def test_law_holds_for_any_operation_and_device(macs, elements, weights, bandwidth, peak):
    work = one(macs=macs, activation_elements=elements, weight_elements=weights)
    row = only_row(work, "fp16", bandwidth=bandwidth, fp16=peak)
    assert row.attainable_flops_per_s <= peak
    assert row.attainable_flops_per_s <= row.arithmetic_intensity * bandwidth * (1 + 1e-12)
    assert row.least_time_ms >= row.flops / peak * 1e3 * (1 - 1e-12)
    assert row.least_time_ms >= (row.weight_bytes + row.activation_bytes) / bandwidth * 1e3 * (1 - 1e-12)
    if macs:
        assert row.flops / row.least_time_ms * 1e3 == pytest.approx(row.attainable_flops_per_s)
    faster = only_row(work, "fp16", bandwidth=2 * bandwidth, fp16=2 * peak)
    assert faster.least_time_ms == pytest.approx(row.least_time_ms / 2)


def test_totals_are_sums():
    result = roofline(Residual(), torch.randn(2, 4, 5, 6), device=device(), precision="fp32")
    n, hw, c = 2, 30, 4
    assert result.macs == n * hw * c * c * 10
    assert result.flops == 2 * result.macs
    assert result.weight_bytes == 4 * (c * c * 10 + 2 * 2 * c)
    assert result.activation_bytes == 4 * n * c * hw * (6 * 2 + 3)
    assert result.arithmetic_intensity == result.flops / (result.weight_bytes + result.activation_bytes)
    assert result.least_time_ms == pytest.approx(sum(row.least_time_ms for row in result.rows))
    assert result.images_per_s == pytest.approx(2 / result.least_time_ms * 1e3)
    assert result.memory_bound_share == 1.0
    assert result.unknown == ()


def test_unknown_layers_are_listed_and_left_out():
    result = roofline(WithOpaque(), torch.randn(1, 3, 8, 8), device=device(), precision="fp32")
    assert result.unknown == ("odd",)
    odd = result.rows[-1]
    assert (odd.bound, odd.flops, odd.least_time_ms, odd.attainable_flops_per_s) == ("unknown", None, None, None)
    assert result.macs == result.rows[0].macs


def test_layer_norm_keeps_its_input_in_floating_point():
    x = torch.randn(1, 5, 16)
    int8, fp16 = (roofline(Block(), x, device=device(), precision=p) for p in ("int8", "fp16"))
    norm, norm_half = (next(r for r in result.rows if r.kind == "layer_norm") for result in (int8, fp16))
    assert norm_half.activation_bytes == 2 * 80 * 2
    assert norm.activation_bytes == 80 * 2 + 80  # read as fp16, written as int8 for the projections


def test_measured_times_become_points_below_the_roof():
    result = roofline(Residual(), torch.randn(1, 4, 6, 6), device=device(), precision="fp32", fused=True)
    assert result.measured_ms is None
    first, second = result.rows
    timed = result.with_times(
        {"conv1": 2 * first.least_time_ms, "bn1": first.least_time_ms, "relu": first.least_time_ms}
    )
    assert timed.rows[0].efficiency == pytest.approx(0.25)
    assert timed.rows[0].achieved_flops_per_s == pytest.approx(first.attainable_flops_per_s / 4)
    assert timed.rows[1].measured_ms is None
    assert timed.rows[1].efficiency is None
    assert timed.measured_ms == pytest.approx(4 * first.least_time_ms)
    assert second.achieved_flops_per_s is None


def test_times_of_strangers_are_refused():
    result = roofline(Residual(), torch.randn(1, 4, 6, 6), device=device(), precision="fp32")
    with pytest.raises(RooflineError, match="'conv9', which is not a layer of this roofline, did you mean 'conv"):
        result.with_times({"conv9": 1.0})
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(RooflineError, match="must be more than 0 ms"):
            result.with_times({"conv1": bad})


def test_everything_is_json():
    result = roofline(WithOpaque(), torch.randn(1, 3, 8, 8), device="t4", precision="fp16", name="odd one")
    read = json.loads(json.dumps(result.as_dict()))
    assert read["model"] == "odd one"
    assert read["totals"]["unknown"] == ["odd"]
    assert read["rows"][0]["macs"] == result.rows[0].macs
    assert read["device"]["source"] == "NVIDIA T4 Tensor Core GPU datasheet"


def test_refused_before_the_model_runs():
    def never(*_):
        pytest.fail("the model was run")

    model = Residual()
    model.forward = never
    for options in ({"device": "h300"}, {"precision": "int7"}, {"device": "t4", "precision": "bf16"}):
        with pytest.raises(RooflineError):
            roofline(model, torch.randn(1, 4, 6, 6), **options)


def test_int8_never_exceeds_half_of_fp16s_bytes_by_more_than_what_stays_float():
    work = workload(Block(), torch.randn(2, 5, 16), fused=True)
    half, eight = (roofline_of(work, device=device(), precision=p) for p in ("fp16", "int8"))
    assert half.activation_bytes / 2 < eight.activation_bytes < half.activation_bytes
    assert eight.least_time_ms < half.least_time_ms
