# `predict` on runs of segmentation and of detection: its text and its picture are those of the run's file.

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from compress import run
from compress.errors import DataError
from compress.pipeline.predict import predict
from compress.recipe.tree import parse_recipe
from tests.data import test_boxes, test_masks
from tests.exact import open_session
from tests.tiny_detectors import retinanet

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
    test_masks.write(tmp_path / "data")
    data = {
        "name": "masks",
        "root": str(tmp_path / "data"),
        "image_size": list(test_masks.SIZE),
        "workers": 0,
        "classes": list(test_masks.CLASSES),
        "ignore_index": 11,
        "batch_size": 5,
    }
    model = {"name": "tests.pipeline.test_predict:segmenter"}
    run(
        parse_recipe({**SMALL, "task": "segmentation", "model": model, "data": data}),
        "ptq",
        tmp_path / "run",
        device="cpu",
    )
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
    assert drawn.shape[:2] == test_masks.SIZE and not np.array_equal(drawn, np.asarray(Image.open(picture)))
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
    tree = {**SMALL, "task": "detection", "model": {"name": "tests.pipeline.test_predict:detector"}, "data": data}
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
    assert scores[0, 0] == pytest.approx(found.boxes[0][1], rel=1e-5)  # tests/export/test_nms.py compares the boxes
