"""`init` writes a recipe that is read back, or nothing."""

import pytest
from typer.testing import CliRunner

from compress import load_recipe
from compress.cli.app import app
from compress.errors import RecipeError


def invoke(*words):
    return CliRunner().invoke(app, ["init", *map(str, words)], catch_exceptions=False)


def test_flags_become_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    done = invoke(
        path,
        "--model",
        "resnet18",
        "--weights",
        "IMAGENET1K_V1",
        "--data",
        "folder",
        "--root",
        "/data/mine",
        "--image-size",
        "160",
        "--target",
        "tensorrt,openvino",
        "--qat-epochs",
        "0",
    )
    assert done.exit_code == 0 and f"python -m compress ptq --recipe {path}" in done.output
    recipe = load_recipe(path)
    assert (recipe.model.name, recipe.model.weights, recipe.train.epochs) == ("resnet18", "IMAGENET1K_V1", 0)
    assert (recipe.data.name, recipe.data.root, recipe.data.image_size) == ("folder", "/data/mine", 160)
    assert recipe.quantization.targets == recipe.bench.engines == ("tensorrt", "openvino") and recipe.qat is None


def test_without_flags_it_is_the_digits(tmp_path):
    assert invoke(tmp_path / "r.yaml").exit_code == 0
    assert load_recipe(tmp_path / "r.yaml").data.name == "digits"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--target", "tensorrrt"], "did you mean 'tensorrt'"),
        (["--task", "regression"], "one of: classification"),
        (["--data", "folder"], "data.root is missing"),
    ],
)
def test_what_is_refused_leaves_no_file(tmp_path, words, match):
    with pytest.raises(RecipeError, match=match):
        invoke(tmp_path / "r.yaml", *words)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_with_force(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("mine")
    with pytest.raises(RecipeError, match="--force"):
        invoke(path)
    assert path.read_text() == "mine"
    assert invoke(path, "--force").exit_code == 0 and load_recipe(path)


def test_a_name_of_two_lines_adds_no_key(tmp_path):
    assert invoke(tmp_path / "r.yaml", "--model", "timm:a\nqat: null", "--data", "digits").exit_code == 0
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.model.name == "timm:a\nqat: null" and recipe.qat is not None
