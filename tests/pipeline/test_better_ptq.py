"""The `quantization` keys that go beyond rounding to nearest, through the step of a run and back from its files."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from compress import load_data, load_recipe
from compress.errors import RecipeError
from compress.pipeline.folder import open_run
from compress.pipeline.run import Run
from compress.pipeline.steps.ptq import ptq_step
from compress.pipeline.steps.training import build_float
from compress.recipe.tree import parse_recipe

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 100},
    "quantization": {
        "calibration_images": 64,
        "weights": {"num_bits": 4, "axis": None},
        "equalize": True,
        "bias_correction": "empirical",
        "adaround": {"steps": 10, "images": 64},
    },
    "qat": None,
}


def test_a_run_keeps_what_it_improved(tmp_path):
    recipe = parse_recipe(TREE)
    folder = open_run(tmp_path / "run", recipe, "ptq", resume=False)
    this = Run(recipe=recipe, folder=folder, data=load_data(recipe.data))
    model = build_float(recipe).model.eval()
    made = ptq_step(this, model)
    assert [note.split(" ")[1] for note in this.all_notes()] == ["equalized", "AdaRound", "corrected"]
    assert not (tmp_path / "run" / "ptq.adaround").exists()
    again = ptq_step(dataclasses.replace(this, notes=[]), model)  # finished: read from its file
    x = this.example
    with torch.no_grad():
        torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
    plain = dataclasses.replace(recipe, quantization=dataclasses.replace(recipe.quantization, equalize=False))
    assert plain.digest() != recipe.digest()


def clipped(num_classes=10):
    """Most activations before its ReLU6 exceed 6, so that ReLU in its place is another network."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )
    with torch.no_grad():
        model[0].weight.mul_(50)
    return model


def test_a_finished_step_is_read_without_what_was_taken_back(tmp_path):
    tree = {
        "model": {"name": "tests.pipeline.test_better_ptq:clipped"},
        "data": {"image_size": 16, "batch_size": 32, "val_images": 32},
        "quantization": {"calibration_images": 32, "relu6": "relu"},
        "qat": None,
    }
    recipe = parse_recipe(tree)
    this = Run(recipe=recipe, folder=open_run(tmp_path / "r", recipe, "ptq", resume=False), data=load_data(recipe.data))
    model = build_float(recipe).model.eval()
    made = ptq_step(this, model)
    assert made.report.comparison.taken_back == ("relu6",)
    assert any("taken back" in note for note in this.all_notes())
    again = ptq_step(this, model)
    with torch.no_grad():
        torch.testing.assert_close(again(this.example), made(this.example), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("quantization.bias_correction=guess", "bias_correction"),
        ("quantization.smooth=2", "smooth is 2: it must be 0 to 1"),
        ("quantization.adaround={steps: 0}", "adaround.steps is 0"),
        ("quantization.adaround={step: 5}", "step"),
        ("quantization.batchnorm=keep", "set batchnorm: fold"),
        ("quantization.weights={kind: e4m3}", "both the same kind"),
    ],
)
def test_bad_keys_are_refused_by_the_recipe(override, words):
    with pytest.raises(RecipeError, match=words):
        parse_recipe(TREE, [override])


def test_survives_yaml(tmp_path):
    recipe = parse_recipe(TREE)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "r.yaml") == recipe
    assert json.loads(json.dumps(dataclasses.asdict(recipe)))["quantization"]["adaround"]["steps"] == 10
