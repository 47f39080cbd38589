"""Bounds of 2:4 on a device with round numbers, and properties that hold for any network."""

import json

import pytest
import torch
from torch import nn
from torchvision import models

from compress import roofline
from compress.errors import RooflineError
from compress.roofline_model import Device, sparse_bound
from tests.roofline_model.networks import Block, WithOpaque


def device(bandwidth):
    return Device(
        name="toy",
        title="Toy",
        bandwidth_bytes_per_s=bandwidth,
        dense_flops_per_s={"int8": 1000.0},
        sparse_flops_per_s={"int8": 2000.0},
        source="a test",
    )


def chain():
    """8 -> 16 -> 16 -> 4 channels, 1x1, no biases, on 2x2 pictures."""
    layers = [nn.Conv2d(8, 16, 1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 4, 1)]
    return nn.Sequential(*layers), torch.zeros(1, 8, 2, 2)


def test_compute_bound_layers_halve_by_hand():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["2"], device=device(1e9))
    # flops: 2 * 4 pixels * (8 * 16, 16 * 16, 16 * 4) = 1024, 2048, 512 at 1000 a second
    assert [row.dense_ms for row in bound.rows] == pytest.approx([1024, 2048, 512])
    assert [row.sparse_ms for row in bound.rows] == pytest.approx([1024, 1024, 512])
    assert [row.masked for row in bound.rows] == [False, True, False]
    assert [row.share for row in bound.rows] == pytest.approx([1024 / 3584, 2048 / 3584, 512 / 3584])
    assert bound.rows[1].speedup == pytest.approx(2)
    assert bound.speedup == pytest.approx(3584 / 2560)


def test_memory_bound_layers_save_the_bytes_of_their_weights_by_hand():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["0", "2"], device=device(1.0))
    # bytes at int8: weights 128, 256, 64 (+ 4 biases of 4); in and out 4 * (8 + 16), 4 * 32, 4 * (16 + 2 * 4 in fp16)
    assert [row.dense_ms for row in bound.rows] == pytest.approx([224e3, 384e3, (64 + 16 + 64 + 32) * 1e3])
    # 2:4 keeps half the weights with 2 bits of index each: 5/8 of the bytes
    assert [row.sparse_ms for row in bound.rows[:2]] == pytest.approx([(80 + 96) * 1e3, (160 + 128) * 1e3])
    assert {row.bound for row in bound.rows} == {"memory"}
    assert bound.sparse_ms == pytest.approx(sum(row.sparse_ms for row in bound.rows))


def test_only_some_layers_run_sparse():
    model, x = chain()
    bound = sparse_bound(model, x, masked=["0", "2"], device=device(1e9))
    assert bound.speedup_with(["0"]) == pytest.approx(3584 / (3584 - 512))
    assert bound.speedup_with(["0", "2"]) == pytest.approx(bound.speedup)
    assert bound.speedup_with([]) == 1.0


def test_batch_scales_what_computes():
    model, x = chain()
    one, four = (sparse_bound(model, x, masked=["2"], device=device(1e9), batch_size=n) for n in (1, 4))
    assert four.dense_ms == pytest.approx(4 * one.dense_ms)
    assert (one.batch_size, four.batch_size) == (1, 4)


def test_nothing_masked_is_nothing_gained_and_totals_are_the_rooflines():
    torch.manual_seed(0)
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
    bound = sparse_bound(Block(), torch.zeros(1, 5, 16), masked=["up", "down"], device=device(1e9))
    rows = {row.layer: row for row in bound.rows}
    assert rows["attention"].speedup == 1.0
    assert rows["up"].speedup == pytest.approx(2) and rows["down"].speedup == pytest.approx(2)


def test_unknown_costs_are_named():
    bound = sparse_bound(WithOpaque(), torch.randn(1, 3, 8, 8), masked=[], device="a100")
    assert bound.unknown == ("odd",)
    document = json.loads(json.dumps(bound.as_dict()))
    assert document["rows"][0]["layer"] == "conv" and document["speedup"] == 1.0


def test_what_cannot_be_is_refused():
    model, x = chain()
    with pytest.raises(RooflineError, match="'9' is not a layer that runs"):
        sparse_bound(model, x, masked=["9"], device=device(1.0))
    with pytest.raises(RooflineError, match="NVIDIA T4 has no peak for int8-2:4"):
        sparse_bound(model, x, masked=["2"], device="t4")
    with pytest.raises(RooflineError, match="batch_size must be 1 or more"):
        sparse_bound(model, x, masked=["2"], device="a100", batch_size=0)
