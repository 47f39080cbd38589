# Sensitivity by mIoU and mAP, against networks that are quantized whole and judged by torchmetrics.

import json

import pytest
import torch
from torch import nn
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.functional.classification import multiclass_jaccard_index

import compress
from compress.cli.app import app
from compress.tasks.detection import detection
from compress.tasks.segmentation import segmentation

COARSE = compress.QuantSpec(
    target="openvino",
    head="quantize",
    weights=compress.WeightSpec(num_bits=3),
    activations=compress.ActivationSpec(num_bits=4, calibrator="max"),
)
X = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1)).eval()


def test_sensitivity_by_miou():
    model = network(3)
    truth = model(X).argmax(1)  # so that float is right everywhere, and each quantizer costs something
    metric = segmentation(("a", "b", "c")).metric
    found = compress.sensitivity(
        model, X[:2], [X], [(X[:4], truth[:4]), (X[4:], truth[4:])], spec=COARSE, metric=metric
    )
    whole = compress.quantize(model, X[:2], [X], spec=COARSE)(X).argmax(1)
    assert found.metric == "miou" and found.float_score == 1.0
    expected = multiclass_jaccard_index(whole, truth, num_classes=3).item()
    assert found.quantized.score == pytest.approx(expected, abs=1e-6)
    assert expected < 1.0
    assert {row.layer for row in found.rows} == {"0", "2"}
    assert all(row.alone.score <= 1.0 for row in found.rows)


def decode(outputs):
    rows = []
    for scores in outputs[0].flatten(1).sigmoid():
        best = scores.topk(5)
        corner = torch.stack([best.indices % 16, best.indices // 16], 1).float()
        labels = torch.zeros(5, dtype=torch.int64)
        rows.append({"boxes": torch.cat([corner, corner + 4], 1), "scores": best.values, "labels": labels})
    return rows


def test_sensitivity_by_map():
    model = network(1)
    with torch.no_grad():
        truth = [{name: row[name][:3] for name in ("boxes", "labels")} for row in decode((model(X),))]
    task = detection(("spot",), loss=lambda outputs, targets: outputs[0].sum(), decode=decode)
    found = compress.sensitivity(model, X[:2], [X], [(X, truth)], spec=COARSE, metric=task.metric)
    oracle = MeanAveragePrecision(backend="faster_coco_eval")
    with torch.no_grad():
        oracle.update(decode((compress.quantize(model, X[:2], [X], spec=COARSE)(X),)), truth)
    assert found.metric == "map"
    assert found.quantized.score == pytest.approx(oracle.compute()["map"].item(), abs=4e-3)
    assert found.float_score > found.quantized.score


# `sensitivity --max-drop` on mIoU and mAP: the whole command, against torchmetrics over what the engine returns.
# The truth is what the float network says, so that float loses nothing and three-bit weights lose much.

IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def max_drop_network(outputs, seed):
    # Two convolutions with weights that follow from the seed alone; no class is far more frequent than another.
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1)).eval()
    with torch.no_grad():
        model[2].bias -= model(IMAGES).mean((0, 2, 3))
    return model


@torch.no_grad()
def masks(spec):
    pairs = list(zip(IMAGES, max_drop_network(3, 1)(IMAGES).argmax(1), strict=True))
    return pairs, pairs


@torch.no_grad()
def boxes(spec):
    found = [{name: row[name][:3] for name in ("boxes", "labels")} for row in decode((max_drop_network(1, 4)(IMAGES),))]
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
model: {{name: "tests.tasks.test_sensitivity:max_drop_network", options: {{outputs: {outputs}, seed: {seed}}}}}
data: {{name: "tests.tasks.test_sensitivity:{data}", classes: [{classes}], batch_size: 8}}
train: {{epochs: 0}}
quantization: {{target: openvino, calibration_images: 8, head: quantize, weights: {{num_bits: 3}},
               bias_correction: null}}
"""
SEGMENTATION = {"task": "segmentation", "task_keys": "", "outputs": 3, "seed": 1, "data": "masks", "classes": "a, b, c"}
DETECTION = {
    "task": "detection",
    "task_keys": 'loss: "tests.tasks.test_sensitivity:no_loss"\ndecode: "tests.tasks.test_sensitivity:decode"',
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
    made = compress.quantize(
        max_drop_network(keys["outputs"], keys["seed"]), IMAGES[:2], [IMAGES], spec=recipe.quantization
    )
    pairs = {"masks": masks, "boxes": boxes}[keys["data"]](None)[0]
    assert chosen["score"] == pytest.approx(oracle(made(IMAGES), pairs), abs=0.02)  # in torch, by the recipe
