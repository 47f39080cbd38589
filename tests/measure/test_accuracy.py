# Top-1 and top-5 against scikit-learn; batches of every shape; what is refused.

import dataclasses
import io
import json
import math
import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.metrics import jaccard_score, top_k_accuracy_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compress import BenchSpec, TorchEngine, build_engine, export_onnx, measure_accuracy, measure_metric
from compress.data.base import Preprocessing
from compress.data.decode import resized
from compress.errors import DataError, EngineError, RecipeError, RunError
from compress.export.names import PREPROCESSING_KEY
from compress.measure import check_bench_spec
from compress.measure.accuracy import compare_figures, target_ranks
from compress.measure.latency import (
    RUNS_PER_TURN,
    STAGES,
    classes,
    decode,
    decoded_images,
    for_decoder,
    measure_end_to_end,
    preprocess,
    ready,
)
from compress.measure.metric import Metric
from compress.measure.parity import model_sizes
from compress.support.meters import task_metric
from compress.tasks.segmentation import segmentation
from tests.engines.models import classifier, images, quantized_classifier
from tests.measure.fakes import GivenEngine, Listener
from tests.networks import Net
from tests.onnx_models import onnx_model


def returns(classes, function=lambda x: x, **more):
    # An engine that returns its inputs as logits, or what `function` makes of them.
    return GivenEngine(function, shape=(-1, classes), **more)


def batches(logits, targets, size):
    return [(logits[i : i + size], targets[i : i + size]) for i in range(0, len(logits), size)]


@given(count=st.integers(1, 30), classes=st.integers(6, 12), size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_top_k_is_scikit_learns(count, classes, size, seed):
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.arange(count * classes, dtype=np.float32)).reshape(count, classes)
    targets = rng.integers(0, classes, count)
    seen, labels = measure_accuracy(returns(classes), batches(logits, targets, size)), np.arange(classes)
    assert seen.top1 == pytest.approx(top_k_accuracy_score(targets, logits, k=1, labels=labels))
    assert seen.top5 == pytest.approx(top_k_accuracy_score(targets, logits, k=5, labels=labels))
    assert (seen.images, seen.notes) == (count, ())


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
    assert (seen.top1, seen.images) == (np.mean(logits.argmax(1) == targets), 9)


def test_tensors_a_limit_and_progress():
    logits, targets = torch.eye(5).repeat(4, 1), torch.arange(5).repeat(4)
    engine, listener = returns(5), Listener()
    seen = measure_accuracy(engine, batches(logits, targets, 6), limit=8, keep_logits=True, progress=listener)
    assert (seen.top1, seen.images, seen.logits.shape, seen.logits.dtype) == (1.0, 8, (8, 5), np.float32)
    assert [len(array) for _, array in engine.calls] == [6, 2]
    assert (listener.total, listener.advanced, listener.finished) == (4, 2, True)
    unsized = measure_accuracy(engine, iter(batches(logits, targets, 6)))
    assert (unsized.images, unsized.logits) == (20, None)


def test_few_classes_are_noted():
    seen = measure_accuracy(returns(3), [(np.eye(3, dtype=np.float32), np.array([0, 0, 2]))])
    assert (seen.top1, seen.top5) == (pytest.approx(2 / 3), 1.0)
    assert "3 classes" in seen.notes[0]


PREPARED = Preprocessing(image_size=8)
IMAGES2 = np.zeros((2, 5), np.float32)
ZEROS = [(IMAGES2, np.zeros(2, np.int64))]


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
    assert "could not be checked" in measure_accuracy(returns(5), ZEROS, preprocessing=PREPARED).notes[0]
    with pytest.raises(DataError, match="not readable"):
        measure_accuracy(returns(5, metadata={PREPROCESSING_KEY: "[1"}), ZEROS, preprocessing=PREPARED)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_results_that_are_not_finite_name_the_image(value):
    logits = np.zeros((10, 5), np.float32)
    logits[7, 2] = value
    with pytest.raises(EngineError, match="logits of image 7"):
        measure_accuracy(returns(5), batches(logits, np.zeros(10, np.int64), 4))


def test_padding_may_be_nan():
    engine = GivenEngine(lambda x: np.where(x.any(1, keepdims=True), x, np.nan), shape=(4, 5))
    assert measure_accuracy(engine, [(np.ones((3, 5), np.float32), np.zeros(3, np.int64))]).images == 3


def with_ports(ports):
    # An engine with several inputs or outputs of these names.
    engine = returns(5)
    vars(engine).update({kind: tuple(replace(getattr(engine, kind)[0], name=n) for n in "ab") for kind in [ports]})
    return engine


