# A run of the task `own`: depth, whose error in metres is that of the engine's file.

import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.ndimage import gaussian_filter
from torch import nn
from torch.nn import functional as F

import compress
from compress import run
from compress.errors import DataError, RecipeError, RunError
from compress.pipeline.predict import by_tiles, predict
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from examples.super_resolution import Fsrcnn, SwinIR
from tests.data import test_boxes
from tests.exact import compute, open_session
from tests.networks import Net, TinyResNet, with_statistics
from tests.onnx_ptq.files import export
from tests.tiny_detectors import retinanet

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


def value_of(rows, name, variant):
    # The row of a metric in which a variant was measured by ONNX Runtime.
    (row,) = (m for m in rows if (m["name"], m["variant"], m["engine"]) == (name, variant, "onnxruntime"))
    return row


def test_depth_is_judged_in_metres_by_the_engine(tmp_path):
    here = "tests.pipeline.test_tasks"
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
    row = value_of(rows, "rmse", "ptq")
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
        q, scale, zero = (constants[key] for key in made[node.input[1]].input)  # unsigned on x86 without VNNI
        step, zero = (array.reshape(-1, *[1] * (q.ndim - 1)) for array in (scale, zero.astype(int)))
        error = np.abs((q - zero) * step - trained[f"{name}.weight"].numpy())
        assert (error <= step * 0.501).mean() > 0.99  # ranges that were trained clip a few weights
        changed.append(not torch.equal(trained[f"{name}.weight"], untrained[f"{name}.weight"]))
    assert changed == [True] * 7


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
    said = {v: compute(tmp_path / "run" / f"{v}.onnx", images).argmax(1) for v in ("float", "ptq", "qat")}
    rows = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for variant, classes in said.items():
        row = value_of(rows, "same_class_as_float", variant)
        assert row["value"] == pytest.approx(100 * (classes == said["float"]).mean())
    assert len(set(said["float"].tolist())) > 1


def test_images_without_labels_teach_nothing():
    tree = {"data": {"name": "images", "root": "photos", "num_classes": 4}, "train": {"epochs": 1}}
    with pytest.raises(RecipeError, match=r"train\.epochs is not 0"):
        parse_recipe(tree)
    with pytest.raises(RecipeError, match=r"data\.num_classes is missing"):
        parse_recipe({"data": {"name": "images", "root": "photos"}, "train": {"epochs": 0}})


# Restoration: how images are degraded, PSNR and SSIM by their formulas, and a whole run with its enlarged images.


SIZE, SCALE = 16, 2


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    # Smooth images of sines, 40 x 44 pixels; every fourth is for evaluation.
    folder, generator = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    y, x = np.mgrid[:40, :44] / 10
    for i in range(16):
        a, b, c = generator.uniform(0.5, 3, (3, 3))
        waves = np.sin(a * y[..., None] + c) * np.cos(b * x[..., None]) * 120 + 128
        Image.fromarray(waves.astype(np.uint8)).save(folder / f"{i:02}.png")
    return folder


def spec(root, **changes):
    return {"name": "degraded", "root": str(root), "image_size": SIZE, "batch_size": 4, "workers": 0} | changes


def loaded(root, **changes):
    return compress.load_data(compress.DataSpec(**spec(root, **changes)))


def batch(split, epoch=None):
    return split.load(list(range(len(split))), epoch=epoch, device=torch.device("cpu"))


@pytest.mark.parametrize(("scale", "epoch"), [(2, None), (2, 3), (1, 3)])
def test_inputs_are_the_truth_scaled_down(photographs, scale, epoch):
    images, truth = batch(loaded(photographs, scale=scale).train, epoch)
    assert images.shape == (12, 3, SIZE, SIZE) and truth.shape == (12, 3, scale * SIZE, scale * SIZE)
    expected = F.interpolate(truth, scale_factor=1 / scale, mode="bicubic", antialias=True) if scale > 1 else truth
    assert (images - expected.clamp(0, 1)).abs().max() <= 1.01 / 255  # torch's filter, before rounding to 8 bits


