# A run of the task `own`: depth, whose error in metres is that of the engine's file.

import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import compress
from compress import run
from compress.errors import RecipeError, RunError
from compress.pipeline.predict import predict
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from tests.exact import compute, open_session
from tests.networks import Net, TinyResNet, with_statistics
from tests.onnx_ptq.files import export

IMAGES = torch.rand(8, 4, 8, 12, generator=torch.Generator().manual_seed(0))
DEPTH = IMAGES.mean(1, keepdim=True)


def data(spec):
    pairs = list(zip(IMAGES, DEPTH, strict=True))
    return pairs, pairs


def network():
    def run(net, x):
        near = net.near(x)
        return {"near": near, "far": nn.functional.avg_pool2d(near, 2)}

    return Net(run, near=nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)))


def loss(outputs, targets):
    return (outputs[0] - targets).square().mean()


class Rmse:
    name, unit, direction = "rmse", "m", "lower"

    def __init__(self):
        self.sum = self.count = 0

    def update(self, outputs, targets):
        self.sum, self.count = self.sum + float(loss(outputs, targets)) * len(targets), self.count + len(targets)

    def compute(self):
        return (self.sum / self.count) ** 0.5


def test_depth_is_judged_in_metres_by_the_engine(tmp_path):
    here = "tests.pipeline.test_own"
    tree = {
        "task": "own",
        "loss": f"{here}:loss",
        "metric": f"{here}:Rmse",
        "model": {"name": f"{here}:network"},
        "data": {"name": f"{here}:data", "num_classes": 1, "batch_size": 4},
        "train": {"epochs": 0},
        "qat": None,
        "quantization": {"target": "onnxruntime", "calibration_images": 8},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [1], "warmup": 1, "runs": 1, "seconds": 0.05},
    }
    run(parse_recipe(tree), "ptq", tmp_path, device="cpu")
    rows = json.loads((tmp_path / "metrics.json").read_text())
    (row,) = (m for m in rows if (m["name"], m["variant"], m["engine"]) == ("rmse", "ptq", "onnxruntime"))
    session = open_session(tmp_path / "ptq.onnx")
    near, far = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    assert far.shape == (8, 1, 4, 6)
    assert row["value"] == pytest.approx(np.sqrt(np.square(near - DEPTH.numpy()).mean()), rel=1e-4)
    assert (row["unit"], row["direction"]) == ("m", "lower")
    assert not any(m["name"] == "agreement" for m in rows)
    assert f"{row['value']:#.4g}" in (tmp_path / "report.md").read_text()
    with pytest.raises(RunError, match="of the task own, and predict shows classes, masks and boxes alone"):
        predict(tmp_path, [])


# A recipe whose model is an ONNX file: the trained INT8 network is in the file's own graph.

LAYERS = {"Conv", "Gemm"}


def tree(file, **changes):
    return {
        "model": {"name": str(file), "options": {"size": [16, 16]}},
        "data": {"image_size": 16, "batch_size": 32, "train_images": 64, "val_images": 40},
        "train": {"epochs": 0},
        "quantization": {"target": ["onnxruntime", "tensorrt"], "calibration_images": 32},
        "qat": {"epochs": 1, "lr": 0.01},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [2], "warmup": 1, "runs": 1, "seconds": 0.05},
    } | changes


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    file = export(with_statistics(TinyResNet()), folder / "float.onnx")
    run(parse_recipe(tree(file)), "qat", folder / "run", device="cpu")
    return folder


def layers_of(path):
    return {node.name: node for node in onnx.load(path).graph.node if node.op_type in LAYERS}


@pytest.mark.parametrize("name", ["ptq", "qat", "qat.tensorrt"])
def test_files_have_the_nodes_and_names_of_the_users_file(finished, name):
    before, after = onnx.load(finished / "float.onnx"), onnx.load(finished / "run" / f"{name}.onnx")
    assert (after.graph.input, after.graph.output) == (before.graph.input, before.graph.output)
    assert layers_of(finished / "run" / f"{name}.onnx").keys() == layers_of(finished / "float.onnx").keys()
    assert json.loads({e.key: e.value for e in after.metadata_props}["compress.labels"])[:2] == ["0", "1"]
    assert any(f"{name}.onnx is the graph of" in note for note in read_run(finished / "run").notes)


