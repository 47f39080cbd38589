"""Sensitivity by mIoU and mAP, against networks that are quantized whole and judged by torchmetrics."""

import pytest
import torch
from torch import nn
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.functional.classification import multiclass_jaccard_index

import compress
from compress import ActivationSpec, QuantSpec, WeightSpec
from compress.tasks.detection import detection
from compress.tasks.segmentation import segmentation

COARSE = QuantSpec(
    target="openvino",
    head="quantize",
    weights=WeightSpec(num_bits=3),
    activations=ActivationSpec(num_bits=4, calibrator="max"),
)
X = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1)).eval()


def test_sensitivity_by_miou():
    model = network(3)
    with torch.no_grad():
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
    """A box of four pixels around each of the five best places of a map of one class."""
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