def test_training_parts_differ_by_epoch_and_evaluation_is_the_centre(photographs):
    data = loaded(photographs)
    first, again, other = (batch(data.train, epoch)[1] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    centre = np.asarray(Image.open(photographs / "03.png"))[4:36, 6:38]
    assert torch.equal(batch(data.val)[1][0], torch.from_numpy(centre.copy()).movedim(-1, 0) / 255)


def test_noise_has_its_deviation_and_is_the_same_each_time(photographs):
    images, truth = batch(loaded(photographs, scale=1, noise=10).val)
    inner = (truth > 0.2) & (truth < 0.8)  # where nothing is cut off
    assert (images - truth)[inner].std() * 255 == pytest.approx(10, rel=0.1)
    assert torch.equal(images, batch(loaded(photographs, scale=1, noise=10).val)[0])
    with pytest.raises(DataError, match=r"03.png is 44 x 40 pixels: it must have 64 x 64, data.scale 2 times"):
        batch(loaded(photographs, image_size=32).val)


def structural_similarity(a, b):
    # SSIM (Wang et al., 2004) of (H, W, C) from 0 to 1, where the whole window of 11 is inside.
    blur = lambda image: gaussian_filter(image, (1.5, 1.5, 0), truncate=3.5, mode="reflect")  # noqa: E731
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, both = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    seen = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return seen[5:-5, 5:-5].mean()


@pytest.mark.parametrize("network", [Fsrcnn, SwinIR])
def test_the_other_networks_of_the_example_enlarge_and_are_quantized(network):
    options = {"depth": 2} if network is Fsrcnn else {"channels": 12, "groups": 1, "depth": 2}
    model, x = network(**options).eval(), torch.rand(2, 3, SIZE, SIZE)
    found = compress.quantize(model, x[:1], [x])(x)
    assert found.shape == (2, 3, SCALE * SIZE, SCALE * SIZE)
    assert -10 * torch.log10((found - model(x)).square().mean()) > 35


@pytest.fixture(scope="module")
def enlarging(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("restoration") / "run"
    tree = {
        "task": "restoration",
        "model": {"name": "examples.super_resolution:Rfdn", "options": {"channels": 8, "blocks": 1}},
        "data": spec(photographs),
        "train": {"epochs": 1, "lr": 0.01, "optimizer": "adamw"},
        "quantization": {"target": "onnxruntime", "calibration_images": 8},
        "qat": {"epochs": 1},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [1], "warmup": 1, "runs": 1, "seconds": 0.05},
    }
    compress.run(parse_recipe(tree), "qat", folder, device="cpu")
    return folder


def enlarged(folder, images):
    return compute(folder / "qat.onnx", images).clip(0, 1)


def test_the_figures_are_those_of_the_engines_images(photographs, enlarging):
    images, truth = batch(loaded(photographs).val)
    seen, truth = (
        np.moveaxis(t, 1, -1).astype(np.float64) for t in (enlarged(enlarging, images.numpy()), truth.numpy())
    )
    luma = np.array([65.481, 128.553, 24.966]) / 255
    psnr = lambda a, b: np.mean([-10 * np.log10(np.square(x - y).mean()) for x, y in zip(a, b, strict=True)])  # noqa: E731
    rows = json.loads((enlarging / "metrics.json").read_text())
    found = {name: value_of(rows, name, "qat") for name in ("psnr", "psnr_luminance", "ssim")}
    assert found["psnr"]["value"] == pytest.approx(psnr(seen, truth), abs=1e-3)
    assert found["psnr_luminance"]["value"] == pytest.approx(psnr(seen @ luma, truth @ luma), abs=1e-3)
    similar = np.mean([structural_similarity(a, b) for a, b in zip(seen, truth, strict=True)])
    assert found["ssim"]["value"] == pytest.approx(100 * similar, abs=0.01)
    assert [found[name]["unit"] for name in ("psnr", "ssim")] == ["dB", "%"]
    assert found["psnr"]["direction"] == "higher"
    intervals = {row.variant: row for row in read_run(enlarging).intervals if row.engine == "onnxruntime"}
    assert intervals["qat"].low < found["psnr"]["value"] < intervals["qat"].high


@pytest.mark.parametrize("size", [(SIZE, SIZE), (40, 44)])
def test_predict_writes_the_engines_image(enlarging, tmp_path, size):
    levels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(levels).save(tmp_path / "a.png")
    (seen,) = predict(enlarging, [tmp_path / "a.png"], engine="onnxruntime", variant="qat", out=tmp_path / "out")
    picture = np.asarray(Image.open(seen.drawn))
    assert picture.shape == (SCALE * size[0], SCALE * size[1], 3)
    part = np.moveaxis(levels[:SIZE, :SIZE], -1, 0)[None].astype(np.float32) / 255
    corner = np.moveaxis((enlarged(enlarging, part)[0] * 255).round().astype(np.uint8), 0, -1)
    inner = SCALE * (SIZE if size == (SIZE, SIZE) else SIZE // 2)  # of the first part what its neighbours leave
    assert np.array_equal(picture[:inner, :inner], corner[:inner, :inner])


@pytest.mark.parametrize("size", [(16, 32), (40, 44), (9, 70), (17, 33), (100, 5)])
def test_parts_cover_an_image_once(size):
    pixels = torch.arange(size[0] * size[1]).reshape(1, *size)
    seen = by_tiles(pixels, (16, 32), lambda part: part.repeat_interleave(3, 1).repeat_interleave(3, 2)[None])
    assert torch.equal(seen[0, 0], torch.kron(pixels[0], torch.ones(3, 3, dtype=torch.int64)))


# `predict` on runs of segmentation and of detection: its text and its picture are those of the run's file.


SMALL = {
    "train": {"epochs": 4, "lr": 0.05, "warmup_epochs": 0.0},
    "quantization": {"target": "openvino", "calibration_images": 2},
    "bench": {"engines": ["openvino"], "batch_sizes": [1], "warmup": 1, "runs": 1, "seconds": 0.05},
}


def segmenter(num_classes=2):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1))


