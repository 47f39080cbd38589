"""Top-1 and top-5 against scikit-learn; batches of every shape; what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import top_k_accuracy_score

from compress import build_engine, export_onnx, measure_accuracy
from compress.data.preprocessing import Preprocessing
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY
from compress.measure.accuracy import target_ranks
from tests.engines.models import classifier, images
from tests.measure.fakes import GivenEngine, Listener


def batches(logits, targets, size):
    return [(logits[i : i + size], targets[i : i + size]) for i in range(0, len(logits), size)]


@settings(deadline=None)
@given(count=st.integers(1, 30), classes=st.integers(6, 12), size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_top_k_is_scikit_learns(count, classes, size, seed):
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.arange(count * classes, dtype=np.float32)).reshape(count, classes)
    targets = rng.integers(0, classes, count)
    seen = measure_accuracy(GivenEngine(lambda x: x, shape=(-1, classes)), batches(logits, targets, size))
    labels = np.arange(classes)
    assert seen.top1 == pytest.approx(top_k_accuracy_score(targets, logits, k=1, labels=labels))
    assert seen.top5 == pytest.approx(top_k_accuracy_score(targets, logits, k=5, labels=labels))
    assert seen.images == count
    assert seen.notes == ()


@given(hnp.arrays(np.float32, (7, 6), elements=st.integers(0, 2).map(float)), st.integers(0, 5))
def test_equal_logits_stand_as_argmax_takes_them(logits, target):
    ranks = target_ranks(logits, np.full(7, target))
    np.testing.assert_array_equal(ranks == 0, logits.argmax(axis=1) == target)
    everything = np.stack([target_ranks(logits, np.full(7, c)) for c in range(6)], axis=1)
    np.testing.assert_array_equal(np.sort(everything, axis=1), np.tile(np.arange(6), (7, 1)))


@pytest.mark.parametrize("size", [1, 3, 4, 5, 9])
def test_a_fixed_batch_is_padded_and_cut(size):
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((9, 5)).astype(np.float32), rng.integers(0, 5, 9)
    engine = GivenEngine(lambda x: x + len(x), shape=(4, 5))
    seen = measure_accuracy(engine, batches(logits, targets, size), keep_logits=True)
    assert {array.shape for _, array in engine.calls} == {(4, 5)}
    np.testing.assert_array_equal(seen.logits, logits + 4)
    assert seen.top1 == np.mean(logits.argmax(1) == targets)
    assert seen.images == 9


def test_tensors_a_limit_and_progress():
    logits, targets = torch.eye(5).repeat(4, 1), torch.arange(5).repeat(4)
    engine, listener = GivenEngine(lambda x: x, shape=(-1, 5)), Listener()
    seen = measure_accuracy(engine, batches(logits, targets, 6), limit=8, keep_logits=True, progress=listener)
    assert (seen.top1, seen.images, seen.logits.shape, seen.logits.dtype) == (1.0, 8, (8, 5), np.float32)
    assert [len(array) for _, array in engine.calls] == [6, 2]
    assert (listener.total, listener.advanced, listener.finished) == (4, 2, True)
    unsized = measure_accuracy(engine, iter(batches(logits, targets, 6)))
    assert (unsized.images, unsized.logits) == (20, None)


def test_few_classes_are_noted():
    logits = np.eye(3, dtype=np.float32)
    seen = measure_accuracy(GivenEngine(lambda x: x, shape=(-1, 3)), [(logits, np.array([0, 0, 2]))])
    assert (seen.top1, seen.top5) == (pytest.approx(2 / 3), 1.0)
    assert "3 classes" in seen.notes[0]


PREPARED = Preprocessing(image_size=8)


def test_other_preprocessing_is_refused(tmp_path):
    path = classifier(tmp_path / "m.onnx", metadata={PREPROCESSING_KEY: PREPARED.to_json()})
    data = [(images(3), np.zeros(3, np.int64))]
    with build_engine(path, "onnxruntime") as engine:
        assert measure_accuracy(engine, data, preprocessing=PREPARED).notes == ()
        other = dataclasses.replace(PREPARED, mean=(0.5, 0.5, 0.5), channels="BGR")
        with pytest.raises(DataError, match=r"mean: \(0.485.*channels: RGB"):
            measure_accuracy(engine, data, preprocessing=other)
        assert measure_accuracy(engine, data).notes == ()


def test_missing_preprocessing_is_noted_and_broken_refused():
    data = [(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))]
    ones = lambda x: np.ones((len(x), 6), np.float32)  # noqa: E731
    assert "could not be checked" in measure_accuracy(GivenEngine(ones), data, preprocessing=PREPARED).notes[0]
    with pytest.raises(DataError, match="not readable"):
        measure_accuracy(GivenEngine(ones, metadata={PREPROCESSING_KEY: "[1"}), data, preprocessing=PREPARED)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_results_that_are_not_finite_name_the_image(value):
    logits = np.zeros((10, 5), np.float32)
    logits[7, 2] = value
    targets = np.zeros(10, np.int64)
    with pytest.raises(EngineError, match="logits of image 7"):
        measure_accuracy(GivenEngine(lambda x: x, shape=(-1, 5)), batches(logits, targets, 4))


def test_padding_may_be_nan():
    engine = GivenEngine(lambda x: np.where(x.any(1, keepdims=True), x, np.nan), shape=(4, 5))
    assert measure_accuracy(engine, [(np.ones((3, 5), np.float32), np.zeros(3, np.int64))]).images == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no image"),
        ([np.zeros((2, 5), np.float32)], "pairs of images and targets"),
        ([(np.zeros((2, 5), np.float32), np.zeros(3, np.int64))], "2 images and 3 targets"),
        ([(np.zeros((2, 5), np.float32), np.zeros(2, np.float32))], "targets are float32"),
        ([(np.zeros((2, 5), np.float32), np.array([0, 5]))], "target of image 1 is 5"),
        ([(np.zeros((2, 5), np.float32), np.array([-1, 0]))], "target of image 0 is -1"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        measure_accuracy(GivenEngine(lambda x: x, shape=(-1, 5)), data)


def test_outputs_that_are_not_logits_are_refused():
    data = [(np.zeros((2, 5), np.float32), np.zeros(2, np.int64))]
    with pytest.raises(EngineError, match=r"output 'logits' has shape \(2,\)"):
        measure_accuracy(GivenEngine(lambda x: x[:, 0], shape=(-1, 5)), data)
    with pytest.raises(DataError, match="limit is 0"):
        measure_accuracy(GivenEngine(lambda x: x, shape=(-1, 5)), data, limit=0)
    two = GivenEngine(lambda x: x, shape=(-1, 5))
    two.inputs *= 2
    with pytest.raises(EngineError, match="one input"):
        measure_accuracy(two, data)
    two = GivenEngine(lambda x: x, shape=(-1, 5))
    two.outputs = tuple(dataclasses.replace(two.outputs[0], name=name) for name in "ab")
    with pytest.raises(EngineError, match="one output.*'out'; there is a, b"):
        measure_accuracy(two, data)


@pytest.mark.parametrize("make", [lambda y, x: (y, x), lambda y, x: {"features": x, "out": y}], ids=["tuple", "dict"])
def test_the_logits_of_several_outputs_are_those_of_training(make, tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(12, 5)

        def forward(self, x):
            return make(self.fc(x.flatten(1)), x.flatten(1))

    model, pictures, targets = Two().eval(), torch.randn(6, 3, 2, 2), torch.arange(6) % 5
    path = export_onnx(model, pictures, tmp_path / "two.onnx")
    with build_engine(path, "onnxruntime") as engine, torch.no_grad():
        found = measure_accuracy(engine, [(pictures, targets)])
        assert found.top1 == (model.fc(pictures.flatten(1)).argmax(1) == targets).float().mean()
