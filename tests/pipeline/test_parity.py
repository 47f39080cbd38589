"""`inspect parity` on a recipe: one JSON document with every quantizer of the network, on both engines."""

import json

import pytest
import torch

from compress import insert_quantizers
from compress.cli.app import app
from compress.errors import RecipeError, RunError
from compress.pipeline.studies.parity import parity_of_recipe, parity_of_run
from compress.quantization.report import placement_of
from compress.recipe.tree import parse_recipe
from tests.exact import WEIGHTS
from tests.networks import tiny

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 32, "val_images": 64},
    "quantization": {
        "target": "openvino",
        "calibration_images": 64,
        "activations": {"calibrator": "max"},
        "weights": {"num_bits": WEIGHTS.num_bits},
    },
}
PARITY_RECIPE = parse_recipe(TREE)


def test_both_engines_at_every_quantizer(tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(PARITY_RECIPE.to_yaml())
    with pytest.raises(SystemExit) as done:
        app(["inspect", "parity", "--recipe", str(path), "--json"])
    assert not done.value.code
    document = json.loads(capsys.readouterr().out)
    qmodel = insert_quantizers(tiny(), torch.zeros(2, 3, 16, 16), PARITY_RECIPE.quantization)
    expected = {site.name for site in placement_of(qmodel).activations}
    for engine in ("onnxruntime", "openvino"):
        assert {point["quantizer"] for point in document[engine]["points"]} == expected
        assert "rounding" in document[engine]["verdict"]


def test_refusals(tmp_path):
    with pytest.raises(RecipeError, match="quantization: null"):
        parity_of_recipe(parse_recipe({**TREE, "quantization": None, "qat": None}))
    with pytest.raises(RunError, match="no quantized network"):
        parity_of_run(tmp_path)
    for arguments in ([], ["--run", "x", "--recipe", "resnet50"]):
        with pytest.raises(RecipeError, match="give --recipe, or --run"):
            app(["inspect", "parity", *arguments])
