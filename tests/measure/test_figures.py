import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.metrics import jaccard_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compress import BenchSpec, TorchEngine, build_engine, export_onnx, measure_metric
from compress.errors import DataError, EngineError, RecipeError
from compress.measure import check_bench_spec
from compress.measure.accuracy import compare_figures
from compress.measure.file_check import model_sizes
from compress.support.meters import task_metric
from compress.tasks.segmentation import segmentation
from tests.engines.models import classifier, quantized_classifier
from tests.networks import Net

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
    path = export_onnx(model, IMAGES[:2], tmp_path / "maps.onnx")
    with build_engine(path, "onnxruntime") as engine:
        seen = measure_metric(engine, loader, metric, keep=4)
    assert seen.values["miou"] == pytest.approx(expected(model))
    assert (seen.images, len(seen.outputs)) == (7, 2)
    parity = compare_figures(reference, seen, metric)
    assert parity.agreement == 1
    assert parity.sqnr_db > 80
    assert parity.images == 6


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
def test_refusals(batches, message):
    engine = TorchEngine(maps().eval(), (2, 8, 12))
    with pytest.raises((DataError, EngineError), match=message):
        measure_metric(engine, batches, task_metric(lambda outputs, targets: 1.0))


# Bytes of files whose contents are known, and numpy's or ONNX's own count of each tensor.


def test_weights_by_type(tmp_path):
    path = quantized_classifier(tmp_path / "q.onnx")
    sizes = model_sizes(path)
    int8 = 4 * 27 + 4 + 1  # weight, its zero points, the input's
    float32 = 4 * (4 + 4 + 20 + 5 + 2)  # bias, weight scales, head, its bias, two activation scales
    assert sizes.by_type == {"float32": float32, "int8": int8, "uint8": 1}
    assert next(iter(sizes.by_type)) == "float32"
    assert sizes.weight_bytes == float32 + int8 + 1
    assert sizes.file_bytes == len(path.read_bytes())


@pytest.mark.parametrize("kind", [k for k in TensorProto.DataType.values() if k not in (0, TensorProto.STRING)])
def test_every_type_has_the_size_that_onnx_stores(tmp_path, kind):
    # An odd count, so that packed types end in half a byte.
    array = np.zeros(7, helper.tensor_dtype_to_np_dtype(kind))
    tensor = numpy_helper.from_array(array, "w")
    assert tensor.data_type == kind
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", kind, [7])], [tensor])
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    assert model_sizes(tmp_path / "m.onnx").weight_bytes == len(tensor.raw_data)


def test_constants_and_subgraphs_count(tmp_path):
    def constant(name, count):
        value = numpy_helper.from_array(np.zeros(count, np.float32))
        return helper.make_node("Constant", [], [name], value=value)

    branches = [
        helper.make_graph([constant(n, 3)], n, [], [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3])])
        for n in ("yes", "no")
    ]
    branches[0].initializer.append(numpy_helper.from_array(np.zeros(2, np.int64), "inner"))
    node = helper.make_node("If", ["condition"], ["out"], then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph(
        [constant("outer", 5), node],
        "g",
        [helper.make_tensor_value_info("condition", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [3])],
    )
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    assert model_sizes(tmp_path / "m.onnx").by_type == {"float32": 4 * (3 + 3 + 5), "int64": 16}


def test_external_data_counts(tmp_path):
    inside = classifier(tmp_path / "inside.onnx")
    model = onnx.load(str(inside))
    onnx.save(model, str(tmp_path / "out.onnx"), save_as_external_data=True, location="out.bin", size_threshold=0)
    sizes, expected = model_sizes(tmp_path / "out.onnx"), model_sizes(inside)
    assert (sizes.weight_bytes, sizes.by_type) == (expected.weight_bytes, expected.by_type)
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
