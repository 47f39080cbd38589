# Studies stay runnable: every module is imported, and every study has its page and its row in the index.

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from analysis.cuda_engine.report import REASONS, device_of, reason, roofs
from analysis.engine_check.run import ask
from analysis.random_networks import check
from analysis.random_networks.check import TARGETS, failure_of
from analysis.random_networks.network import OPERATIONS, Step, steps_of
from analysis.text.lines import HEIGHT, WIDTH, decode, lines
from tests.further import further

ANALYSIS = Path(__file__).parents[2] / "analysis"
OPTIONAL = {"fvcore", "nncf", "modelopt", "pytorch_quantization", "timm", "triton", "tensorrt_rtx", "cosmic_ray"}
MODULES = sorted(f"analysis.{p.parent.name}.{p.stem}" for p in ANALYSIS.glob("*/*.py"))
STUDIES = sorted(p.parent.name for p in ANALYSIS.glob("*/run.py"))


@pytest.mark.parametrize("module", MODULES)
def test_a_study_can_be_imported(module):
    # A name that compress no longer has would otherwise show only when the study is run again.
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_a_page_with_its_command_and_a_row_in_the_index(study):
    page = (ANALYSIS / study / "README.md").read_text()
    assert f"python -m analysis.{study}.run" in page
    assert f"]({study}/README.md)" in (ANALYSIS / "README.md").read_text()


@pytest.mark.parametrize("page", [ANALYSIS / "README.md", *sorted(ANALYSIS.glob("*/README.md"))], ids=str)
def test_links_of_a_page_exist(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


# The page of the engine's layers names what keeps each from its roof.


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


# Every layer that the audit calls INT8 is INT8 in the engine, in networks of which engines compute a part in float.


def conv(inputs=16, outputs=16, kernel=3, **keys):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **keys)


def around(layer, rank=2):
    first, last = (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, 16, 3, padding=1),
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](16, 8, 3),
    )
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[rank - 1](1)
    return nn.Sequential(first, nn.ReLU(), layer, nn.ReLU(), last, pool)


NETWORKS = {
    "BatchNorm after ReLU": lambda: nn.Sequential(
        conv(3), nn.ReLU(), nn.BatchNorm2d(16), conv(), nn.ReLU(), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1)
    ),
    "transposed": lambda: around(nn.ConvTranspose2d(16, 16, 2, 2)),
    "transposed, two groups": lambda: around(nn.ConvTranspose2d(16, 16, 2, 2, groups=2)),
    "transposed, depthwise": lambda: around(nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=16)),
    "one dimension": lambda: around(nn.ConvTranspose1d(16, 16, 2, 2), 1),
    "three dimensions": lambda: around(nn.ConvTranspose3d(16, 16, 2, 2), 3),
}


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", further(NETWORKS, ["BatchNorm after ReLU", "transposed, two groups"]))
def test_the_engine_computes_what_the_audit_says(name, target, tmp_path):
    network = NETWORKS[name]().eval()
    x = torch.randn(2, 3, *(12,) * {"one dimension": 1, "three dimensions": 3}.get(name, 2))
    answer = ask(network, x, target, tmp_path)
    assert answer.int8 and not answer.lost


# Random networks keep their results through quantization and export, by the float network and ONNX Runtime.


@pytest.mark.parametrize("first", further(range(0, 150, 25), [0]))
def test_random_networks_keep_their_results(first):
    failures = {
        seed: (failure, steps_of(seed))
        for seed in range(first, first + 25)
        if (failure := failure_of(steps_of(seed), TARGETS[seed % 3], export=seed == first))
    }
    assert not failures


def test_the_check_sees_a_wrong_result(monkeypatch):
    # A network that is quantized with a range a thousand times too small is a failure.
    def coarse(*args, **options):
        qmodel = real(*args, **options)
        for _, quantizer in check.quantizers(qmodel):
            quantizer.set_amax(quantizer.amax / 1000)
        return qmodel

    real = check.quantize
    steps = (Step("conv bn relu", 1), Step("residual", 2))
    assert not failure_of(steps, "openvino", export=False)
    monkeypatch.setattr(check, "quantize", coarse)
    assert "dB" in failure_of(steps, "openvino", export=False)


def test_every_operation_is_drawn():
    assert {step.name for seed in range(2000) for step in steps_of(seed)} == set(OPERATIONS)


# Truth and scores of the study on text: a decoded line is the one that was coded.


@given(codes=st.lists(st.integers(1, 5), max_size=10), repeats=st.lists(st.integers(1, 3), min_size=10, max_size=10))
def test_a_best_path_is_decoded(codes, repeats):
    # Each code some times in a row and a blank after it, as a network may say it.
    path = [part for code, count in zip(codes, repeats, strict=False) for part in [*[code] * count, 0]]
    assert decode(np.eye(6)[path].reshape(-1, 6), "abcde") == "".join("abcde"[code - 1] for code in codes)


def test_lines_are_drawn_alike_each_time():
    fonts = Path("/usr/share/fonts")
    if not list(fonts.rglob("Noto*CJK-*.ttc")) or not list(fonts.rglob("DejaVuSans*.ttf")):
        pytest.skip("needs Debian's fonts-dejavu-core and fonts-noto-cjk")
    first, second = (lines(8, seed=3, fonts=fonts) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.text == b.text and np.array_equal(a.image, b.image)
        assert a.image.shape[:2] == (3, HEIGHT) and a.image.shape[2] >= WIDTH and np.ptp(a.image) > 0.5
