"""Records of measured roofs, on tiny sizes; no test depends on a time."""

import json

import pytest
import torch

from compress.errors import RooflineError
from compress.roofline_model import (
    Ceiling,
    Ceilings,
    Sample,
    ceilings_path,
    find_device,
    load_ceilings,
    measure_ceilings,
)


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
