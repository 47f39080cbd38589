import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from compress import roofline
from compress.errors import RooflineError
from compress.roofline_model import (
    TABLE,
    Device,
    Operation,
    Workload,
    ceilings_text,
    devices_text,
    measure_ceilings,
    roofline_of,
    rows_text,
    sparse_bound,
    summary_text,
    what_if,
    what_if_text,
    workload,
)
from compress.roofline_model.tables import quantity, table
from tests.roofline_model.networks import block_net, residual, with_opaque


def device(bandwidth=10.0, **peaks):
    dense = peaks or {"fp32": 100.0, "fp16": 200.0, "int8": 400.0}
    return Device(
        name="toy",
        title="Toy",
        bandwidth_bytes_per_s=bandwidth,
        dense_flops_per_s=dense,
        sparse_flops_per_s={name: 2 * dense[name] for name in ("int8", "fp16") if name in dense},
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
    assert (row.bound, row.attainable_flops_per_s, row.least_time_ms) == ("memory", 50, pytest.approx(4000))


def test_compute_bound_by_hand():
    row = only_row(one(macs=1000), "fp32")  # 2000 flops, 40 bytes: 50 flops a byte
    assert (row.bound, row.attainable_flops_per_s, row.least_time_ms) == ("compute", 100, pytest.approx(20_000))


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
    rows = roofline(model, x, device=device(), precision="int8-2:4").rows
    assert [row.peak_flops_per_s for row in rows] == [400, 800]


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
    result = roofline(residual(), torch.randn(2, 4, 5, 6), device=device(), precision="fp32")
    n, hw, c = 2, 30, 4
    assert result.macs == result.flops / 2 == n * hw * c * c * 10
    assert result.weight_bytes == 4 * (c * c * 10 + 2 * 2 * c)
    assert result.activation_bytes == 4 * n * c * hw * (6 * 2 + 3)
    assert result.arithmetic_intensity == result.flops / (result.weight_bytes + result.activation_bytes)
    assert result.least_time_ms == pytest.approx(sum(row.least_time_ms for row in result.rows))
    assert result.images_per_s == pytest.approx(2 / result.least_time_ms * 1e3)
    assert (result.memory_bound_share, result.unknown) == (1.0, ())


def test_unknown_layers_are_listed_and_left_out():
    result = roofline(with_opaque(), torch.randn(1, 3, 8, 8), device=device(), precision="fp32")
    assert result.unknown == ("odd",)
    odd = result.rows[-1]
    assert (odd.bound, odd.flops, odd.least_time_ms, odd.attainable_flops_per_s) == ("unknown", None, None, None)
    assert result.macs == result.rows[0].macs


def test_layer_norm_keeps_its_input_in_floating_point():
    x = torch.randn(1, 5, 16)
    int8, fp16 = (roofline(block_net(), x, device=device(), precision=p) for p in ("int8", "fp16"))
    norm, norm_half = (next(r for r in result.rows if r.kind == "layer_norm") for result in (int8, fp16))
    assert norm_half.activation_bytes == 2 * 80 * 2
    assert norm.activation_bytes == 80 * 2 + 80  # read as fp16, written as int8 for the projections


def test_everything_is_json():
    result = roofline(with_opaque(), torch.randn(1, 3, 8, 8), device="t4", precision="fp16", name="odd one")
    read = json.loads(json.dumps(result.as_dict()))
    assert (read["model"], read["totals"]["unknown"]) == ("odd one", ["odd"])
    assert read["rows"][0]["macs"] == result.rows[0].macs
    assert read["device"]["source"] == "NVIDIA T4 Tensor Core GPU datasheet"


def test_refused_before_the_model_runs():
    def never(*_):
        pytest.fail("the model was run")

    model = residual()
    model.forward = never
    for options in ({"device": "h300"}, {"precision": "int7"}, {"device": "t4", "precision": "bf16"}):
        with pytest.raises(RooflineError):
            roofline(model, torch.randn(1, 4, 6, 6), **options)


def test_int8_never_exceeds_half_of_fp16s_bytes_by_more_than_what_stays_float():
    work = workload(block_net(), torch.randn(2, 5, 16), fused=True)
    half, eight = (roofline_of(work, device=device(), precision=p) for p in ("fp16", "int8"))
    assert half.activation_bytes / 2 < eight.activation_bytes < half.activation_bytes
    assert eight.least_time_ms < half.least_time_ms


# Scenarios against the rooflines of which they consist.


def test_scenarios_are_rooflines_of_their_settings():
    model, x = residual(), torch.randn(2, 4, 9, 9)
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
    scenarios = what_if(residual(), torch.randn(1, 4, 9, 9), device="t4", batch_sizes=(8,))
    sparse = next(s for s in scenarios if "2:4" in s.name)
    assert (sparse.least_time_ms, sparse.speedup, sparse.reason) == (None, None, "no peak for int8-2:4")
    assert scenarios[-1].name == "int8 + fusion, batch 8"


@pytest.mark.parametrize("device", [d for d in TABLE if "fp32" not in d.precisions], ids=lambda d: d.name)
def test_a_device_of_integers_alone_has_its_scenarios(device):
    scenarios = what_if(residual(), torch.randn(1, 4, 9, 9), device=device, batch_sizes=(8,))
    assert scenarios[0].name == "int8, as it is" and scenarios[0].speedup == 1
    assert len({s.name for s in scenarios}) == len(scenarios)


# Bounds of 2:4 on a device with round numbers, and properties that hold for any network.


def chain():
    layers = [nn.Conv2d(8, 16, 1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 4, 1)]
    return nn.Sequential(*layers), torch.zeros(1, 8, 2, 2)


def test_compute_bound_layers_halve_by_hand():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["2"], device=device(1e9, int8=1000.0))
    # flops: 2 * 4 pixels * (8 * 16, 16 * 16, 16 * 4) = 1024, 2048, 512 at 1000 a second
    assert [row.dense_ms for row in bound.rows] == pytest.approx([1024, 2048, 512])
    assert [row.sparse_ms for row in bound.rows] == pytest.approx([1024, 1024, 512])
    assert [row.masked for row in bound.rows] == [False, True, False]
    assert [row.share for row in bound.rows] == pytest.approx([1024 / 3584, 2048 / 3584, 512 / 3584])
    assert bound.rows[1].speedup == pytest.approx(2)
    assert bound.speedup == pytest.approx(3584 / 2560)