def test_the_trained_weights_are_in_the_file(finished):
    # The integers of each convolution, by the scales beside them, are the weights that training left, to a step.
    graph = onnx.load(finished / "run" / "qat.onnx").graph
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    trained, untrained = (load_file(finished / "run" / f"{name}.safetensors") for name in ("qat", "float"))
    changed = []
    for name, node in layers_of(finished / "run" / "qat.onnx").items():
        q, scale = (constants[key] for key in made[node.input[1]].input[:2])
        step = scale.reshape(-1, *[1] * (q.ndim - 1))
        error = np.abs(q * step - trained[f"{name}.weight"].numpy())
        assert (error <= step * 0.501).mean() > 0.99  # ranges that were trained clip a few weights
        changed.append(not torch.equal(trained[f"{name}.weight"], untrained[f"{name}.weight"]))
    assert len(changed) == 7
    assert all(changed)


def test_the_engine_is_measured_with_that_file(finished):
    rows = {(m.name, m.variant, m.engine): m for m in read_run(finished / "run").metrics}
    assert rows["agreement", "qat", "onnxruntime"].value >= 90
    with compress.build_engine(finished / "run" / "qat.onnx", "onnxruntime") as engine:
        assert engine.inputs[0].name == "picture"


def test_a_form_that_the_file_cannot_have_is_exported_by_torch(finished, tmp_path):
    changes = {"export": {"precision": "fp16"}, "quantization": {"target": "tensorrt", "calibration_images": 32}}
    run(parse_recipe(tree(finished / "float.onnx", **changes)), "ptq", tmp_path / "run", device="cpu")
    assert [value.name for value in onnx.load(tmp_path / "run" / "ptq.onnx").graph.input] == ["input"]
    assert any("export.precision is fp16" in note for note in read_run(tmp_path / "run").notes)


def test_images_without_labels_are_judged_by_the_float_network(tmp_path):
    folder, generator = tmp_path / "photos" / "inner", np.random.default_rng(0)
    folder.mkdir(parents=True)
    pixels = generator.integers(0, 256, (44, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:02}.png")
    tree = {
        "model": {"name": "tests.networks:network"},
        "data": {"name": "images", "root": str(tmp_path / "photos"), "num_classes": 10, "image_size": 16},
        "train": {"epochs": 0},
        "qat": {"epochs": 1},
        "quantization": {"target": "onnxruntime", "calibration_images": 8, "weights": {"num_bits": 4}},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [1], "warmup": 1, "runs": 1, "seconds": 0.05},
    }
    tree["data"] |= {"crop_ratio": 1.0, "mean": [0.5] * 3, "std": [0.25] * 3}
    run(parse_recipe(tree), "qat", tmp_path / "run", device="cpu")
    images = ((pixels[3::4] / 255 - 0.5) / 0.25).astype(np.float32).transpose(0, 3, 1, 2)
    said = {}
    for variant in ("float", "ptq", "qat"):
        said[variant] = compute(tmp_path / "run" / f"{variant}.onnx", images).argmax(1)
    rows = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for variant, classes in said.items():
        (row,) = (
            m for m in rows if (m["name"], m["variant"], m["engine"]) == ("same_class_as_float", variant, "onnxruntime")
        )
        assert row["value"] == pytest.approx(100 * (classes == said["float"]).mean())
    assert len(set(said["float"].tolist())) > 1


def test_images_without_labels_teach_nothing():
    tree = {"data": {"name": "images", "root": "photos", "num_classes": 4}, "train": {"epochs": 1}}
    with pytest.raises(RecipeError, match=r"train\.epochs is not 0"):
        parse_recipe(tree)
    with pytest.raises(RecipeError, match=r"data\.num_classes is missing"):
        parse_recipe({"data": {"name": "images", "root": "photos"}, "train": {"epochs": 0}})
