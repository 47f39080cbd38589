"""`sensitivity --max-drop` on mIoU and mAP: the whole command, against torchmetrics over what the engine returns.

The truth is what the float network says, so that float loses nothing and three-bit weights lose much.
"""

import json

import pytest
import torch
from torch import nn
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.functional.classification import multiclass_jaccard_index

import compress
from compress.cli.app import app
from tests.tasks.test_sensitivity import decode

IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network(outputs, seed):
    """Two convolutions with weights that follow from the seed alone; no class is far more frequent than another."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1)).eval()
    with torch.no_grad():
        model[2].bias -= model(IMAGES).mean((0, 2, 3))
    return model


@torch.no_grad()
def masks(spec):
    """Images, each with the classes that the network gives its pixels."""
    pairs = list(zip(IMAGES, network(3, 1)(IMAGES).argmax(1), strict=True))
    return pairs, pairs


@torch.no_grad()
def boxes(spec):
    """Images, each with the three best boxes that the network finds."""
    found = [{name: row[name][:3] for name in ("boxes", "labels")} for row in decode((network(1, 4)(IMAGES),))]
    pairs = list(zip(IMAGES, found, strict=True))
    return pairs, pairs


def no_loss(outputs, targets):
    return outputs[0].sum()


def mean_iou(output, pairs):
    return multiclass_jaccard_index(output.argmax(1), torch.stack([mask for _, mask in pairs]), num_classes=3).item()


def mean_precision(output, pairs):
    oracle = MeanAveragePrecision(backend="faster_coco_eval")
    oracle.update(decode((output,)), [row for _, row in pairs])
    return oracle.compute()["map"].item()


RECIPE = """
task: {task}
{task_keys}
model: {{name: "tests.tasks.test_max_drop:network", options: {{outputs: {outputs}, seed: {seed}}}}}
data: {{name: "tests.tasks.test_max_drop:{data}", classes: [{classes}], batch_size: 8}}
train: {{epochs: 0}}
quantization: {{target: openvino, calibration_images: 8, head: quantize, weights: {{num_bits: 3}}}}
"""
SEGMENTATION = {"task": "segmentation", "task_keys": "", "outputs": 3, "seed": 1, "data": "masks", "classes": "a, b, c"}
DETECTION = {
    "task": "detection",
    "task_keys": 'loss: "tests.tasks.test_max_drop:no_loss"\ndecode: "tests.tasks.test_sensitivity:decode"',
    "outputs": 1,
    "seed": 4,
    "data": "boxes",
    "classes": "spot",
}


@pytest.mark.parametrize(
    ("keys", "oracle", "drop"), [(SEGMENTATION, mean_iou, 25.0), (DETECTION, mean_precision, 10.0)]
)
def test_the_network_that_is_chosen_loses_no_more(keys, oracle, drop, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(**keys))
    options = ["sensitivity", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"), "--json"]
    options += ["--images", "8", "--max-drop", str(drop), "--costs", "h200", "--precision", "f32", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        app(options)
    assert not ended.value.code
    document = json.loads(capsys.readouterr().out)
    points = {point["label"]: point for point in document["points"]}
    chosen, whole = points[document["chosen"]], points["w3a8"]
    assert points["float"]["score"] - whole["score"] > drop / 100 >= points["float"]["score"] - chosen["score"]
    assert set(chosen["formats"].values()) == {"float", "w3a8"}, "the fastest that is good enough is mixed"

    recipe = compress.load_recipe(document["recipe"])
    made = compress.quantize(network(keys["outputs"], keys["seed"]), IMAGES[:2], [IMAGES], spec=recipe.quantization)
    pairs = {"masks": masks, "boxes": boxes}[keys["data"]](None)[0]
    with torch.no_grad():
        assert chosen["score"] == pytest.approx(oracle(made(IMAGES), pairs), abs=0.02)  # in torch, by the recipe
