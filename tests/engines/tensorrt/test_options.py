import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.engines.base import TensorInfo, read_onnx
from compress.engines.tensorrt.build import build_commands, commands_markdown
from compress.engines.tensorrt.options import TensorRTOptions, check_admitted, choose_sms, parse_options, profiles_of
from compress.errors import EngineError
from tests.engines.models import classifier

IMAGE = TensorInfo(name="input", dtype="float32", shape=(-1, 3, 224, 224))
RTX = (75, 80, 86, 89, 120, 121)


def test_text_becomes_numbers():
    options = parse_options(
        {"sm": "89, sm120", "batch": "1,4,16", "workspace_mib": "64", "sparse": "yes", "device": "cuda:1"}
    )
    assert (options.sms, options.batch, options.workspace_mib) == ((89, 120), (1, 4, 16), 64)
    assert (options.sparse, options.device) == (True, 1)
    assert parse_options({}, batch_size=7).batch == (7, 7, 7)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"batsh": "8"}, "unknown option 'batsh', did you mean 'batch'"),
        ({"sm": "8.9"}, "numbers with commas"),
        ({"sm": "89,89"}, "numbers that differ"),
        ({"batch": "8,1,32"}, "do not fall"),
        ({"batch": "1,8"}, "three numbers"),
        ({"size": "0,1,2"}, "do not fall"),
        ({"workspace_mib": "0"}, "1 or more"),
        ({"workspace_mib": "1,2"}, "one number"),
        ({"optimization_level": "6"}, "0 to 5"),
        ({"hardware": "ampere"}, "ampere-plus"),
        ({"refit": "maybe"}, "yes or no"),
        ({"device": "gpu"}, "cuda:0"),
    ],
)
def test_bad_options_are_refused(given_, message):
    with pytest.raises(EngineError, match=message):
        parse_options(given_)


def test_profiles_close_what_is_open():
    open_size = TensorInfo(name="x", dtype="float32", shape=(-1, 3, -1, -1))
    options = TensorRTOptions(batch=(1, 2, 4), size=(64, 96, 128))
    profile = profiles_of((open_size,), options, where="m.onnx")["x"]
    assert (profile.min, profile.opt, profile.max) == ((1, 3, 64, 64), (2, 3, 96, 96), (4, 3, 128, 128))
    fixed = TensorInfo(name="x", dtype="float32", shape=(2, 5))
    assert set(vars(profiles_of((fixed,), options, where="m.onnx")["x"]).values()) == {(2, 5)}


@pytest.mark.parametrize(
    ("shape", "message"),
    [((-1, 3, -1, 64), "dimension 2 .* give size="), ((-1, -1), "dimension 1 .* export it fixed")],
)
def test_an_open_dimension_that_nothing_closes_is_refused(shape, message):
    with pytest.raises(EngineError, match=message):
        profiles_of((TensorInfo(name="x", dtype="float32", shape=shape),), TensorRTOptions(), where="m.onnx")


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(0, 100))
def test_a_profile_admits_what_lies_between(a, b, c, batch):
    low, best, high = sorted((a, b, c))
    profile = profiles_of((IMAGE,), TensorRTOptions(batch=(low, best, high)), where="m.onnx")["input"]
    shape = (batch, 3, 224, 224)
    assert profile.admits(shape) == (batch in range(low, high + 1))
    assert not profile.admits((best, 3, 224, 225))
    assert not profile.admits((best, 3, 224))


def test_a_batch_beyond_the_profile_names_the_build_that_admits_it():
    profile = profiles_of((IMAGE,), TensorRTOptions(batch=(1, 8, 32)), where="m.onnx")["input"]
    check_admitted("input", (32, 3, 224, 224), profile, label="e")
    with pytest.raises(EngineError, match=r"\(64, 3, 224, 224\).*batch=1,64,64"):
        check_admitted("input", (64, 3, 224, 224), profile, label="e")
    with pytest.raises(EngineError, match="build it for that size"):
        check_admitted("input", (8, 3, 192, 192), profile, label="e")


def test_compute_capabilities():
    assert choose_sms(TensorRTOptions(), RTX, None, title="T") == (80, 86, 89, 120)
    assert choose_sms(TensorRTOptions(), RTX, 86, title="T") == (86,)
    assert choose_sms(TensorRTOptions(), RTX, 90, title="T") == (80, 86, 89, 120)  # none of its own: the portable one
    assert choose_sms(TensorRTOptions(sms=(120, 89)), RTX, 86, title="T") == (89, 120)
    with pytest.raises(EngineError, match="SM 90 needs TensorRT itself"):
        choose_sms(TensorRTOptions(sms=(89, 90)), RTX, None, title="T")


# Commands for other machines hold the flags of each version, and none that the version has dropped.

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
