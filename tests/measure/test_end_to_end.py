"""Stages from picture to class: what each does, against torch and Pillow, and that they add up; no time is judged."""

import io
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from compress.data.preprocessing import Preprocessing
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY
from compress.measure.end_to_end import (
    STAGES,
    classes,
    decode,
    decoded_pictures,
    for_decoder,
    measure_end_to_end,
    preprocess,
    ready,
    resize_tensor,
)
from compress.measure.latency import RUNS_PER_TURN
from tests.measure.fakes import GivenEngine

PREPROCESSING = Preprocessing(image_size=8, crop_ratio=0.8)
TOLD = {PREPROCESSING_KEY: PREPROCESSING.to_json()}


def pixels(height=20, width=14):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(form="PNG", **size):
    buffer = io.BytesIO()
    Image.fromarray(pixels(**size)).save(buffer, form)
    return buffer.getvalue()


def engine(function=lambda x: x.mean(axis=(2, 3)), **more):
    return GivenEngine(function, **{"shape": (-1, 3, 8, 8), "metadata": TOLD, **more})


@pytest.fixture
def clock(monkeypatch):
    """Time that moves by steps that a test gives: one step a reading."""
    now, steps = [0], []

    def read():
        now[0] += steps.pop(0) if steps else 0
        return now[0]

    monkeypatch.setattr(time, "perf_counter_ns", read)
    return steps


def test_stages_are_cut_where_one_hands_on_to_the_next(clock):
    ns = [(0, 3, 5, 7, 1), (100, 4, 6, 8, 2), (100, 2, 4, 9, 6)]  # between runs 100 ns pass, which belong to none
    clock += [step * 1_000_000 for run in (ns[0], *ns) for step in run]  # the first run of a turn is not counted
    (result,) = measure_end_to_end({"a": engine()}, [encoded()], warmup=0, runs=3, seconds=60)
    assert tuple(result.stage_ms) == STAGES
    assert result.stage_ms == {"decode": 3, "preprocess": 5, "engine": 8, "postprocess": 2}
    assert result.total_ms == 18 and result.share("engine") == pytest.approx(8 / 18)
    assert result.p50_ms == 20 and result.runs == 3  # whole runs took 16, 20 and 21


def test_pixels_need_no_decoding(clock):
    clock += [step * 1_000_000 for _ in range(2) for step in (0, 50, 5, 7, 1)]
    (result,) = measure_end_to_end({"a": engine()}, [pixels()], warmup=0, runs=1, seconds=60)
    assert tuple(result.stage_ms) == STAGES[1:] and result.total_ms == result.p50_ms == 13
    assert result.share("decode") == 0.0 and "pixels in memory" in result.method


def test_engines_take_turns_and_get_what_evaluation_would_give_them():
    calls = []
    pair = {name: engine(label=name, calls=calls) for name in "AB"}
    files = [encoded("JPEG"), encoded(height=11, width=30)]
    results = measure_end_to_end(pair, files, batch_size=3, warmup=1, runs=RUNS_PER_TURN, seconds=60)
    turn = 1 + RUNS_PER_TURN
    assert "".join(name for name, _ in calls) == "AB" + "A" * turn + "B" * turn
    assert [r.label for r in results] == ["A", "B"] and {r.runs for r in results} == {RUNS_PER_TURN}
    expected = preprocess(decode([files[0], files[1], files[0]]), PREPROCESSING, "cpu").numpy()
    assert expected.shape == (3, 3, 8, 8) and not np.array_equal(expected[0], expected[1])
    for _, given_input in calls:
        np.testing.assert_array_equal(given_input, expected)


def test_half_precision_input():
    calls = []
    measure_end_to_end({"a": engine(dtype="float16", calls=calls)}, [pixels()], warmup=0, runs=1)
    assert {array.dtype.name for _, array in calls} == {"float16"}


def test_preprocessing_by_hand():
    """A picture of one colour stays one: (pixel / 255 - mean) / std."""
    image = Image.new("RGB", (12, 30), (255, 0, 51))
    made = preprocess([image], PREPROCESSING, "cpu")
    for channel, value in enumerate((1.0, 0.0, 0.2)):
        expected = (value - PREPROCESSING.mean[channel]) / PREPROCESSING.std[channel]
        torch.testing.assert_close(made[0, channel], torch.full((8, 8), expected))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_on_the_device_is_resizing_by_pillow_but_for_rounding(interpolation):
    image = Image.fromarray(pixels(40, 33))
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    by_torch = resize_tensor(tensor, replace(PREPROCESSING, crop_ratio=0.8, interpolation=interpolation))
    by_pillow = image.resize((10, round(10 * 40 / 33)), Image.Resampling[interpolation.upper()])
    top = round((by_pillow.height - 8) / 2)
    expected = np.asarray(by_pillow)[top : top + 8, 1:9].transpose(2, 0, 1)
    assert by_torch.shape == (3, 8, 8)
    assert np.abs(by_torch.numpy().astype(int) - expected.astype(int)).max() <= 1


