"""A full disk and a folder that may not be written to end a command in one sentence."""

import re

import pytest

from tests.hostile.disk import read_only, room_for

OPTIONS = ("--model", "resnet18", "--data", "digits", "--force")


def test_a_full_disk(compress, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    assert compress("init", str(recipe), *OPTIONS).returncode == 0
    before = recipe.read_bytes()
    with room_for(10):
        done = compress("init", str(recipe), *OPTIONS, "--epochs", "3")
    assert done.returncode == 2 and recipe.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert done.stderr == f"error {recipe}: file too large; make room and run it again: no file is half-written\n"


@pytest.mark.parametrize("arguments", [("init", "{}/older", *OPTIONS), ("report", "{}/run")])
def test_a_read_only_folder(compress, tmp_path, arguments):
    assert compress("init", str(tmp_path / "recipe.yaml"), *OPTIONS).returncode == 0  # imports what it needs
    with read_only() as folder:
        done = compress(*(argument.format(folder) for argument in arguments))
    assert done.returncode == 2
    assert re.fullmatch(rf"error {folder}/\S+: permission denied; name a place that .* write to\n", done.stderr)