def detector(num_classes=2):
    # Scores near a half, so that an untrained network has boxes to show.
    torch.manual_seed(0)
    model = retinanet(num_classes)
    nn.init.zeros_(model.head.classification_head.cls_logits.bias)
    return model


def test_a_segmentation_is_drawn_and_its_shares_are_those_of_the_file(tmp_path):
    test_boxes.write_masks(tmp_path / "data")
    data = {"name": "masks", "root": str(tmp_path / "data"), "image_size": list(test_boxes.MASK_SIZE), "workers": 0}
    data |= {"classes": list(test_boxes.SIDES), "ignore_index": 11, "batch_size": 5}
    tree = {**SMALL, "task": "segmentation", "model": {"name": f"{__name__}:segmenter"}, "data": data}
    run(parse_recipe(tree), "ptq", tmp_path / "run", device="cpu")
    picture = tmp_path / "data" / "val" / "2.png"
    (found,) = predict(tmp_path / "run", [picture], engine="onnxruntime")
    image = np.asarray(Image.open(picture), np.float32).transpose(2, 0, 1)[None] / 255
    session = open_session(tmp_path / "run" / "ptq.onnx")
    told = json.loads(session.get_modelmeta().custom_metadata_map["compress.preprocessing"])
    mean, std = (np.array(told[key], np.float32).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: (image - mean) / std})
    share = (logits.argmax(1) == 1).mean()
    shares = dict(found.classes)
    assert shares.get("right", 0.0) == pytest.approx(share) and sum(shares.values()) == pytest.approx(1)
    drawn = np.asarray(Image.open(found.drawn))
    assert drawn.shape[:2] == test_boxes.MASK_SIZE and not np.array_equal(drawn, np.asarray(Image.open(picture)))
    folders_are_read_whole_and_no_picture_is_replaced(tmp_path, picture)


