# Devices against the figures of the makers' data sheets, typed in a second time.

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RooflineError
from compress.roofline_model import (
    DEVICE_NAMES,
    PRECISIONS,
    TABLE,
    Ceiling,
    Ceilings,
    Device,
    Sample,
    ceilings_path,
    find_device,
    load_ceilings,
    measure_ceilings,
)
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
    "raspberry-pi-5": (4267 * 4 / 1e3, 4 * 2.4 * 2 * 2 * 4 / 1e3, 4 * 2.4 * 2 * 2 * 16 / 1e3),
    "cortex-x3": (8.4 * 8, 3.2 * 4 * 2 * 4 / 1e3, 3.2 * 4 * 2 * 32 / 1e3),
    "xeon-8592": (8 * 5.6 * 8, 64 * 3.9 * 2 * 2 * 16 / 1e3, 64 * 3.9 * 2 * 16 * 64 / 1e3),
}
# name: (GB/s, dense int8 TOPS), which is all that their makers publish.
ACCELERATORS = {"orin-dla": (204.8, 105 / 2 / 2), "hexagon-x-elite": (136, 45)}


def test_table_holds_the_devices_of_the_sheets():
    assert {d.name for d in TABLE} == {*SHEETS, *PROCESSORS, *ACCELERATORS}
    assert set(DEVICE_NAMES) == {*SHEETS, *PROCESSORS, *ACCELERATORS, "machine"}
    for name, (bandwidth, int8) in ACCELERATORS.items():
        found = find_device(name)
        assert (found.bandwidth_bytes_per_s, found.dense_flops_per_s) == (bandwidth * 1e9, {"int8": int8 * 1e12})


@pytest.mark.parametrize("name", PROCESSORS)
def test_peaks_of_processors_are_cores_times_clock(name):
    bandwidth, fp32, int8 = PROCESSORS[name]
    device = find_device(name)
    assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9, rel=0.01)
    assert device.peak_flops_per_s("fp32") == pytest.approx(fp32 * 1e12)
    assert device.peak_flops_per_s("int8") == pytest.approx(int8 * 1e12)
    assert ("turbo" in device.note and "Intel" in device.source) or "Arm's Software Optimization Guide" in device.source
    assert ("bf16" in device.precisions) == (name in ("xeon-8480", "xeon-8592"))  # AMX began with Sapphire Rapids


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


# Records of measured roofs, on tiny sizes; no test depends on a time.


@pytest.fixture(scope="module")
def measured():
    return measure_ceilings(sizes=(32, 64), copy_bytes=(2**16,), rounds=2, budget_s=0.002)


def made(**rates):
    roofs = [("copy", "bytes/s"), *((n, "flops/s") for n in rates if n != "copy")]
    samples = (Sample(size=4, rate=1.0, arithmetic_intensity=2.0),)
    return Ceilings(
        backend="cpu",
        title="A processor",
        threads=2,
        rounds=1,
        torch_version="2",
        load_average=(0.1, 0.2),
        ceilings=tuple(Ceiling(name=n, rate=rates.get(n), unit=u, method="m", samples=samples) for n, u in roofs),
    )


def test_every_roof_is_there_or_says_why_not(measured):
    by_name = {c.name: c for c in measured.ceilings}
    assert set(by_name) == {"copy", "fp32", "bf16", "fp16", "int8", "fp32 conv", "bf16 conv"}
    for ceiling in measured.ceilings:
        if ceiling.rate is None:
            assert ceiling.reason
        else:
            assert ceiling.rate == max(s.rate for s in ceiling.samples) > 0
    assert [s.size for s in by_name["fp32"].samples] == [32, 64]
    assert by_name["copy"].unit == "bytes/s"
    assert (measured.backend, measured.rounds, measured.threads) == ("cpu", 2, torch.get_num_threads())


def test_precision_of_float32_products_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        measure_ceilings(sizes=(16,), copy_bytes=(2**12,), rounds=1, budget_s=0.0)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_ceilings_become_a_device():
    device = made(**{"copy": 10.0, "fp32": 100.0, "int8": 400.0, "int8-2:4": 500.0, "fp16": None}).as_device()
    assert device.bandwidth_bytes_per_s == 10.0
    assert device.precisions == ("fp32", "int8", "int8-2:4")
    assert device.ridge_point("int8") == 40.0
    assert "measured here" in device.source


def test_the_faster_of_both_kernels_is_the_roof():
    device = made(**{"copy": 10.0, "fp32": 100.0, "fp32 conv": 120.0, "bf16 conv": 7.0, "bf16": 9.0}).as_device()
    assert dict(device.dense_flops_per_s) == {"fp32": 120.0, "bf16": 9.0}


def test_intensities_by_hand(measured):
    by_name = {c.name: c for c in measured.ceilings}
    # Side n: 2 n^3 flops over three matrices of 4 bytes; int8: two of 1 byte and sums of 4.
    assert by_name["fp32"].samples[0].arithmetic_intensity == pytest.approx(2 * 32**3 / (3 * 32**2 * 4))
    assert by_name["int8"].samples[0].arithmetic_intensity == pytest.approx(2 * 32**3 / (6 * 32**2))
    conv = by_name["fp32 conv"].samples[0]
    pixels, c = 28 * 28, conv.size
    assert conv.arithmetic_intensity == pytest.approx(18 * c * c * pixels / (4 * (9 * c * c + 2 * c * pixels)))


def test_written_and_read_back(measured, tmp_path):
    path = measured.save(tmp_path / "deep" / "ceilings.json")
    assert load_ceilings(path) == measured
    assert json.loads(path.read_text())["title"] == measured.title


def test_machine_is_what_was_saved(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RooflineError, match="roofline --measure"):
        find_device("machine")
    assert made(copy=5.0, fp32=7.0).save() == ceilings_path("cpu") == tmp_path / "compress" / "ceilings-cpu.json"
    assert find_device("Machine").peak_flops_per_s("fp32") == 7.0
    with pytest.raises(RooflineError, match="A processor has no peak for int8; it has fp32"):
        find_device("machine").peak_flops_per_s("int8")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ceilings": [{"name": 1}]}', "\x00"])
def test_files_that_hold_no_ceilings_are_refused(text, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(RooflineError, match="holds no ceilings"):
        load_ceilings(path)


def test_missing_file_and_missing_copies_are_refused(tmp_path):
    with pytest.raises(RooflineError, match="holds no ceilings"):
        load_ceilings(tmp_path / "none.json")
    with pytest.raises(RooflineError, match="no copy bandwidth"):
        made(fp32=1.0).as_device()


def test_bad_settings_are_refused(monkeypatch):
    with pytest.raises(RooflineError, match="'cpu' or 'cuda', got 'tpu'"):
        measure_ceilings("tpu")
    for options in ({"sizes": (0,)}, {"copy_bytes": (-4,)}, {"rounds": 0}):
        with pytest.raises(RooflineError, match="must be positive"):
            measure_ceilings(**options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RooflineError, match="no CUDA GPU"):
        measure_ceilings("cuda")
