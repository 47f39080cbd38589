"""A run of the task `own`: depth, whose error in metres is that of the engine's file."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from compress import run
from compress.errors import RunError
from compress.pipeline.predict import predict
from compress.recipe.tree import parse_recipe
from tests.exact import open_session

IMAGES = torch.rand(8, 4, 8, 12, generator=torch.Generator().manual_seed(0))
DEPTH = IMAGES.mean(1, keepdim=True)


def data(spec):
    pairs = list(zip(IMAGES, DEPTH, strict=True))
    return pairs, pairs


def network():
    """Two outputs, of which the second is half as large as the pictures, in both directions."""
    return Depth()


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x):
        near = self.near(x)
        return {"near": near, "far": nn.functional.avg_pool2d(near, 2)}


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
    here = "tests.pipeline.test_own_task"
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