def folders_are_read_whole_and_no_picture_is_replaced(tmp_path, picture):
    files = [tmp_path / "shots" / name for name in ("a/1.png", "a/1.bmp", "b/1.png", "b/.hidden.png", "b/notes.txt")]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.open(picture).rotate(90 * i).save(file, format="PNG")
    read, one = sorted(files[:3]), [tmp_path / "run"]
    for out in (tmp_path / "drawn", tmp_path / "shots" / "drawn", tmp_path / "shots" / "drawn"):  # drawn into it twice
        found = predict(*one, [tmp_path / "shots"], out=out)
        assert [row.image for row in found] == [str(file) for file in read]
        assert [row.drawn for row in found] == [str(out / name) for name in ("a/1.png", "a/1-2.png", "b/1.png")]
        assert [row.classes for row in found] == [row.classes for row in predict(*one, read, out=tmp_path / "other")]
    before = files[0].read_bytes()
    for given, out in ((files[:1], tmp_path / "shots" / "a"), ([tmp_path / "shots"], tmp_path / "shots")):
        with pytest.raises(DataError, match=r"1\.png is one of the images, and what is drawn would replace it"):
            predict(*one, given, out=out)
    assert files[0].read_bytes() == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        predict(*one, [tmp_path / "empty"])


def test_boxes_are_drawn_inside_the_picture(tmp_path):
    test_boxes.write_voc(tmp_path / "data")
    data = {
        "name": "voc",
        "root": str(tmp_path / "data"),
        "image_size": [32, 48],
        "workers": 0,
        "classes": list(test_boxes.CLASSES),
        "batch_size": 2,
    }
    tree = {**SMALL, "task": "detection", "model": {"name": "tests.pipeline.test_tasks:detector"}, "data": data}
    tree |= {"train": {**SMALL["train"], "epochs": 0}, "export": {"nms": True}}
    tree |= {"bench": SMALL["bench"] | {"engines": ["onnxruntime"]}}
    run(parse_recipe(tree), "ptq", tmp_path / "run", device="cpu")
    picture = tmp_path / "data" / "JPEGImages" / "c.png"
    (found,) = predict(tmp_path / "run", [picture])
    assert found.boxes and not found.classes
    for name, score, (left, top, right, bottom) in found.boxes:
        assert name in test_boxes.CLASSES and 0.4 <= score <= 1
        assert 0 <= left < right <= 48 and 0 <= top < bottom <= 32
    assert np.asarray(Image.open(found.drawn)).shape == (256, 384, 3)  # enlarged, so that names can be read
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.float32)  # without equal scores
    Image.fromarray(image.astype(np.uint8)).save(tmp_path / "noise.png")
    (found,) = predict(tmp_path / "run", [tmp_path / "noise.png"], engine="onnxruntime", variant="float")
    assert (tmp_path / "run" / "ptq.nms.onnx").is_file()
    session = open_session(tmp_path / "run" / "float.nms.onnx")
    told = json.loads(session.get_modelmeta().custom_metadata_map["compress.preprocessing"])
    mean, std = (np.array(told[key], np.float32) for key in ("mean", "std"))
    boxes, scores, labels = session.run(None, {"input": ((image / 255 - mean) / std).transpose(2, 0, 1)[None]})
    assert boxes.shape == (1, scores.shape[1], 4) and set(labels[0].tolist()) <= {-1, 0, 1}
    assert scores[0, 0] == pytest.approx(found.boxes[0][1], rel=1e-5)  # tests/export/test_export.py compares the boxes
