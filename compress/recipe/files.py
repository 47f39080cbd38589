"""Recipes found by path or name, as trees.

Without torch, so that a missing recipe is refused at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.errors import RecipeError, near_misses
from compress.files import expand_user
from compress.support.limits import RECIPE_BYTES
from compress.support.safe_yaml import load_yaml


def read_recipe(recipe: Path | str) -> tuple[Path, Any]:
    """Path and tree of a recipe, over those of its `base`.

    Raises:
        RecipeError: missing, empty, no YAML, or extending itself.
    """
    path = find_recipe(recipe)
    tree = _extended(_read(path), path, ())
    if tree is None:
        raise RecipeError(
            f"{path} is empty; a recipe names at least its model, such as `model: {{name: resnet18}}`. "
            f"`recipes --keys` lists all keys, `recipes resnet50` shows a whole recipe"
        )
    return path, tree


def find_recipe(recipe: Path | str) -> Path:
    """Return the path of a recipe given by path or name.

    Raises:
        RecipeError: none; names near misses.
    """
    given = expand_user(recipe)
    name = given.name if given.suffix in {".yaml", ".yml"} else f"{given.name}.yaml"
    candidates = [given] if given.suffix else []
    if len(given.parts) == 1:
        candidates += [folder / name for folder in recipe_folders()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(recipe_names())
    hint = near_misses(name.removesuffix(".yaml"), known)
    raise RecipeError(f"no recipe {str(recipe)!r}{hint} (neither a file nor one of: {', '.join(known)})")


def recipe_folders() -> list[Path]:
    """./recipes, then those shipped with compress."""
    package = Path(__file__).parents[1]
    return [f for f in (Path("recipes"), package / "recipes", package.parent / "recipes") if f.is_dir()]


def recipe_names() -> list[str]:
    """Return the names of all recipes that can be found by name."""
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return load_yaml(file.read(RECIPE_BYTES + 1).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None
    except ValueError as error:
        raise RecipeError(f"{path} is refused: {error}") from None


def _extended(tree: object, path: Path, extending: tuple[Path, ...]) -> object:
    if not isinstance(tree, dict) or "base" not in tree:
        return tree
    chain = (*extending, path.resolve())
    name = tree["base"]
    if not isinstance(name, str):
        raise RecipeError(f"{path}: base is {name!r}; it must be the path or the name of a recipe")
    beside = path.parent / name
    base = beside if beside.is_file() else find_recipe(name)
    if base.resolve() in chain:
        raise RecipeError(f"{path}: base is {name!r}, which extends this recipe itself; remove one of the two keys")
    below = _extended(_read(base), base, chain)
    if not isinstance(below, dict):
        raise RecipeError(f"{base} holds a {type(below).__name__}; a recipe is a mapping, such as model: {{...}}")
    return _merged(below, {key: value for key, value in tree.items() if key != "base"})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Section by section; lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