@pytest.mark.parametrize(
    ("engine", "data", "options", "error", "message"),
    [
        (returns(5), [], {}, DataError, "no image"),
        (returns(5), [IMAGES2], {}, DataError, "pairs of images and targets"),
        (returns(5), [(IMAGES2, np.zeros(3, np.int64))], {}, DataError, "2 images and 3 targets"),
        (returns(5), [(IMAGES2, np.zeros(2, np.float32))], {}, DataError, "targets are float32"),
        (returns(5), [(IMAGES2, np.array([0, 5]))], {}, DataError, "target of image 1 is 5"),
        (returns(5), [(IMAGES2, np.array([-1, 0]))], {}, DataError, "target of image 0 is -1"),
        (returns(5, lambda x: x[:, 0]), ZEROS, {}, EngineError, r"output 'logits' has shape \(2,\)"),
        (returns(5), ZEROS, {"limit": 0}, DataError, "limit is 0"),
        (with_ports("inputs"), ZEROS, {}, EngineError, "one input"),
        (with_ports("outputs"), ZEROS, {}, EngineError, "one output.*'out'; there is a, b"),
    ],
)
def test_data_and_outputs_that_do_not_fit_are_refused(engine, data, options, error, message):
    with pytest.raises(error, match=message):
        measure_accuracy(engine, data, **options)


@pytest.mark.parametrize("make", [lambda y, x: (y, x), lambda y, x: {"features": x, "out": y}], ids=["tuple", "dict"])
def test_the_logits_of_several_outputs_are_those_of_training(make, tmp_path):
    model = Net(lambda net, x: make(net.fc(x.flatten(1)), x.flatten(1)), fc=torch.nn.Linear(12, 5)).eval()
    pictures, targets = torch.randn(6, 3, 2, 2), torch.arange(6) % 5
    with build_engine(export_onnx(model, pictures, tmp_path / "two.onnx"), "onnxruntime") as engine:
        found = measure_accuracy(engine, [(pictures, targets)])
        assert found.top1 == (model.fc(pictures.flatten(1)).argmax(1) == targets).float().mean()


MISSING = object()
ROW = {"name": "top1", "variant": "qat", "engine": "openvino (f32)", "value": 98.5, "unit": "%"}


@given(
    value=st.one_of(st.floats(allow_nan=False), st.integers(-(10**9), 10**9)),
    name=st.text(),
    batch=st.none() | st.integers(1, 4096),
    text=st.text(),
)
def test_strict_json_and_back_keeps_everything(value, name, batch, text):
    metric = Metric(name=name, variant=text, engine=text, value=value, unit="x", batch_size=batch, method=text)
    assert Metric.from_dict(json.loads(json.dumps(metric.to_dict(), allow_nan=False))) == metric


def test_unavailable_goes_through_json():
    metric = Metric.from_dict(ROW | {"value": None, "status": "unavailable", "reason": "not installed"})
    assert Metric.from_dict(json.loads(json.dumps(metric.to_dict()))) == metric


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({key: MISSING}, f"missing {key}") for key in ROW),
        ({"status": "done"}, "complete, partial, unavailable"),
        ({"value": None}, "None goes with 'unavailable'"),
        ({"status": "unavailable", "reason": "x"}, "None goes with 'unavailable'"),
        ({"status": "partial"}, "needs a reason"),
        ({"value": None, "status": "unavailable"}, "needs a reason"),
        ({"value": math.nan}, "NaN"),
        ({"batch_size": 0}, "1 or more"),
        ({"batch_size": 1.5}, "integer or null"),
        ({"batch_size": True}, "integer or null"),
        ({"value": "98"}, "number"),
        ({"value": True}, "number"),
        ({"variant": 3}, "text"),
        ({"reasons": "x"}, "did you mean 'reason'"),
    ],
)
def test_refuses_what_contradicts_itself(change, message):
    with pytest.raises(RunError, match=message):
        Metric.from_dict({key: value for key, value in (ROW | change).items() if value is not MISSING})


# Stages from picture to class: what each does, against torch and Pillow, and that they add up; no time is judged.

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
    # A picture of one colour stays one: (pixel / 255 - mean) / std.
    made = preprocess([Image.new("RGB", (12, 30), (255, 0, 51))], PREPROCESSING, "cpu")
    mean, std = torch.tensor(PREPROCESSING.mean), torch.tensor(PREPROCESSING.std)
    expected = (torch.tensor([1.0, 0.0, 0.2]) - mean) / std
    torch.testing.assert_close(made[0], expected[:, None, None].expand(3, 8, 8))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_on_the_device_is_resizing_by_pillow_but_for_rounding(interpolation):
    image = Image.fromarray(pixels(40, 33))
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    by_torch = resized(tensor, replace(PREPROCESSING, crop_ratio=0.8, interpolation=interpolation))
    by_pillow = image.resize((10, round(10 * 40 / 33)), Image.Resampling[interpolation.upper()])
    top = round((by_pillow.height - 8) / 2)
    expected = np.asarray(by_pillow)[top : top + 8, 1:9].transpose(2, 0, 1)
    assert by_torch.shape == (3, 8, 8)
    assert np.abs(by_torch.numpy().astype(int) - expected.astype(int)).max() <= 1


