"""Commands for other machines hold the flags of each version, and none that the version has dropped."""

import shlex

import pytest

from compress.engines.onnx_file import read_onnx
from compress.engines.tensorrt.commands import build_commands, commands_markdown
from compress.engines.tensorrt.options import parse_options
from tests.engines.models import classifier

OPTIONS = {"sm": "89,120", "batch": "1,4,16", "sparse": "yes", "workspace_mib": "64", "optimization_level": "5"}


@pytest.fixture
def commands(tmp_path):
    file = read_onnx(classifier(tmp_path / "my net.onnx"))
    return build_commands(file, parse_options({**OPTIONS, "hardware": "ampere-plus", "refit": "yes"}))


def words(commands, target, program, purpose="build"):
    (found,) = [c for c in commands if c.target == target and c.purpose == purpose and program in c.words]
    assert shlex.split(found.text().replace("\\\n", " ")) == list(found.words)  # what a shell makes of it
    return list(found.words)


def test_trtexec_of_version_10_is_told_to_be_strongly_typed_and_11_is_not(commands):
    ten, eleven = words(commands, "TensorRT 10", "trtexec"), words(commands, "TensorRT 11", "trtexec")
    assert [word for word in ten if word not in eleven] == ["--stronglyTyped"]
    assert {
        "--onnx=my net.onnx",
        "--minShapes=input:1x3x8x8",
        "--optShapes=input:4x3x8x8",
        "--maxShapes=input:16x3x8x8",
        "--memPoolSize=workspace:64M",
        "--sparsity=enable",
        "--builderOptimizationLevel=5",
        "--refit",
        "--hardwareCompatibilityLevel=ampere+",
        "--profilingVerbosity=detailed",
    } <= set(eleven)


def test_no_command_names_a_precision(commands):
    flags = {word.partition("=")[0] for command in commands for word in command.words}
    assert not flags & {"--fp16", "--int8", "--bf16", "--fp8", "--best", "--calib", "--precisionConstraints"}


def test_rtx_names_compute_capabilities_and_keeps_no_timing_cache(commands):
    tool = words(commands, "TensorRT-RTX", "tensorrt_rtx")
    assert "--computeCapabilities=89,120" in tool
    assert not [word for word in tool if "iming" in word or "ardware" in word]
    polygraphy = words(commands, "TensorRT-RTX", "polygraphy")
    assert polygraphy[0] == "POLYGRAPHY_USE_TENSORRT_RTX=1"
    at = polygraphy.index("--compute-capabilities")
    assert polygraphy[at + 1 : at + 3] == ["8.9", "12.0"]


def test_polygraphy_takes_shapes_in_brackets(commands):
    ten = words(commands, "TensorRT 10", "polygraphy")
    assert ten[ten.index("--trt-max-shapes") + 1] == "input:[16,3,8,8]"
    assert "--strongly-typed" in ten
    assert "--strongly-typed" not in words(commands, "TensorRT 11", "polygraphy")
    assert words(commands, "TensorRT 11", "polygraphy", "compare")[-1] == "input:[4,3,8,8]"


def test_a_static_file_gets_no_shapes(tmp_path):
    file = read_onnx(classifier(tmp_path / "m.onnx", batch=2))
    for command in build_commands(file, parse_options({})):
        assert not [word for word in command.words if "hapes" in word or "shapes" in word]


def test_the_page_holds_every_command(commands):
    page = commands_markdown([("m.onnx", commands)])
    assert page.count("```sh") == 3
    assert all(command.text() in page for command in commands)
