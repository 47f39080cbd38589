"""Options as text, profiles, and which compute capabilities are built for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.engines.base import TensorInfo
from compress.engines.tensorrt.options import (
    TensorRTOptions,
    check_admitted,
    choose_sms,
    parse_options,
    profiles_of,
)
from compress.errors import EngineError

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