@given(arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-50, 50, width=32)))
def test_classes_are_softmax_and_topk(logits):
    found, probabilities = classes(logits)
    expected = torch.softmax(torch.from_numpy(logits), dim=1)
    top = expected.topk(min(5, logits.shape[1]), dim=1).values
    np.testing.assert_allclose(probabilities, top.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.take_along_axis(expected.numpy(), found, 1), probabilities, rtol=1e-5, atol=1e-7)


def test_preprocessing_given_by_the_caller_is_used():
    small, more = {"a": engine(shape=(-1, 3, 4, 4), metadata={})}, {"preprocessing": Preprocessing(image_size=4)}
    assert measure_end_to_end(small, [pixels()], warmup=0, runs=1, **more)[0].stage_ms.keys() == set(STAGES[1:])


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
        (DataError, "no images", {"a": engine()}, [], {}),
        (DataError, "image 1 is not a readable", {"a": engine()}, [encoded(), b"GIF?"], {}),
        (DataError, "one kind", {"a": engine()}, [encoded(), pixels()], {}),
        (DataError, r"float64 of shape \(2, 2, 3\)", {"a": engine()}, [np.ones((2, 2, 3))], {}),
    ],
)
def test_refusals(error, message, engines, pictures, more):
    with pytest.raises(error, match=message):
        measure_end_to_end(engines, pictures, **more)


def test_a_gpu_decodes_colour_jpeg_files_alone_and_sees_what_pillow_sees():
    # Torchvision's decoder on the CPU stands in for nvJPEG; it is libjpeg-turbo, as Pillow's is.
    grey = io.BytesIO()
    Image.fromarray(pixels()[..., 0]).save(grey, "JPEG")
    files = [encoded("JPEG"), encoded("PNG"), grey.getvalue()]
    given = [for_decoder(file) for file in files]
    assert torch.is_tensor(given[0]) and given[1:] == files[1:]
    found = decoded_images(given, torch.device("cpu"), 10**6)
    expected = torch.from_numpy(np.array(decode([files[0]])[0])).permute(2, 0, 1)
    assert found[0].shape == expected.shape and (found[0].int() - expected.int()).abs().max() <= 2
    assert [image.mode for image in found[1:]] == ["RGB", "RGB"]
    assert preprocess(found, PREPROCESSING, "cpu").shape == (3, 3, 8, 8)
    levels = 255 * (preprocess(found[:1], PREPROCESSING, "cpu") - preprocess(decode(files[:1]), PREPROCESSING, "cpu"))
    assert (levels * torch.tensor(PREPROCESSING.std).view(3, 1, 1)).abs().max() < 3.5  # decoder and resizing
    assert ready(files, torch.device("cpu")) == files


IMAGES = torch.randn(7, 2, 8, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 3, (7, 8, 12), generator=torch.Generator().manual_seed(2))


def maps():
    return Net(lambda net, x: {"out": net.conv(x), "aux": net.conv(x) * 2}, conv=nn.Conv2d(2, 3, 3, padding=1))


def expected(model):
    predicted = model(IMAGES)["out"].argmax(1)
    return jaccard_score(TARGETS.flatten(), predicted.flatten(), average="macro")


def test_an_engine_is_judged_by_a_task_over_a_loader(tmp_path):
    model = maps().eval()
    metric = segmentation(("a", "b", "c")).metric
    loader = DataLoader(TensorDataset(IMAGES, TARGETS), batch_size=3)
    reference = measure_metric(TorchEngine(model, (2, 8, 12)), loader, metric, keep=4)
    with build_engine(export_onnx(model, IMAGES[:2], tmp_path / "maps.onnx"), "onnxruntime") as engine:
        seen = measure_metric(engine, loader, metric, keep=4)
    assert seen.values["miou"] == pytest.approx(expected(model))
    assert (seen.images, len(seen.outputs)) == (7, 2)
    parity = compare_figures(reference, seen, metric)
    assert (parity.agreement, parity.images) == (1, 6) and parity.sqnr_db > 80


