"""Devices against the figures of the makers' data sheets, typed in a second time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RooflineError
from compress.roofline_model import DEVICE_NAMES, PRECISIONS, TABLE, Device, find_device
from compress.roofline_model.devices import parse_precision

# name: (GB/s, dense fp16 TFLOPS, dense int8 TOPS); half of the sparse figure if the data sheet has no other.
SHEETS = {
    "t4": (320, 65, 130),
    "a10": (600, 125, 250),
    "a100-40gb": (1555, 312, 624),
    "a100-80gb": (2039, 312, 624),
    "l4": (300, 242 / 2, 485 / 2),
    "l40s": (864, 362.05, 733),
    "rtx3090": (936, 71, 284),
    "rtx4090": (1008, 165.2, 660.6),
    "rtx5080": (960, 112.6, 450.2),
    "rtx5090": (1792, 209.5, 838),
    "h100-sxm": (3350, 1979 / 2, 3958 / 2),
    "h100-pcie": (2000, 1513 / 2, 3026 / 2),
    "h200": (4800, 1979 / 2, 3958 / 2),
    "b200": (7700, 4500 / 2, 9000 / 2),
    "orin-agx-64gb": (204.8, 170 / 4, 170 / 2),
    "orin-nx-16gb": (102.4, 60 / 4, 60 / 2),
    "orin-nano-8gb": (68, 40 / 4, 40 / 2),
    "thor-t5000": (273, 2070 / 8, 2070 / 4),
}
# name: (GB/s, dense fp32 TFLOPS, dense int8 TOPS) of one socket: channels x MT/s x 8; cores x GHz x operations a clock.
PROCESSORS = {
    "xeon-8380": (8 * 3.2 * 8, 40 * 3.4 * 2 * 2 * 16 / 1e3, 40 * 3.4 * 2 * 2 * 64 / 1e3),
    "xeon-8480": (8 * 4.8 * 8, 56 * 3.8 * 2 * 2 * 16 / 1e3, 56 * 3.8 * 2 * 16 * 64 / 1e3),
    "xeon-8592": (8 * 5.6 * 8, 64 * 3.9 * 2 * 2 * 16 / 1e3, 64 * 3.9 * 2 * 16 * 64 / 1e3),
}


def test_table_holds_the_devices_of_the_sheets():
    assert {d.name for d in TABLE} == {*SHEETS, *PROCESSORS}
    assert set(DEVICE_NAMES) == {*SHEETS, *PROCESSORS, "machine"}


@pytest.mark.parametrize("name", PROCESSORS)
def test_peaks_of_processors_are_cores_times_clock(name):
    bandwidth, fp32, int8 = PROCESSORS[name]
    device = find_device(name)
    assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert device.peak_flops_per_s("fp32") == pytest.approx(fp32 * 1e12)
    assert device.peak_flops_per_s("int8") == pytest.approx(int8 * 1e12)
    assert "turbo" in device.note and "Intel" in device.source
    assert ("bf16" in device.precisions) == (name != "xeon-8380")  # AMX began with Sapphire Rapids


@pytest.mark.parametrize("name", SHEETS)
def test_dense_peaks_are_those_of_the_sheet(name):
    bandwidth, fp16, int8 = SHEETS[name]
    device = find_device(name)
    assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert device.peak_flops_per_s("fp16") == pytest.approx(fp16 * 1e12)
    assert device.peak_flops_per_s("int8") == pytest.approx(int8 * 1e12)
    assert device.ridge_point("int8") == pytest.approx(int8 * 1e12 / (bandwidth * 1e9))
    assert device.source


@pytest.mark.parametrize("device", TABLE, ids=lambda d: d.name)
def test_sparse_peaks_are_twice_the_dense_ones(device):
    for precision, peak in device.sparse_flops_per_s.items():
        assert peak == pytest.approx(2 * device.dense_flops_per_s[precision], rel=0.02)
    assert set(device.dense_flops_per_s) <= set(PRECISIONS)


def test_what_turing_and_ampere_lack():
    assert find_device("t4").precisions == ("fp32", "fp16", "int8")
    assert "fp8" not in find_device("a100").dense_flops_per_s
    assert {"fp8", "fp8-2:4"} <= set(find_device("l4").precisions)


def test_short_names_and_spelling():
    assert find_device("A100").name == "a100-80gb"
    assert find_device("H100").name == "h100-sxm"
    assert find_device("Xeon 8480+").name == "xeon-8480" and find_device("AGX Thor").name == "thor-t5000"
    assert find_device("Orin AGX").name == find_device("orin").name == "orin-agx-64gb"
    own = Device(name="x", title="X", bandwidth_bytes_per_s=1.0, dense_flops_per_s={"fp32": 1.0}, source="a test")
    assert find_device(own) is own


def test_unknown_device_names_the_list_and_near_misses():
    with pytest.raises(RooflineError, match=r"did you mean 'h200'.*Allowed: t4, .*machine"):
        find_device("h2000")
    with pytest.raises(RooflineError, match=r"unknown device 'zzz'\. Allowed: t4"):
        find_device("zzz")


def test_missing_precision_says_which_there_are():
    with pytest.raises(RooflineError, match=r"NVIDIA T4 has no peak for bf16; it has fp32, fp16, int8"):
        find_device("t4").peak_flops_per_s("bf16")
    with pytest.raises(RooflineError, match="no peak for int8-2:4"):
        find_device("t4").ridge_point("int8-2:4")


@pytest.mark.parametrize("name", ["int9", "", "2:4", "int8-4:8", "-2:4"])
def test_unknown_precision_is_refused(name):
    with pytest.raises(RooflineError, match="unknown precision"):
        parse_precision(name)


@given(st.sampled_from(sorted(PRECISIONS)), st.booleans())
def test_precision_names_read_back(base, sparse):
    precision = parse_precision(base + "-2:4" * sparse)
    assert precision.name == base + "-2:4" * sparse
    assert parse_precision(precision.name.upper()) == precision
    # Half the values, each with an index of 2 bits.
    assert precision.sparse_weight_bytes * 8 == PRECISIONS[base] * 8 / 2 + 1
    assert precision.float_bytes >= precision.bytes_per_element
