"""The number of classes that is found without the images is the one that the loaded data have."""

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from compress import DataSpec, load_data
from compress.cli.app import app
from compress.cli.networks import chosen_recipe, network_of
from compress.data.load import class_count
from compress.errors import DataError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for name in ("ant", "bee", "cow"):
        for part in ("train", "val"):
            (root / part / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(root / part / name / "1.png")
    return root


@pytest.mark.parametrize(
    "values", [{"name": "digits"}, {"name": "shapes"}, {"name": "shapes", "num_classes": 7}, {"name": "folder"}]
)
def test_it_is_the_count_of_the_loaded_data(values, pictures):
    spec = DataSpec(**values, root=str(pictures))
    assert class_count(spec) == load_data(spec).train.num_classes


@pytest.mark.parametrize(("name", "count"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_need_not_be_here(name, count):
    """The published counts of both data sets; tests of the reader compare them with files."""
    assert class_count(DataSpec(name=name, root="nowhere")) == count


def test_a_folder_that_is_not_here_needs_a_number():
    with pytest.raises(DataError, match=r"no folder .*nowhere/train: set data.root .*data.num_classes"):
        class_count(DataSpec(name="folder", root="nowhere"))
    assert class_count(DataSpec(name="folder", root="nowhere", num_classes=37)) == 37


@pytest.mark.parametrize("values", [{"name": "digits"}, {"name": "folder"}, {"name": "cifar10"}])
def test_another_number_is_refused(values, pictures):
    with pytest.raises(DataError, match="num_classes is 9, but"):
        class_count(DataSpec(**values, root=str(pictures), num_classes=9))


def test_commands_see_the_recipes_classes(tmp_path, monkeypatch):
    """The classifier of ResNet-18 has 512 weights for each of the ten digits."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--recipe", "resnet18", "--set", "data.image_size=32", "--json"]

    def document(*command: str):
        done = CliRunner().invoke(app, [*command, *arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert document("inspect", "model")["layers"][-1]["weight_elements"] == 5120
    bound = document("roofline", "--device", "a100", "--batch-size", "1")["roofline"]
    assert bound["rows"][-1]["macs"] == 5120
    assert document("receptive-field")["rows"]


def test_the_network_is_that_of_the_recipe_or_has_the_classes_of_imagenet():
    small = ["data.image_size=32"]
    assert network_of(chosen_recipe("resnet18", None, small)).fc.out_features == 10
    assert network_of(chosen_recipe("resnet18", None, [*small, "data.name=shapes"])).fc.out_features == 20
    assert network_of(chosen_recipe(None, "resnet18", [])).fc.out_features == 1000
    assert network_of(chosen_recipe(None, "resnet18", ["model.num_classes=5"])).fc.out_features == 5
    assert network_of(chosen_recipe("resnet50-imagenet", None, []), weights=False).fc.out_features == 1000