def test_mapping_batches_and_a_function_as_the_metric():
    model = maps().eval()
    batches = [{"pixel_values": IMAGES[:4], "labels": TARGETS[:4]}, {"pixel_values": IMAGES[4:], "labels": TARGETS[4:]}]

    def share(outputs, targets):
        return (outputs["out"].argmax(1) == targets).float().mean()

    seen = measure_metric(TorchEngine(model, (2, 8, 12)), batches, share)
    right = (model(IMAGES)["out"].argmax(1) == TARGETS).float().mean().item()
    assert seen.values == {"share": pytest.approx(right)}
    assert measure_metric(TorchEngine(model, (2, 8, 12)), batches, share, limit=5).images == 5


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no image to evaluate"),
        ([{"pixel_values": IMAGES}], "its targets must be its 'labels'"),
        ([(IMAGES, TARGETS[:3])], "7 images and 3 targets"),
        ([(IMAGES * float("inf"), TARGETS)], "out of image 0 is not finite"),
    ],
)
def test_refusals_of_a_metric(batches, message):
    engine = TorchEngine(maps().eval(), (2, 8, 12))
    with pytest.raises((DataError, EngineError), match=message):
        measure_metric(engine, batches, task_metric(lambda outputs, targets: 1.0))


# Bytes of files whose contents are known, and numpy's or ONNX's own count of each tensor.


def test_weights_and_files(tmp_path):
    path = quantized_classifier(tmp_path / "q.onnx")
    sizes = model_sizes(path)
    int8 = 4 * 27 + 4 + 1  # weight, its zero points, the input's
    float32 = 4 * (4 + 4 + 20 + 5 + 2)  # bias, weight scales, head, its bias, two activation scales
    assert sizes.weight_bytes == float32 + int8 + 1
    assert sizes.file_bytes == len(path.read_bytes())


@pytest.mark.parametrize("kind", [k for k in TensorProto.DataType.values() if k not in (0, TensorProto.STRING)])
def test_every_type_has_the_size_that_onnx_stores(tmp_path, kind):
    # An odd count, so that packed types end in half a byte.
    tensor = numpy_helper.from_array(np.zeros(7, helper.tensor_dtype_to_np_dtype(kind)), "w")
    assert tensor.data_type == kind
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", kind, [7])], [tensor])
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    assert model_sizes(tmp_path / "m.onnx").weight_bytes == len(tensor.raw_data)


def test_constants_and_subgraphs_count(tmp_path):
    def constant(name, count):
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.zeros(count, np.float32)))

    branches = [
        helper.make_graph([constant(n, 3)], n, [], [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3])])
        for n in ("yes", "no")
    ]
    branches[0].initializer.append(numpy_helper.from_array(np.zeros(2, np.int64), "inner"))
    node = helper.make_node("If", ["condition"], ["out"], then_branch=branches[0], else_branch=branches[1])
    model = onnx_model([constant("outer", 5), node], {}, {"out": [3]})
    model.graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
    onnx.save(model, tmp_path / "m.onnx")
    assert model_sizes(tmp_path / "m.onnx").weight_bytes == 4 * (3 + 3 + 5) + 16


def test_external_data_counts(tmp_path):
    inside = classifier(tmp_path / "inside.onnx")
    onnx.save(
        onnx.load(inside), str(tmp_path / "out.onnx"), save_as_external_data=True, location="out.bin", size_threshold=0
    )
    sizes, expected = model_sizes(tmp_path / "out.onnx"), model_sizes(inside)
    assert sizes.weight_bytes == expected.weight_bytes
    assert sizes.file_bytes == sum((tmp_path / name).stat().st_size for name in ("out.onnx", "out.bin"))
    (tmp_path / "out.bin").unlink()
    with pytest.raises(EngineError, match=r"out\.bin: no such file"):
        model_sizes(tmp_path / "out.onnx")


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(classifier(tmp_path / "whole.onnx").read_bytes()[:300])
    with pytest.raises(EngineError, match=r"m\.onnx: not an ONNX model"):
        model_sizes(tmp_path / "m.onnx")
    with pytest.raises(EngineError, match=r"none\.onnx: no such file"):
        model_sizes(tmp_path / "none.onnx")


# Values that the bench section of a recipe may hold.


def test_defaults_and_every_engine_pass():
    check_bench_spec(BenchSpec())
    check_bench_spec(BenchSpec(engines=("tensorrt", "tensorrt-rtx", "torch"), batch_sizes=(8,), threads=2, warmup=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ("openvno",)}, "did you mean 'openvino'"),
        ({"engines": ("openvino", "openvino")}, "bench.engines"),
        ({"batch_sizes": (1, 0)}, "bench.batch_sizes"),
        ({"batch_sizes": (2, 2)}, "numbers that differ"),
        ({"warmup": -1}, "bench.warmup is -1"),
        ({"runs": 0}, "bench.runs is 0"),
        ({"seconds": 0.0}, "bench.seconds is 0.0"),
        ({"seconds": float("nan")}, "bench.seconds is nan"),
        ({"threads": 0}, "bench.threads is 0"),
    ],
)
def test_refusals_of_spec(changes, message):
    with pytest.raises(RecipeError, match=message):
        check_bench_spec(BenchSpec(**changes))