def test_memory_bound_layers_save_the_bytes_of_their_weights_by_hand():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["0", "2"], device=device(1.0, int8=1000.0))
    # bytes at int8: weights 128, 256, 64 (+ 4 biases of 4); in and out 4 * (8 + 16), 4 * 32, 4 * (16 + 2 * 4 in fp16)
    assert [row.dense_ms for row in bound.rows] == pytest.approx([224e3, 384e3, (64 + 16 + 64 + 32) * 1e3])
    # 2:4 keeps half the weights with 2 bits of index each: 5/8 of the bytes
    assert [row.sparse_ms for row in bound.rows[:2]] == pytest.approx([(80 + 96) * 1e3, (160 + 128) * 1e3])
    assert {row.bound for row in bound.rows} == {"memory"}
    assert bound.sparse_ms == pytest.approx(sum(row.sparse_ms for row in bound.rows))


def test_only_some_layers_run_sparse():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["0", "2"], device=device(1e9, int8=1000.0))
    assert bound.speedup_with(["0"]) == pytest.approx(3584 / (3584 - 512))
    assert bound.speedup_with(["0", "2"]) == pytest.approx(bound.speedup)
    assert bound.speedup_with([]) == 1.0


def test_batch_scales_what_computes():
    model, x = chain()
    one, four = (sparse_bound(model, x, masked=["2"], device=device(1e9, int8=1000.0), batch_size=n) for n in (1, 4))
    assert four.dense_ms == pytest.approx(4 * one.dense_ms)
    assert (one.batch_size, four.batch_size) == (1, 4)


