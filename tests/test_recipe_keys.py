"""The reference of recipe keys: complete, in step with recipes/README.md, and true of what the recipe takes."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from compress import Recipe
from compress.errors import RecipeError
from compress.quantization.spec import ActivationCalibrator
from compress.recipe.keys import recipe_keys, recipe_keys_markdown
from compress.recipe.tree import parse_recipe

KEYS = recipe_keys()
PAGE = Path(__file__).parent.parent / "recipes" / "README.md"


def test_page_is_in_step():
    text = PAGE.read_text(encoding="utf-8")
    assert text == recipe_keys_markdown(), "python -m compress recipes --keys > recipes/README.md"


def test_every_key_is_explained():
    assert not [key for key in KEYS if not key.about or "None" in key.about]
    assert len({(key.section, key.name) for key in KEYS}) == len(KEYS)


def leaves(value, path=""):
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, name)
        else:
            yield name


def test_every_key_of_a_recipe_is_listed():
    listed = {f"{key.section}.{key.name}".removeprefix(".") for key in KEYS}
    for name in leaves(Recipe()):
        section, _, key = name.partition(".")
        shared = section in {"qat", "finetune"} and f"train.{key}" in listed
        assert name in listed or shared, name


@pytest.mark.parametrize("key", [k for k in KEYS if k.section and "[]" not in k.section and k.default])
def test_defaults_are_the_recipes_own(key):
    tree = {}
    here = tree
    for part in key.section.split("."):
        here = here.setdefault(part, {})
    plain = parse_recipe(tree)  # a section whose default is null is present now
    here[key.name] = yaml.safe_load(key.default)
    assert parse_recipe(tree) == plain


def test_choices_are_named():
    (calibrator,) = [k for k in KEYS if k.section == "quantization.activations" and k.name == "calibrator"]
    assert calibrator.kind == " or ".join(f"`{name}`" for name in get_args(ActivationCalibrator))


def test_a_section_alone_is_a_part_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    for section, inner in (("qat", ["qat"]), ("sparsity", ["sparsity", "sparsity.rules[]"])):
        text = recipe_keys_markdown(section)
        assert text in page and re.findall(r"^## (.+)", text, flags=re.MULTILINE) == inner
    with pytest.raises(RecipeError, match="'quantisation' is no section of a recipe, did you mean 'quantization'"):
        recipe_keys_markdown("quantisation")