@settings(max_examples=40, deadline=None)
@given(arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-50, 50, width=32)))
def test_classes_are_softmax_and_topk(logits):
    found, probabilities = classes(logits)
    expected = torch.softmax(torch.from_numpy(logits), dim=1)
    top = expected.topk(min(5, logits.shape[1]), dim=1).values
    np.testing.assert_allclose(probabilities, top.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.take_along_axis(expected.numpy(), found, 1), probabilities, rtol=1e-5, atol=1e-7)


def test_preprocessing_given_by_the_caller_is_used():
    other = Preprocessing(image_size=4)
    made = measure_end_to_end(
        {"a": engine(shape=(-1, 3, 4, 4), metadata={})}, [pixels()], preprocessing=other, warmup=0, runs=1
    )
    assert made[0].stage_ms.keys() == set(STAGES[1:])


@pytest.mark.parametrize(
    ("error", "message", "engines", "pictures", "more"),
    [
        (EngineError, "no engine", {}, [pixels()], {}),
        (EngineError, "batch_size is 0", {"a": engine()}, [pixels()], {"batch_size": 0}),
        (EngineError, "runs is 0", {"a": engine()}, [pixels()], {"runs": 0}),
        (EngineError, "seconds", {"a": engine()}, [pixels()], {"seconds": 0}),
        (EngineError, "no such GPU", {"a": engine()}, [pixels()], {"device": "tpu"}),
        (EngineError, "does not say how its input is made", {"a": engine(metadata={})}, [pixels()], {}),
        (EngineError, r"takes float32 of \(-1, 3, 9, 9\)", {"a": engine(shape=(-1, 3, 9, 9))}, [pixels()], {}),
        (EngineError, r"takes float32 of \(2, 3, 8, 8\)", {"a": engine(shape=(2, 3, 8, 8))}, [pixels()], {}),
        (EngineError, "takes int64", {"a": engine(dtype="int64")}, [pixels()], {}),
        (DataError, "no pictures", {"a": engine()}, [], {}),
        (DataError, "picture 1 is not a readable", {"a": engine()}, [encoded(), b"GIF?"], {}),
        (DataError, "one kind", {"a": engine()}, [encoded(), pixels()], {}),
        (DataError, r"float64 of shape \(2, 2, 3\)", {"a": engine()}, [np.ones((2, 2, 3))], {}),
    ],
)
def test_refusals(error, message, engines, pictures, more):
    with pytest.raises(error, match=message):
        measure_end_to_end(engines, pictures, **more)


def test_a_gpu_decodes_colour_jpeg_files_alone_and_sees_what_pillow_sees():
    """Torchvision's decoder on the CPU stands in for nvJPEG; it is libjpeg-turbo, as Pillow's is."""
    grey = io.BytesIO()
    Image.fromarray(pixels()[..., 0]).save(grey, "JPEG")
    files = [encoded("JPEG"), encoded("PNG"), grey.getvalue()]
    given = [for_decoder(file) for file in files]
    assert torch.is_tensor(given[0]) and given[1:] == files[1:]
    found = decoded_pictures(given, torch.device("cpu"), 10**6)
    expected = torch.from_numpy(np.array(decode([files[0]])[0])).permute(2, 0, 1)
    assert found[0].shape == expected.shape and (found[0].int() - expected.int()).abs().max() <= 2
    assert [image.mode for image in found[1:]] == ["RGB", "RGB"]
    assert preprocess(found, PREPROCESSING, "cpu").shape == (3, 3, 8, 8)
    levels = 255 * (preprocess(found[:1], PREPROCESSING, "cpu") - preprocess(decode(files[:1]), PREPROCESSING, "cpu"))
    assert (levels * torch.tensor(PREPROCESSING.std).view(3, 1, 1)).abs().max() < 3.5  # decoder and resizing
    assert ready(files, torch.device("cpu")) == files