def test_nothing_masked_is_nothing_gained_and_totals_are_the_rooflines():
    model, x = models.resnet18(), torch.zeros(2, 3, 64, 64)
    bound = sparse_bound(model, x, masked=[], device="a100")
    whole = roofline(model, x, device="a100", precision="int8", fused=True)
    assert bound.dense_ms == pytest.approx(whole.least_time_ms)
    assert bound.speedup == 1.0 and all(row.speedup == 1.0 for row in bound.rows)
    assert len(bound.rows) == 21
    every = [row.layer for row in bound.rows if row.layer != "conv1"]
    most = sparse_bound(model, x, masked=every, device="a100")
    assert 1.0 < most.speedup < 2.0
    assert all(1.0 <= row.speedup <= 2.0 for row in most.rows)


def test_attention_stays_dense_and_linear_layers_of_a_transformer_gain():
    bound = sparse_bound(block_net(), torch.zeros(1, 5, 16), masked=["up", "down"], device=device(1e9, int8=1000.0))
    rows = {row.layer: row for row in bound.rows}
    assert rows["attention"].speedup == 1.0
    assert rows["up"].speedup == pytest.approx(2) and rows["down"].speedup == pytest.approx(2)


def test_unknown_costs_are_named():
    bound = sparse_bound(with_opaque(), torch.randn(1, 3, 8, 8), masked=[], device="a100")
    assert bound.unknown == ("odd",)
    document = json.loads(json.dumps(bound.as_dict()))
    assert document["rows"][0]["layer"] == "conv" and document["speedup"] == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(sparse_bound, masked=["9"], device=device(1.0, int8=1000.0)), "'9' is not a layer that runs"),
        (partial(sparse_bound, masked=["2"], device="t4"), "NVIDIA T4 has no peak for int8-2:4"),
        (partial(sparse_bound, masked=["2"], device="a100", batch_size=0), "batch_size must be 1 or more"),
        (partial(what_if, device="t4", precision="bf16"), "no peak for bf16"),
        (partial(what_if, batch_sizes=(0,)), "batch_size"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(RooflineError, match=message):
        call(*chain())


# Text tables.


def cells(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_rows_table_holds_the_rows():
    result = roofline(residual(), torch.randn(2, 4, 8, 8), device="t4", precision="fp32")
    _, _, *body = cells(rows_text(result, top=None))
    assert [line[0] for line in body] == [row.name for row in result.rows]
    assert len(cells(rows_text(result, top=3))) == 5


def test_unknown_layers_are_said():
    result = roofline(with_opaque(), torch.randn(1, 3, 8, 8), device="t4", precision="fp32")
    assert "unknown and not included: odd" in summary_text(result)
    assert [line[2] for line in cells(rows_text(result))[2:]].count("unknown") == 1


def test_other_tables():
    scenarios = what_if(residual(), torch.randn(1, 4, 8, 8), device="t4", batch_sizes=(4,))
    assert [line[0] for line in cells(what_if_text(scenarios))[2:]] == [s.name for s in scenarios]
    assert "no peak for int8-2:4" in what_if_text(scenarios)
    names = [line[0] for line in cells(devices_text())[2:]]
    assert "h200" in names and "orin-nano-8gb" in names
    text = ceilings_text(measure_ceilings(sizes=(16,), copy_bytes=(2**12,), rounds=1, budget_s=0.0))
    assert {"copy", "fp32", "int8"} <= {line[0] for line in cells(text)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 B"), (12.3456, "12.3 B"), (999.0, "999 B"), (1e3, "1 kB"), (4.8e12, "4.8 TB"), (1.979e15, "1.98 PB")],
)
def test_quantities_have_three_figures(value, text):
    assert quantity(value, "B") == text
    assert quantity(None, "B") == "unknown"


def test_empty_table_is_a_table():
    assert table(["a", "b"], []).splitlines() == ["| a   | b   |", "|-----|-----|"]
